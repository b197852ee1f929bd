"""The stage regenerate: answers in order, every supervised token the target's own, resumable to the same bytes."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.configs.schema import Deployment
from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Request, RequestOutput
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import dialogues, regenerate, resolve
from slipstream.tasks.conversations import ConversationRecord, read_conversations, resume_conversations
from slipstream.tasks.facts import prompts_path
from slipstream.tasks.prompts import Prompt, assign_splits, load_prompts
from slipstream.tasks.stage import run_stage

PROMPTS = {
    "one": ["what is it"],
    "two": ["say the word", "and then?"],
    "three": ["list the hands"],
    "four": ["why", "how", "when"],
    "five": ["the end"],
    "six": ["another one"],
}
Configure = Callable[..., Deployment]


@pytest.fixture(scope="module")
def targets(chats: ModuleType, tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """targets(family): a tiny random target whose template is of that family."""
    made: dict[str, Path] = {}

    def one(family: str) -> Path:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family] = chats.save_chat_target(directory, tiny, template=chats.TEMPLATES[family])
        return made[family]

    return one


@pytest.fixture
def configure(targets: Callable[[str], Path], chats: ModuleType, tmp_path: Path) -> Configure:
    """configure(family, prompts, **data): a deployment whose target is resolved already."""

    def one(family: str = "roles", prompts: dict[str, list[str]] | None = None, **data: Any) -> Deployment:
        file = chats.write_prompts(tmp_path / "prompts.jsonl", prompts or PROMPTS)
        config = Deployment(
            target={"source": str(targets(family))},
            data={"prompts": str(file), "max_new_tokens": 12, "batch_size": 3, **data},
            host={"workdir": tmp_path / f"run {family}", "cache_dir": tmp_path / "cache"},
            server={"max_context_tokens": 250},
        )
        run_stage(resolve.STAGE, config, config.host.workdir)
        return config

    return one


def go(config: Deployment) -> Any:
    return run_stage(regenerate.STAGE, config, config.host.workdir)


def conversations(config: Deployment) -> list[ConversationRecord]:
    return read_conversations(config.host.workdir / "regenerate" / regenerate.CONVERSATIONS)


class ScriptedEngine:
    """Stands in for the engine: says the same answer to every prompt, a token a step, and ends it.

    A random target hardly ever ends an answer, so what follows a whole answer is tested with this one.
    """

    def __init__(self, answer: list[int], max_context_tokens: int = 250) -> None:
        self.answer = answer
        self.config = EngineConfig(max_context_tokens=max_context_tokens)
        self.said: dict[str, int] = {}

    def add_request(self, request: Request) -> None:
        assert request.request_id not in self.said
        self.said[request.request_id] = 0

    @property
    def has_work(self) -> bool:
        return bool(self.said)

    def step(self) -> list[RequestOutput]:
        outputs = []
        for name, said in list(self.said.items()):
            self.said[name] += 1
            over = self.said[name] == len(self.answer)
            outputs.append(RequestOutput(name, [self.answer[said]], "stop" if over else None))
            if over:
                del self.said[name]
        return outputs


def scripted(monkeypatch: pytest.MonkeyPatch, config: Deployment, text: str, **sizes: int) -> list[int]:
    """Lets the stage run with a scripted engine. Returns the answer's ids."""
    answer = [*ChatTokenizer(Path(config.target.source)).encode(text), 2]
    monkeypatch.setattr(regenerate, "make_engine", lambda *_: ScriptedEngine(answer, **sizes))
    return answer


def test_every_prompt_is_answered_in_order_with_the_engines_own_tokens(configure: Configure) -> None:
    config = configure()
    result = go(config)
    records = conversations(config)
    assert [r.id for r in records] == list(PROMPTS)
    tokenizer = ChatTokenizer(Path(config.target.source))
    engine = regenerate.make_engine(Path(config.target.source), config)
    for record in records:
        prompt = tokenizer.encode_chat([{"role": "user", "content": PROMPTS[record.id][0]}])
        assert record.token_ids[: len(prompt)] == prompt
        assert record.prompt_tokens == len(prompt)
        (alone,) = engine.generate([prompt], dialogues.SamplingParams(max_tokens=12))
        assert record.token_ids[len(prompt) :] == alone.token_ids
        assert record.loss_mask == [0] * len(prompt) + [1] * len(alone.token_ids)
        assert record.finish_reason == alone.finish_reason
    figures = result.figures
    assert figures["conversations"] == figures["train"] + figures["holdout"] == 6
    assert figures["holdout"] == 1
    assert figures["supervised_tokens"] == sum(sum(r.loss_mask) for r in records)
    assert figures["supervised_share"] == pytest.approx(
        figures["supervised_tokens"] / sum(len(r.token_ids) for r in records), abs=1e-4
    )
    assert sum(figures["finish_reasons"].values()) == 6
    assert figures["truncated_share"] == pytest.approx(figures["finish_reasons"].get("length", 0) / 6, abs=1e-4)
    assert figures["turns_left_out"] == 3  # answers that were cut off are not continued
    assert "[bold green]" in figures["sample"]
    assert not (config.host.workdir / "regenerate" / regenerate.UNSORTED).exists()


def test_the_split_is_by_hash_and_written_down(configure: Configure) -> None:
    config = configure(holdout_fraction=0.4)
    go(config)
    prompts = [Prompt(key, "test", tuple(turns)) for key, turns in PROMPTS.items()]
    assert {r.id: r.split for r in conversations(config)} == assign_splits(prompts, 0.4, 0)


def test_later_turns_are_asked_on_the_models_own_history(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure()
    answer = scripted(monkeypatch, config, "an apple")
    result = go(config)
    tokenizer = ChatTokenizer(Path(config.target.source))
    records = {r.id: r for r in conversations(config)}
    assert list(records) == list(PROMPTS)
    assert result.figures["turns_left_out"] == 0
    assert result.figures["truncated_share"] == 0.0
    for name, turns in PROMPTS.items():
        chat = []
        for turn in turns:
            chat += [{"role": "user", "content": turn}, {"role": "assistant", "content": "an apple"}]
        whole = tokenizer.encode_chat(chat, add_generation_prompt=False)
        assert records[name].token_ids == whole[: len(records[name].token_ids)]
        supervised = [t for t, on in zip(records[name].token_ids, records[name].loss_mask, strict=True) if on]
        assert supervised == answer * len(turns)
    assert "when" in result.figures["sample"]  # the conversation with the most answers is the one that is shown


def test_a_full_context_leaves_later_turns_out(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure()
    texts = ["why", "an apple", "how", "an apple", "when"]
    chat = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    third = len(ChatTokenizer(Path(config.target.source)).encode_chat(chat))
    answer = scripted(monkeypatch, config, "an apple", max_context_tokens=third)
    result = go(config)
    answers = {r.id: sum(r.loss_mask) // len(answer) for r in conversations(config)}
    assert answers["two"] == 2
    assert answers["four"] == 2  # the third question no longer fits
    assert result.figures["turns_left_out"] == 1


def test_a_template_that_rewrites_history_gives_one_conversation_a_turn(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thought that the target wrote is not in its history when the second question comes."""
    config = configure("thoughts")
    own = scripted(monkeypatch, config, "it is round THINKan apple")
    go(config)
    records = conversations(config)
    assert [r.id for r in records if r.id.startswith(("two", "four"))] == ["two", "two#1", "four", "four#1", "four#2"]
    for record in records:
        assert [t for t, on in zip(record.token_ids, record.loss_mask, strict=True) if on] == own
        assert record.token_ids[record.prompt_tokens :] == own


def test_sampled_answers_differ_by_sample_and_not_by_company(configure: Configure) -> None:
    config = configure(temperatures=(1.0, 1.0), top_p=0.95, seed=7)
    go(config)
    records = {r.id: r for r in conversations(config)}
    train = [key for key in PROMPTS if records[key].split == "train"]
    assert len(train) < len(PROMPTS)  # held-out prompts are answered once
    assert set(records) == {*PROMPTS, *(f"{key}~1" for key in train)}
    assert all(records[f"{key}~1"].split == "train" for key in train)
    assert any(records[key].token_ids != records[f"{key}~1"].token_ids for key in train)
    fewer = configure(temperatures=(1.0, 1.0), top_p=0.95, seed=7, prompts={k: PROMPTS[k] for k in ("six", "one")})
    go(fewer)
    for record in conversations(fewer):
        assert record.token_ids == records[record.id].token_ids


def test_an_interrupted_run_resumes_to_the_same_bytes(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = configure()
    go(config)
    file = config.host.workdir / "regenerate" / regenerate.CONVERSATIONS
    whole = file.read_bytes()
    (config.host.workdir / "regenerate").rename(tmp_path / "first")

    written: list[str] = []

    def dies_after_three(stream: Any, record: ConversationRecord) -> None:
        if len(written) == 3:
            stream.write(record.line()[:30])  # the line that the kill tore
            stream.flush()
            raise KeyboardInterrupt
        written.append(record.id)
        stream.write(record.line())

    with monkeypatch.context() as patch:
        patch.setattr(regenerate, "append", dies_after_three)
        with pytest.raises(KeyboardInterrupt):
            go(config)
    assert not (config.host.workdir / "regenerate").exists()

    asked: list[str] = []
    add = dialogues.Engine.add_request

    def noting(self: Any, request: Request) -> None:
        asked.append(request.request_id)
        add(self, request)

    monkeypatch.setattr(dialogues.Engine, "add_request", noting)
    result = go(config)
    assert sorted(asked) == sorted(set(PROMPTS) - set(written))
    assert result.figures["resumed"] == 3
    assert file.read_bytes() == whole


def test_a_torn_last_line_is_cut_off_and_a_torn_middle_is_an_error(tmp_path: Path) -> None:
    record = ConversationRecord("a", "test", "train", [1, 2], [0, 1], 1, "stop")
    file = tmp_path / "c.jsonl"
    file.write_text(record.line() + record.line()[:20])
    assert resume_conversations(file) == {"a": record}
    assert file.read_text() == record.line()
    file.write_text(record.line()[:20] + "\n" + record.line())
    with pytest.raises(SlipstreamError, match=r"c\.jsonl:1 is not a conversation"):
        resume_conversations(file)
    file.write_text(json.dumps({**json.loads(record.line()), "loss_mask": [1]}) + "\n")
    with pytest.raises(SlipstreamError, match="2 tokens, 1 mask values"):
        read_conversations(file)


def test_too_long_a_prompt_is_named(configure: Configure) -> None:
    with pytest.raises(SlipstreamError, match="prompt 'long' has") as error:
        go(configure(prompts={"long": ["word " * 60], "short": ["x"]}, max_prompt_tokens=100))
    assert "data.max_prompt_tokens" in error.value.expected


def test_changed_prompts_are_answered_again(configure: Configure) -> None:
    go(configure())
    assert go(configure()).status == "skipped"
    assert go(configure(prompts={**PROMPTS, "seven": ["new"]})).status == "done"


# ---- prompt sets


def test_the_set_that_ships() -> None:
    prompts = load_prompts("builtin")
    assert len(prompts) >= 200
    categories = {"question", "code", "math", "rewriting", "list", "writing", "extraction", "explanation"}
    assert {p.category for p in prompts} == categories
    texts = [turn for p in prompts for turn in p.turns]
    assert len(set(texts)) == len(texts)
    assert sum(len(p.turns) == 2 for p in prompts) >= 20
    # Varied: no two first turns share their first six words but for a few.
    starts = [" ".join(p.turns[0].split()[:6]).lower() for p in prompts]
    assert len(starts) - len(set(starts)) <= 3


def test_a_tenth_is_held_out_of_every_kind_of_order() -> None:
    prompts = load_prompts("builtin")
    splits = assign_splits(prompts, 0.1, 1)
    held_out = {key for key, split in splits.items() if split == "holdout"}
    assert len(held_out) == 32
    assert assign_splits(prompts[::-1], 0.1, 1) == splits
    assert {key for key, split in assign_splits(prompts, 0.1, 2).items() if split == "holdout"} != held_out
    assert {key for key, split in assign_splits(prompts, 0.2, 1).items() if split == "holdout"} > held_out


def test_one_prompt_cannot_be_split() -> None:
    with pytest.raises(SlipstreamError, match="cannot be split"):
        assign_splits([Prompt("a", "b", ("c",))], 0.5, 0)
    assert sorted(assign_splits([Prompt("a", "b", ("c",)), Prompt("d", "b", ("c",))], 0.01, 0).values()) == [
        "holdout",
        "train",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"id": "a", "category": "b"}', "turns must be"),
        ('{"id": "a", "category": "b", "turns": []}', "turns must be"),
        ('{"id": "a", "category": "b", "turns": [" "]}', "turns must be"),
        ('{"id": 3, "category": "b", "turns": ["x"]}', "id and category"),
        ('{"id": "ok", "category": "b", "turns": ["x"]}', "occurs twice"),
        pytest.param("[" * 100_000, "not JSON", id="deep"),
    ],
)
def test_a_bad_prompt_is_named_by_its_line(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "ok", "category": "b", "turns": ["x"]}\n\n' + line + "\n")
    with pytest.raises(SlipstreamError, match=words) as error:
        load_prompts(str(file))
    assert f"{file}:3" in error.value.found


def test_prompts_that_are_not_utf8_are_named_with_the_byte(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"id": "caf\xe9"}\n')
    with pytest.raises(SlipstreamError, match="not UTF-8: byte 0xe9 at offset 11") as error:
        load_prompts(str(file))
    assert str(file) in error.value.found


def test_no_prompts_at_all(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="does not exist"):
        load_prompts(str(tmp_path / "nothing.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SlipstreamError, match="holds no prompts"):
        load_prompts(str(tmp_path / "empty.jsonl"))
    assert prompts_path("builtin").is_file()


def test_other_line_separators_inside_a_prompt(tmp_path: Path) -> None:
    """JSON allows U+2028 and its like inside a text: only a newline ends a line."""
    turn = "one\u2028two\u0085three\u2029four"
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "a", "category": "c", "turns": [turn]}, ensure_ascii=False) + "\r\n")
    assert load_prompts(str(path)) == [Prompt("a", "c", (turn,))]

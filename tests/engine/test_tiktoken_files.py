"""Kimi's tokenizer against the library that its own class uses; no code of a checkpoint is run."""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.text_stop import StreamDetokenizer
from slipstream.tasks.target_whole import check_whole

PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
# In the form of the class that comes with such a checkpoint. Were it run, the test would see it.
CODE = f'''
import os
os.environ["SLIPSTREAM_TEST_RAN_CODE"] = "1"
raise RuntimeError("this code was run")
class TikTokenTokenizer:
    num_reserved_special_tokens = 256
    pat_str = "|".join([r"""{PATTERN}"""])
'''
TOOLS = (
    "<think>Where?</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "北京"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
)


@pytest.fixture(scope="module")
def files(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_test_module(Path(__file__).parent.parent / "checkpoints" / "kimi_tokenizer.py")


@pytest.fixture(scope="module")
def both(files: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatTokenizer, tiktoken.Encoding]:
    """(ours, the reference): the same ranks and marks."""
    directory = tmp_path_factory.mktemp("kimi")
    tokens = files.save_kimi_tokenizer(directory, code=CODE)
    names = {i: name for i, (name, _) in files.MARKS.items()}
    special = {names.get(i, f"<|reserved_token_{len(tokens) + i}|>"): len(tokens) + i for i in range(256)}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    reference = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return ChatTokenizer(directory), reference


Both = tuple[ChatTokenizer, tiktoken.Encoding]


def same(both: Both, text: str) -> list[int]:
    ours, reference = both
    ids = ours.encode(text)
    assert ids == reference.encode(text, allowed_special="all"), repr(text)
    assert ours.decode(ids, skip_special_tokens=False) == text
    return ids


def test_text_becomes_the_same_ids_and_comes_back(both: Both, files: ModuleType, monkeypatch: Any) -> None:
    ids = same(both, files.TEXT)
    assert len(ids) < len(files.TEXT.encode()) * 0.8  # bytes were joined
    assert both[0].vocab_size == both[1].n_vocab
    for text in (
        "中文English混合",
        "I'LL we're 's'S",
        "a\r\n\n  b   \n",
        "1234567",
        "  x",
        "\n\n",
        "",
        "aaaaaaaaaaaaaaaaa",
    ):
        same(both, text)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_text_becomes_the_same_ids(both: Both, files: ModuleType, data: st.DataObject) -> None:
    scripts = (
        "中文漢字ひらがなカタカナ한국어абвГДاللغةहिन्दीÀéßſŉǅʰ\u0301\u200d\u00a0\u2028\u3000\x85\x1c"
        "'\u2019sStTdDmMlLrReEvV0\uff19½²٣ \t\r\n"
    )
    pieces = st.one_of(
        st.text(st.sampled_from(scripts), max_size=8),
        st.text(
            max_size=4, alphabet=st.characters(codec="utf-8", max_codepoint=0x2FFF, exclude_categories=["Cn", "Cs"])
        ),
        st.sampled_from([name for name, _ in files.MARKS.values()]),
        st.integers(0, len(files.TEXT) - 12).map(lambda at: files.TEXT[at : at + 12]),
    )
    same(both, "".join(data.draw(st.lists(pieces, max_size=6))))


def test_marks_of_tools_and_thinking_survive_and_those_of_the_frame_can_be_left_out(
    both: Both, files: ModuleType
) -> None:
    ours, reference = both
    ids = same(both, TOOLS)
    marks = [i for i in ids if i >= reference.n_vocab - 256]
    assert [ours.decode([i], False) for i in marks] == [
        "<think>",
        "</think>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<|im_end|>",
    ]
    shown = ours.decode(ids)
    assert shown == TOOLS.removesuffix("<|im_end|>")  # special is what the files call so
    assert ours.encode(shown) == ids[:-1]
    for skip in (True, False):
        stream = StreamDetokenizer(ours, skip_special_tokens=skip)
        pieces = [stream.push([i]) for i in ids]
        assert "".join([*pieces, stream.finish()]) == ours.decode(ids, skip)
        assert not any("\ufffd" in piece for piece in pieces)
    same(both, f"<|reserved_token_{reference.n_vocab - 200}|>")


def test_chats_are_framed_as_the_template_says(both: Both) -> None:
    ours, reference = both
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    text = "<|im_user|>user<|im_middle|>Why?<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    assert ours.encode_chat(chat[:1]) == reference.encode(text, allowed_special="all")
    ids = ours.encode_chat(chat, add_generation_prompt=False)
    assert ours.marks.end == reference.encode_single_token("<|im_end|>")
    (start, stop), *none = ours.answer_spans(ids)
    assert not none
    assert ours.decode(ids[start:stop], False) == "</think>So.<|im_end|>"
    assert ours.stop_token_ids == (ours.marks.end,)


def test_the_template_runs_in_a_sandbox(files: ModuleType, tmp_path: Path) -> None:
    files.save_kimi_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(SlipstreamError, match="unsafe"):
        ChatTokenizer(tmp_path).encode_chat([{"role": "user", "content": "x"}])


def test_no_code_of_a_checkpoint_is_run(both: Both, files: ModuleType, tmp_path: Path) -> None:
    assert "SLIPSTREAM_TEST_RAN_CODE" not in os.environ  # `both` has the class beside its files
    files.save_kimi_tokenizer(tmp_path, code=CODE)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "OtherTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_kimi.Other", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(SlipstreamError, match=r"tokenization_kimi\.Other.*tokenization_kimi\.py would have to be run"):
        ChatTokenizer(tmp_path)
    assert "SLIPSTREAM_TEST_RAN_CODE" not in os.environ


@pytest.mark.parametrize(
    ("old", "new"),
    [(r"\p{N}{1,3}", r"\p{N}"), ("256", "128"), ("pat_str", "other"), ("class", "klass")],
)
def test_a_class_that_cuts_otherwise_is_refused(files: ModuleType, tmp_path: Path, old: str, new: str) -> None:
    files.save_kimi_tokenizer(tmp_path, code=CODE.replace(old, new))
    with pytest.raises(SlipstreamError, match=r"tokenization_kimi\.py"):
        ChatTokenizer(tmp_path)


def _spoil(directory: Path, what: str) -> None:
    ranks, config = directory / "tiktoken.model", directory / "tokenizer_config.json"
    lines = ranks.read_text().splitlines(keepends=True)
    values = json.loads(config.read_text())
    added = values["added_tokens_decoder"]
    if what == "base64":
        lines[7] = "@@@ 7\n"
    elif what == "rank left out":
        del lines[300]
    elif what == "byte left out":
        lines[3] = base64.b64encode(b"no byte").decode() + " 3\n"
    elif what == "token twice":
        lines[400] = lines[300].split()[0] + " 400\n"
    elif what == "id outside":
        added["3"] = added.pop(next(iter(added)))
    elif what == "name twice":
        added[list(added)[5]]["content"] = "[BOS]"
    else:
        values["eos_token"] = "<|nothing|>"
    ranks.write_text("".join(lines))
    config.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("base64", "line 8 is"),
        ("rank left out", "ranks are not 0 to"),
        ("byte left out", "of the 256 bytes"),
        ("token twice", "line 401 names a token that stands above"),
        ("id outside", "names the id 3"),
        ("name twice", "is named twice"),
        ("eos", "is no token"),
    ],
)
def test_damaged_files_are_named(files: ModuleType, tmp_path: Path, what: str, words: str) -> None:
    files.save_kimi_tokenizer(tmp_path)
    _spoil(tmp_path, what)
    with pytest.raises(SlipstreamError, match=words):
        ChatTokenizer(tmp_path)


def test_the_plan_sees_damaged_ranks(files: ModuleType, tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tmp_path)
    files.save_kimi_tokenizer(tmp_path)
    check_whole(tmp_path)
    _spoil(tmp_path, "base64")
    with pytest.raises(SlipstreamError, match="line 8 is"):
        check_whole(tmp_path)

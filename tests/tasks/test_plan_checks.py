"""Every check finds its contradiction, names the values with their origin, and lets it pass when it is switched off."""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from slipstream.engine.config import EngineConfig
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import checks_machine
from slipstream.tasks.checks import CHECKS, Contradictions, find, refuse
from slipstream.tasks.checks_deployment import MAX_NUM_STEPS
from slipstream.tasks.process import start_detached, stop_group
from slipstream.tasks.stage import Stage, run_stage

# id of the check, sections, words that the finding must hold
CASES: list[tuple[str, dict[str, dict[str, object]], tuple[str, ...]]] = [
    ("steps-served", {"speculation": {"num_steps": 9}}, ("speculation.num_steps = 9", "at most 8")),
    (
        "steps-chosen",
        {"server": {"choose_steps": True, "device": "cuda"}, "speculation": {"num_steps": 0}},
        ("server.choose_steps = True", "speculation.num_steps = 0", "write server.choose_steps: false"),
    ),
    (
        "steps-chosen",
        {"server": {"choose_steps": True, "device": "cpu"}},
        ("server.choose_steps = True", "server.device = cpu", "serve on a card"),
    ),
    ("steps-served", {"speculation": {"max_num_steps": 12}}, ("speculation.max_num_steps = 12", "at most 8")),
    (
        "context-budget",
        {"data": {"max_prompt_tokens": 700, "max_new_tokens": 500}},
        (
            "data.max_prompt_tokens = 700",
            "data.max_new_tokens = 500",
            "1200 tokens",
            "server.max_context_tokens = 1024",
        ),
    ),
    ("context-budget", {"benchmark": {"max_new_tokens": 1000}}, ("benchmark.max_new_tokens = 1000", "1256 tokens")),
    (
        "context-budget",
        {"server": {"max_context_tokens": 5000}},
        ("max_context_tokens = 5000", "4096 positions"),
    ),
    (
        "concurrency",
        {"benchmark": {"concurrency": 4}, "server": {"max_running_requests": 2}},
        (
            "benchmark.concurrency = 4",
            "server.max_running_requests = 2",
            "write benchmark.concurrency: 2; or write server.max_running_requests: 4",
        ),
    ),
    ("slots", {"capture": {"slots": [2, 16, 33]}}, ("[33] outside", "to 32")),
    ("slots", {"capture": {"slots": [2, 16, 2]}}, ("[2] named twice",)),
    ("draft-shape", {"draft": {"norm_before_fc": True, "fc_norm": True}}, ("norm_before_fc = True", "at most one")),
    ("draft-shape", {"draft": {"draft_vocab_size": 1001}}, ("draft_vocab_size = 1001", "1000 tokens")),
    ("draft-shape", {"draft": {"num_heads": 5}}, ("draft.num_heads = 5", "5 heads over 2")),
    (
        "ranks",
        {"server": {"tensor_parallel_size": 51}, "draft": {"draft_vocab_size": 50}},
        (
            "server.tensor_parallel_size = 51",
            "50 rows in the draft's vocabulary",
            "tensor_parallel_size: 50 or less",
        ),
    ),
    (
        "ranks",
        {"server": {"tensor_parallel_size": 65}},
        ("server.tensor_parallel_size = 65", "at most 64 ranks", "tensor_parallel_size: 64 or less"),
    ),
    ("samples", {"data": {"temperatures": (0.0, 0.7, 0.0)}}, ("temperatures = ", "2 greedy answers")),
    ("unused-keys", {"nccl": {"algo": "Ring"}}, ("nccl.algo = Ring", "server.engine = slipstream")),
    (
        "unused-keys",
        {"sglang": {"page_size_tokens": 64}},
        ("sglang.page_size_tokens = 64", "write server.engine: sglang"),
    ),
    ("prompts", {"data": {"prompts": "/nowhere/p.jsonl"}}, ("data.prompts", "/nowhere/p.jsonl does not exist")),
    ("prompts", {"benchmark": {"prompts": "/nowhere/b.jsonl"}}, ("benchmark.prompts", "/nowhere/b.jsonl")),
    ("prompts", {"benchmark": {"num_prompts": 10_000}}, ("benchmark.num_prompts = 10000", "data.holdout_fraction")),
]


@pytest.mark.parametrize(("check", "values", "words"), CASES)
def test_found_with_its_words_and_passed_when_off(
    tmp_path: Path,
    left_over: ModuleType,
    check: str,
    values: dict[str, dict[str, object]],
    words: tuple[str, ...],
) -> None:
    world = left_over.World(tmp_path, values)
    errors = world.plan().errors
    assert [error.check for error in errors] == [check]
    text = str(errors[0])
    for word in words:
        assert word in text
    assert "expected:" in text
    assert "do:" in text
    assert world.words(skip=(check,)) == []


def test_the_defaults_contradict_nothing(tmp_path: Path, left_over: ModuleType) -> None:
    assert left_over.World(tmp_path).words() == []


def test_too_few_training_steps_are_a_warning_with_its_reason(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"training": {"num_steps": 2}, "speculation": {"num_steps": 4}})
    plan = world.plan()
    assert plan.errors == ()
    (warning,) = plan.findings
    assert warning.severity == "warning"
    assert "training.num_steps = 2" in warning.found
    assert "steps 3 to 4" in warning.expected
    refuse(plan.findings)


def test_what_more_ranks_than_heads_and_an_auto_k_mean_is_a_warning(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"server": {"tensor_parallel_size": 8}})
    plan = world.plan()
    assert plan.errors == ()
    auto, heads = plan.findings
    assert "tune measures rounds of one rank" in auto.expected
    assert "server.tensor_parallel_size = 8" in heads.found
    assert "but the target has 4 query heads" in heads.found
    assert world.plan("server.tensor_parallel_size=4", "speculation.num_steps=2").findings == ()
    one = world.plan("server.tensor_parallel_size=1").costs["launch"].memory_bytes
    assert plan.costs["launch"].memory_bytes > one + 7 * (512 << 20)  # an interpreter with torch on each


def test_a_wheel_without_a_pin(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"target": {"source": "pypi://other==1.0"}})
    (error,) = world.plan().errors
    assert error.check == "pin"
    assert "target.sha256 = null" in error.found
    assert world.words("target.sha256=" + "a" * 64) == []


def test_a_digest_that_nothing_is_compared_with_is_named(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    (warning,) = world.plan("target.sha256=" + "a" * 64).findings
    assert (warning.check, warning.severity) == ("pin", "warning")
    assert "nothing is compared with it" in warning.found


def test_only_the_very_word_means_the_prompts_that_ship(tmp_path: Path, left_over: ModuleType) -> None:
    (error,) = left_over.World(tmp_path).plan("data.prompts=builtin-holdout").errors
    assert "builtin-holdout does not exist" in error.found


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_local_target_that_is_not_whole(tmp_path: Path, left_over: ModuleType, missing: str) -> None:
    world = left_over.World(tmp_path)
    (world.target / missing).unlink()
    (error,) = world.plan().errors
    assert error.check == "target"
    assert missing in error.found


def test_a_target_that_the_engine_cannot_run(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    config = json.loads((world.target / "config.json").read_text())
    (world.target / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    (error,) = world.plan().errors
    assert "attention_bias" in error.found


def edit_config(directory: Path, **values: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


TENSOR = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
WHOLE = len(TENSOR).to_bytes(8, "little") + TENSOR + bytes(8)
UNSERVED: dict[str, tuple[Callable[[Path], object], str]] = {
    "architecture": (lambda d: edit_config(d, architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
    "type": (lambda d: edit_config(d, hidden_size="64"), "hidden_size = '64'"),
    "no heads": (lambda d: edit_config(d, num_attention_heads=0), "num_attention_heads = 0"),
    "data cut": (lambda d: (d / "model.safetensors").write_bytes(WHOLE[:-1]), "its header says"),
    "header cut": (lambda d: (d / "model.safetensors").write_bytes(WHOLE[:30]), "model.safetensors cannot be read"),
    "empty": (lambda d: (d / "model.safetensors").write_bytes(b""), "model.safetensors cannot be read"),
    "no header": (lambda d: (d / "model.safetensors").write_bytes(b"weights"), "model.safetensors cannot be read"),
    "tokenizer": (lambda d: (d / "tokenizer.json").write_text("{"), "tokenizer.json is not readable as JSON"),
    "template": (lambda d: (d / "chat_template.jinja").unlink(), "has no chat template"),
}


@pytest.mark.parametrize("what", list(UNSERVED))
@pytest.mark.parametrize("resolved", [False, True])
def test_a_target_that_cannot_be_served(tmp_path: Path, left_over: ModuleType, what: str, resolved: bool) -> None:
    world = left_over.World(tmp_path)
    if resolved:
        world.resolve()
    damage, words = UNSERVED[what]
    damage(world.target)
    (error,) = world.plan().errors
    assert error.check == "target"
    assert words in error.found


def test_a_resolved_target_of_another_kind_below_a_relative_workdir(
    tmp_path: Path, left_over: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world = left_over.World(tmp_path, {"target": {"source": "hf://org/name@abc"}, "host": {"workdir": "work"}})
    model = world.workdir / "resolve" / "model"
    stage = Stage("resolve", 1, (), ("target",), lambda context: {"model_dir": str(model)})
    run_stage(stage, world.plan().loaded.deployment, world.workdir)
    shutil.copytree(world.target, model)
    assert world.plan().errors == ()
    (model / "model.safetensors").write_bytes(WHOLE[:-1])
    (error,) = world.plan().errors
    assert "its header says" in error.found


def test_whole_weights_and_a_template_in_the_tokenizers_options_are_fine(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    (world.target / "model.safetensors").write_bytes(WHOLE)
    (world.target / "chat_template.jinja").unlink()
    (world.target / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert world.plan().errors == ()


def test_a_prompt_file_with_a_broken_line(tmp_path: Path, left_over: ModuleType) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "a", "category": "x", "turns": ["hello"]}\n{"id": "b"\n')
    (error,) = left_over.World(tmp_path, {"data": {"prompts": str(prompts)}}).plan().errors
    assert f"{prompts}:2" in error.found


# ---- the machine -----------------------------------------------------------------------------------------------------


def needed(name: str) -> Stage:
    return Stage(name, 1, (), ("capture",), lambda context: {})


def test_a_disk_that_is_too_small(tmp_path: Path, left_over: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    world = left_over.World(tmp_path)
    assert world.plan(stages=(needed("extract"),)).errors == ()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checks_machine.shutil, "disk_usage", lambda path: usage)
    (error,) = world.plan(stages=(needed("extract"),)).errors
    assert error.check == "disk"
    assert "1.0 kB free" in error.found
    assert world.plan(stages=()).errors == ()  # nothing to be made again, nothing to be written
    assert world.plan(stages=(needed("extract"),), skip=("disk",)).errors == ()


def test_memory_that_is_too_small(tmp_path: Path, left_over: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    world = left_over.World(tmp_path)
    memory = psutil.virtual_memory()
    busy = memory._replace(available=1000)
    monkeypatch.setattr(checks_machine.psutil, "virtual_memory", lambda: busy)
    plan = world.plan(stages=(needed("launch"),))
    assert [(f.check, f.severity) for f in plan.findings] == [("memory", "warning")]
    monkeypatch.setattr(checks_machine.psutil, "virtual_memory", lambda: busy._replace(total=2000))
    (error,) = world.plan(stages=(needed("launch"),)).errors
    assert "stage launch" in error.found
    assert world.plan(stages=(needed("launch"),), skip=("memory",)).errors == ()


def test_a_far_host_is_not_judged_by_this_machine(
    tmp_path: Path, left_over: ModuleType, monkeypatch: pytest.MonkeyPatch, taken_port: int
) -> None:
    far = {
        "host": {"kind": "ssh", "address": "gpu1"},
        "server": {"port": taken_port},
        "target": {"source": "/models/there"},
    }
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checks_machine.shutil, "disk_usage", lambda path: usage)
    world = left_over.World(tmp_path, far)
    plan = world.plan(stages=(needed("extract"),))
    assert [(f.check, f.severity) for f in plan.findings] == [("host", "warning")]
    assert "gpu1" in plan.findings[0].found
    assert "slipstream doctor" in plan.findings[0].ways[0]
    assert world.plan(stages=(needed("extract"),), skip=("host",)).findings == ()
    far["host"] |= {"more": [{"address": "gpu2"}]}
    (tmp_path / "more").mkdir()
    _, more = left_over.World(tmp_path / "more", far).plan(stages=(needed("extract"),)).findings
    assert (more.check, more.severity) == ("host", "warning")
    assert "gpu2" in more.found
    assert "the first host only" in more.expected


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def test_a_port_taken_by_somebody_else(tmp_path: Path, left_over: ModuleType, taken_port: int) -> None:
    world = left_over.World(tmp_path, {"server": {"port": taken_port}})
    (error,) = world.plan().errors
    assert (error.check, error.fault) == ("port", "F15")
    assert f"server.port = {taken_port}" in error.found
    assert f"process {psutil.Process().pid}" in error.found
    assert world.words(skip=("port",)) == []


def test_a_port_held_by_our_own_server_is_no_contradiction(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    listen = (
        "import socket, sys, time\n"
        "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(1)\n"
        "open(sys.argv[1], 'w').write(str(s.getsockname()[1])); time.sleep(60)\n"
    )
    written = tmp_path / "port"
    server = start_detached(
        ["python3", "-c", listen, str(written)],
        log=tmp_path / "log",
        state_file=world.workdir / "server.state.json",
    )
    try:
        while not (written.is_file() and written.read_text()):
            assert server.exit_code() is None
        world.write({"server": {"port": int(written.read_text())}})
        assert world.words() == []
        (world.workdir / "server.state.json").rename(tmp_path / "elsewhere.json")
        assert "F15" in world.words()[0]
    finally:
        stop_group(server.identity, drain_seconds=5)


def test_an_address_that_is_not_ours(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"server": {"host": "192.0.2.1", "port": 8000}})
    (error,) = world.plan().errors
    assert "192.0.2.1" in error.found


# ---- the list --------------------------------------------------------------------------------------------------------


def test_ids_are_unique_and_every_check_has_words() -> None:
    ids = [check.id for check in CHECKS]
    assert len(set(ids)) == len(ids)
    assert all(check.words for check in CHECKS)


def test_every_check_is_exercised_by_a_test() -> None:
    """A check without a test could have stopped to find anything."""
    tested = {case[0] for case in CASES} | {
        "host",
        "disk",
        "memory",
        "port",
        "pin",
        "target",
        "steps-trained",
        "serving-slots",
        "launch-line",
        "target-shapes",  # these five: test_rank_memory.py
        "whole-target",
        "expert-groups",
        "gpu-memory",
        "nccl-tuned",
    }
    faults = {
        path.name.split("_")[1].upper().replace("F0", "F")
        for path in Path(__file__).parents[1].glob("faults/test_f*.py")
    }
    assert {check.id for check in CHECKS} <= tested | faults


def test_an_unknown_id_cannot_be_switched_off(tmp_path: Path, left_over: ModuleType) -> None:
    with pytest.raises(ValueError, match="no check is called"):
        left_over.World(tmp_path).plan(skip=("F99",))


def test_all_contradictions_come_in_one_error(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(
        tmp_path, {"speculation": {"num_steps": 1, "verify_width": 16}, "draft": {"max_context_tokens": 8}}
    )
    with pytest.raises(Contradictions) as caught:
        refuse(find(world.plan().facts))
    assert caught.value.exit_code == 2
    assert "2 contradictions" in str(caught.value)
    assert "F1:" in str(caught.value)
    assert "F14:" in str(caught.value)


def test_a_single_contradiction_keeps_its_parts(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"speculation": {"num_steps": 1, "verify_width": 16}})
    with pytest.raises(SlipstreamError) as caught:
        refuse(world.plan().findings)
    error: Any = caught.value
    assert (error.fault, error.exit_code) == ("F1", 2)
    assert "verify_width = 16" in error.found


def test_the_longest_chain_is_the_engines() -> None:
    EngineConfig(num_steps=MAX_NUM_STEPS)
    with pytest.raises(SlipstreamError):
        EngineConfig(num_steps=MAX_NUM_STEPS + 1)

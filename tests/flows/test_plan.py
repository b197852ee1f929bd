"""The plan: values with their origin, derived values against the things themselves, stages, and what nothing starts."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

from slipstream.configs.load import known_fields
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.models.dense import DenseModel
from slipstream.flows.plan import Plan, as_dict, derived_values, room, values
from slipstream.flows.plan_tables import seconds_words, show
from slipstream.tasks import derived
from slipstream.tasks.estimates import Cost
from slipstream.tasks.registry import NAMES, all_stages
from slipstream.tasks.stage import Stage, run_stage


def text_of(plan: Plan, width: int = 400) -> str:
    console = Console(file=StringIO(), width=width)
    show(plan, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def value_of(plan: Plan, name: str) -> str:
    (row,) = [row for row in derived_values(plan) if row.name == name]
    return row.value


def test_every_value_stands_with_its_origin(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"training": {"epochs": 3}})
    plan = world.plan("server.port=0")
    rows = {value.key: value for value in values(plan)}
    assert list(rows) == [key for key, _ in known_fields()]
    assert (rows["training.epochs"].value, rows["training.epochs"].origin) == (3, world.line("training.epochs"))
    assert rows["server.port"].origin == "--set server.port=0"
    assert rows["gates.min_speedup"].origin == "default"
    text = text_of(plan)
    for row in rows.values():
        if row.key.startswith(("sglang.", "nccl.")):
            assert row.key not in text  # nobody wrote anything for another engine
            continue
        assert row.key in text
        assert row.origin in text


def test_derived_values(tmp_path: Path, left_over: ModuleType) -> None:
    plan = left_over.World(tmp_path, {"speculation": {"num_steps": 3}, "draft": {"draft_vocab_size": 500}}).plan()
    assert value_of(plan, "verify width") == "4"
    assert value_of(plan, "accept length") == "1 to 4"
    assert value_of(plan, "capture slots") == "slot_2, slot_16, slot_29"
    assert value_of(plan, "slots for vllm 0.24.0") == "[2, 16, 29]"
    assert value_of(plan, "slots for sglang 0.5.14") == "[1, 15, 28]"
    assert value_of(plan, "hidden-state store").startswith(
        f"{4 * 64 * 2 + 5} bytes a token of an answer, {3 * 64 * 2 + 5}"
    )
    assert value_of(plan, "KV cache") == f"{2 * 32 * 2 * 16 * 2} bytes a token, draft {2 * 2 * 16 * 2}"
    text = text_of(plan)
    assert "slot_2, slot_16, slot_29" in text


def test_auto_lists_every_k(tmp_path: Path, left_over: ModuleType) -> None:
    plan = left_over.World(tmp_path, {"speculation": {"max_num_steps": 4}}).plan()
    assert value_of(plan, "num_steps (K)") == "0 1 2 3 4"
    assert value_of(plan, "verify width") == "1 2 3 4 5"


def test_an_engine_that_cannot_serve_the_draft_is_told(tmp_path: Path, left_over: ModuleType) -> None:
    plan = left_over.World(tmp_path, {"capture": {"slots": [0, 16, 29]}}).plan()
    assert "cannot capture slots [0]" in value_of(plan, "slots for sglang 0.5.14")
    assert value_of(plan, "slots for vllm 0.24.0") == "[0, 16, 29]"


def test_nothing_is_guessed_of_an_unknown_target(tmp_path: Path, left_over: ModuleType) -> None:
    plan = left_over.World(tmp_path, {"target": {"source": "hf://org/name@abc"}}).plan(stages=all_stages())
    for name in ("target", "capture slots", "hidden-state store", "KV cache", "draft parameters"):
        assert value_of(plan, name) == "unknown until resolve"
    assert all(row.needed is None for row in room(plan))
    assert seconds_words(plan.costs.get("extract")) == "unknown"
    assert "unknown until resolve" in text_of(plan)


@pytest.mark.parametrize("name", ["resolve", "extract"])
@pytest.mark.parametrize("content", ["{", "[]", "{}", "3", '{"config": [], "figures": [], "seconds": 1}'])
def test_a_damaged_manifest_does_not_end_the_plan(
    tmp_path: Path, left_over: ModuleType, name: str, content: str
) -> None:
    world = left_over.World(tmp_path)
    (world.workdir / name).mkdir(parents=True)
    (world.workdir / name / "manifest.json").write_text(content)
    plan = world.plan(stages=tuple(Stage(n, 1, (), ("target",), lambda _: {}) for n in ("resolve", "extract")))
    status = next(status for status in plan.statuses if status.name == name)
    assert status.why.startswith("damaged: manifest.json: ")
    assert not plan.errors
    assert as_dict(plan)["stages"]


def test_room_of_a_known_target_is_told_although_what_runs_writes_nothing(
    tmp_path: Path, left_over: ModuleType
) -> None:
    plan = left_over.World(tmp_path).plan(stages=(Stage("launch", 1, (), (), lambda _: {}, cached=False),))
    assert plan.needed == ("launch",)
    disk, memory = room(plan)
    assert disk.needed == 0
    assert memory.needed == plan.costs["launch"].memory_bytes > 0
    assert "unknown" not in text_of(plan).partition("Room")[2]


def test_stated_slots_need_no_target(tmp_path: Path, left_over: ModuleType) -> None:
    values = {"target": {"source": "hf://org/name@abc"}, "capture": {"slots": [1, 2]}}
    assert value_of(left_over.World(tmp_path, values).plan(), "capture slots") == "slot_1, slot_2"


def test_a_target_in_the_cache_is_known_before_resolve(tmp_path: Path, left_over: ModuleType) -> None:
    digest = "ab" * 32
    world = left_over.World(tmp_path, {"target": {"source": "pypi://some-model==1", "sha256": digest}})
    assert value_of(world.plan(), "target") == "unknown until resolve"
    cached = tmp_path / "cache" / "targets" / f"{digest}-bfloat16-v1"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text((world.target / "config.json").read_text())
    assert value_of(world.plan(), "capture slots") == "slot_2, slot_16, slot_29"


# ---- the formulas against the things themselves ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "switches", [{}, {"norm_before_fc": True}, {"fc_norm": True}, {"num_heads": 8, "num_kv_heads": 4}]
)
def test_draft_parameters_are_those_of_the_network(
    tmp_path: Path, left_over: ModuleType, switches: dict[str, object]
) -> None:
    plan = left_over.World(tmp_path, {"draft": {"draft_vocab_size": 300, "intermediate_size": 96, **switches}}).plan()
    assert plan.facts.target is not None
    assert plan.facts.slots is not None
    config = derived.draft_config(plan.loaded.deployment, plan.facts.target, plan.facts.slots)
    with torch.device("meta"):
        parameters = dict(Eagle3Network(config).named_parameters())
    embedding = parameters.pop("embed_tokens.weight").numel()
    assert derived.embedding_parameters(config) == embedding
    assert derived.trained_parameters(config) == sum(p.numel() for p in parameters.values())


@pytest.mark.parametrize("sizes", [{}, {"tie_word_embeddings": False}, {"family": "qwen3", "head_dim": 24}])
def test_target_parameters_are_those_of_the_model(tmp_path: Path, tiny: ModuleType, sizes: dict[str, object]) -> None:
    from slipstream.engine.model_config import ModelConfig

    directory = tiny.save_tiny(tmp_path / "t", **sizes)
    config = ModelConfig.from_dir(directory)
    expected = sum(p.numel() for p in tiny.tiny_hf(**sizes).parameters())
    assert derived.target_parameters(config) == expected
    assert isinstance(tiny.load_target(directory, torch.float32), DenseModel)


# ---- stages ----------------------------------------------------------------------------------------------------------


def test_the_stages_of_a_fresh_directory_are_all_needed(tmp_path: Path, left_over: ModuleType) -> None:
    plan = left_over.World(tmp_path).plan(stages=all_stages())
    assert plan.needed == NAMES
    text = text_of(plan)
    assert "has not run" in text
    assert "resolve runs first" in text
    assert "~" in text


def test_a_finished_stage_is_done_and_its_time_is_remembered(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    world.resolve()
    stage = Stage("resolve", 1, (), ("target",), lambda context: {})
    (status,) = world.plan(stages=(stage,)).statuses
    assert (status.state, status.why) == ("done", "unchanged")
    assert world.plan(stages=(stage,)).costs["resolve"].measured
    (status,) = world.plan("target.dtype=float32", stages=(stage,)).statuses
    assert status.state == "needed"
    assert "bfloat16 -> float32" in status.why


def test_words_of_a_time() -> None:
    assert seconds_words(Cost(12.4, 0, 0, measured=True)) == "12 s"
    assert seconds_words(Cost(600.0, 0, 0)) == "~10 min"
    assert seconds_words(Cost(36000.0, 0, 0)) == "~10.0 h"
    assert seconds_words(None) == "unknown"


def test_contradictions_come_last_and_in_full(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"speculation": {"num_steps": 1, "verify_width": 16}, "server": {"port": 1}})
    plan = world.plan("draft.max_context_tokens=5")
    assert len(plan.errors) >= 2
    end = text_of(plan)[-1500:]
    assert f"{len(plan.errors)} contradictions: nothing would be run" in end
    assert "F1:" in end
    assert "F14:" in end


def test_a_stage_whose_input_is_missing_is_a_contradiction(tmp_path: Path, left_over: ModuleType) -> None:
    def missing(_: object) -> dict[str, str]:
        raise FileNotFoundError(2, "No such file", "/nowhere")

    stage = Stage("extract", 1, (), (), lambda context: {}, external=missing)
    (error,) = left_over.World(tmp_path).plan(stages=(stage,)).errors
    assert "/nowhere" in error.found


def test_the_plan_for_programs_holds_the_same(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"speculation": {"num_steps": 1, "verify_width": 16}})
    made = json.loads(json.dumps(as_dict(world.plan(stages=all_stages()))))
    assert [stage["name"] for stage in made["stages"]] == list(NAMES)
    assert made["findings"][0]["fault"] == "F1"
    assert {"key": "speculation.verify_width", "value": 16, "origin": world.line("speculation.verify_width")} in made[
        "values"
    ]


def test_the_table_of_stages_says_what_the_modules_run() -> None:
    """Each module has the `run` that the table promises, and its STAGE is the table's."""
    code = (
        "from importlib import import_module; from slipstream.tasks.registry import STAGES\n"
        "for s in STAGES:\n"
        "    m = import_module(f'slipstream.tasks.{s.name}')\n"
        "    assert callable(m.run) and m.STAGE is s, s.name\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_planning_loads_no_torch_starts_nothing_and_writes_nothing(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code = f"""
import subprocess, sys
def refuse(*a, **k): raise AssertionError("plan started a process")
subprocess.Popen.__init__ = refuse
import os
os.fork = os.posix_spawn = refuse
from slipstream.flows.plan import make_plan
from slipstream.flows.plan_tables import show
from rich.console import Console
plan = make_plan({str(world.file)!r}, environ={{}})
show(plan, Console())
assert plan.facts.target is not None and len(plan.statuses) == 11
loaded = {{"torch", "transformers", "prefect", "fabric", "matplotlib", "fastapi"}} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plan_of_a_half_done_directory(tmp_path: Path, left_over: ModuleType) -> None:
    """What will be made again is not held against the deployment; what is used as it lies there is."""
    world = left_over.World(tmp_path)
    draft = world.draft((5, 6, 7))
    convert = Stage("convert", 1, (), ("capture",), lambda context: {})
    assert world.plan(stages=(convert,)).errors == ()
    (error,) = world.plan(stages=()).errors
    assert str(draft) in error.found
    deployment = world.plan().loaded.deployment
    run_stage(Stage("resolve", 1, (), ("target",), lambda context: {}), deployment, world.workdir)

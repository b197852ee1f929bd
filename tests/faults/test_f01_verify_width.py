"""F1: one step, topk 1, sixteen draft tokens. The incident's server cut sixteen to two and said so nowhere."""

from pathlib import Path
from types import ModuleType

import pytest

from slipstream.engine.engine_versions import READ, Engine
from slipstream.flows.plan import plan_command
from slipstream.tasks.contradictions import Finding

CAUGHT = [
    ("F1", "plan", "verify width 16 and num_steps 1 contradict: 2 rows to verify, not 16; three ways to write it"),
    ("F1", "plan --from-command", "verify width 16 contradicts num_steps 1 with topk 1 (width would be 2)"),
]


def test_plan_names_both_values_and_the_ways_to_agree(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"speculation": {"num_steps": 1, "topk": 1, "verify_width": 16}})
    (error,) = world.plan().errors
    assert error.fault == "F1"
    assert f"speculation.num_steps = 1 ({world.line('speculation.num_steps')})" in error.found
    assert f"speculation.verify_width = 16 ({world.line('speculation.verify_width')})" in error.found
    assert "2 rows to verify, not 16" in error.expected
    ways = " | ".join(error.ways)
    assert "leave verify_width out" in ways
    assert "verify_width: 2" in ways
    assert "num_steps: 15" in ways


def test_a_width_from_the_command_line_is_no_better(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"speculation": {"num_steps": 5}})
    (error,) = world.plan("speculation.verify_width=5").errors
    assert "--set speculation.verify_width=5" in error.found
    assert "write num_steps: 4 to keep the width 5" in error.ways


@pytest.mark.parametrize(("steps", "width"), [(0, 1), (1, 2), (5, 6), (8, 9)])
def test_agreeing_values_pass(tmp_path: Path, left_over: ModuleType, steps: int, width: int) -> None:
    values = {"speculation": {"num_steps": steps, "verify_width": width}, "training": {"num_steps": 8}}
    assert left_over.World(tmp_path, values).words() == []


def test_auto_has_no_single_width(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"speculation": {"num_steps": "auto", "verify_width": 6}})
    (error,) = world.plan().errors
    assert error.fault == "F1"
    assert "write num_steps: 5" in error.ways


def test_a_tree_is_refused(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"speculation": {"num_steps": 3, "topk": 4}})
    (error,) = world.plan().errors
    assert error.fault == "F1"
    assert "speculation.topk = 4" in error.found


def test_the_fault_passes_with_the_check_off(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"speculation": {"num_steps": 1, "topk": 1, "verify_width": 16}})
    assert world.words(skip=("F1",)) == []


# ---- a launch of SGLang, which is where it happened ------------------------------------------------------------------

LAUNCH = (
    "python3 -m sglang.launch_server --model-path /m --speculative-algorithm EAGLE3 --speculative-draft-model-path /d"
)


def launch_errors(flags: str, version: str | None, tmp_path: Path, skip: tuple[str, ...] = ()) -> list[Finding]:
    made = plan_command(f"{LAUNCH} {flags}", version, (f"host.workdir={tmp_path}",), environ={}, skip=skip)
    return [finding for finding in made.errors if finding.check in ("F1", "launch-line")]


def flags(steps: int, width: int) -> str:
    return f"--speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens={width}"


@pytest.mark.parametrize("version", [*READ[Engine.SGLANG], None, "nightly"])
def test_the_incidents_first_launch_is_refused_with_three_ways_to_write_it(tmp_path: Path, version: str | None) -> None:
    (error,) = launch_errors(flags(1, 16), version, tmp_path)
    assert error.fault == "F1"
    assert error.found.startswith("verify width 16 contradicts num_steps 1 with topk 1 (width would be 2): ")
    assert "speculation.num_steps = 1 (--speculative-num-steps (command))" in error.found
    assert "speculation.verify_width = 16 (--speculative-num-draft-tokens (command))" in error.found
    assert error.runbook == "wrong-flags.md"
    leave, width, steps = error.ways
    assert leave == "leave speculation.verify_width out (--speculative-num-draft-tokens): it is then 2"
    assert width == "write speculation.verify_width: 2 (--speculative-num-draft-tokens 2)"
    assert steps == "write speculation.num_steps: 15 (--speculative-num-steps 15) to keep the width 16"


@pytest.mark.parametrize(("steps", "width"), [(1, 2), (15, 16), (5, 6)])
def test_a_launch_that_agrees_passes(tmp_path: Path, steps: int, width: int) -> None:
    assert launch_errors(flags(steps, width), "0.5.9", tmp_path) == []


def test_each_of_the_three_ways_agrees(tmp_path: Path) -> None:
    leave = "--speculative-num-steps 1 --speculative-eagle-topk 1"
    for way in (leave, flags(1, 2), flags(15, 16)):
        assert launch_errors(way, "0.5.9", tmp_path) == []


def test_steps_left_out_do_not_start_at_all(tmp_path: Path) -> None:
    """One account of the incident calls steps 1 the default. It is none: SGLang stops at an assertion."""
    (error,) = launch_errors("--speculative-eagle-topk 1 --speculative-num-draft-tokens 16", "0.5.9", tmp_path)
    assert "speculation.num_steps unset" in error.found
    assert "a bare AssertionError" in error.found
    assert "write speculation.num_steps: 15 (--speculative-num-steps 15)" in error.ways


def test_the_fault_passes_a_launch_with_the_check_off(tmp_path: Path) -> None:
    assert launch_errors(flags(1, 16), "0.5.9", tmp_path, skip=("F1",)) == []

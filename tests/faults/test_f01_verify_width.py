"""F1: one step, topk 1, sixteen draft tokens. The incident's server cut sixteen to two and said so nowhere."""

from pathlib import Path
from types import ModuleType

import pytest

CAUGHT = [
    ("F1", "plan", "verify width 16 and num_steps 1 contradict: 2 rows to verify, not 16; three ways to write it"),
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

"""F2 and F3 at plan: the store or the draft of an earlier run was made from other slots than the deployment names.

The incident: a draft trained on (embedding, 3, 31), served on (3, 31, 59). All of it is three states wide.
"""

from pathlib import Path
from types import ModuleType

import pytest

CAUGHT = [
    ("F2", "plan", "store and draft hold slots [0, 3, 31], capture.slots are [3, 16, 31]"),
    ("F3", "plan", "the same slots in another order"),
]

SERVED = {"capture": {"slots": [3, 16, 31]}}


@pytest.mark.parametrize("made", ["store", "draft"])
def test_other_slots_are_found_by_name(tmp_path: Path, left_over: ModuleType, made: str) -> None:
    world = left_over.World(tmp_path, SERVED)
    path = getattr(world, made)((0, 3, 31))
    (error,) = world.plan().errors
    assert error.fault == "F2"
    assert str(path) in error.found
    assert "[0, 3, 31]" in error.found
    assert "[3, 16, 31]" in error.found
    assert any("capture.slots: [0, 3, 31]" in way for way in error.ways)
    assert any(str(path.parent) in way for way in error.ways)


@pytest.mark.parametrize("made", ["store", "draft"])
def test_the_same_slots_in_another_order_are_found(tmp_path: Path, left_over: ModuleType, made: str) -> None:
    world = left_over.World(tmp_path, {"capture": {"slots": [3, 31, 16]}})
    getattr(world, made)((3, 16, 31))
    (error,) = world.plan().errors
    assert error.fault == "F3"
    assert "another order" in error.found


def test_store_and_draft_are_both_named(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, SERVED)
    world.store((0, 3, 31))
    world.draft((2, 16, 29))
    assert len(world.words()) == 2


def test_auto_slots_are_compared_too(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    world.store((2, 16, 29))
    world.draft((2, 16, 29))
    assert world.words() == []
    world.store((3, 16, 29))
    (error,) = world.plan().errors
    assert "holds slots [3, 16, 29]; capture.slots = auto (default), which are [2, 16, 29]" in error.found


def test_a_draft_from_elsewhere_is_judged_by_its_ids(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, SERVED)
    draft = world.draft((5, 12, 20))
    (draft / "slipstream.json").unlink()
    (error,) = world.plan().errors
    assert error.fault == "F2"
    assert "[5, 12, 20]" in error.found


@pytest.mark.parametrize("made", ["store", "draft"])
def test_the_fault_passes_with_the_check_off(tmp_path: Path, left_over: ModuleType, made: str) -> None:
    world = left_over.World(tmp_path, SERVED)
    getattr(world, made)((0, 3, 31))
    assert world.words(skip=("F2",)) == []

"""F4: layer ids off by one between conventions. Slot k is id k for vLLM and id k - 1 for SGLang."""

import json
from pathlib import Path
from types import ModuleType

import pytest

CAUGHT = [
    ("F4", "plan", "top level = [1, 15, 28]: off by -1, expected [2, 16, 29]"),
]

KEY = "eagle_aux_hidden_state_layer_ids"
SLOTS = (2, 16, 29)


def rewrite(draft: Path, top: list[int] | None = None, nested: list[int] | None = None, *, drop: bool = False) -> None:
    """Changes the ids in a draft's config.json as a person with another engine in mind would."""
    file = draft / "config.json"
    config = json.loads(file.read_text())
    if top is not None:
        config[KEY] = top
    if nested is not None:
        config["eagle_config"][KEY] = nested
    if drop:
        del config[KEY]
    file.write_text(json.dumps(config))


def test_what_convert_writes_passes(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    world.draft(SLOTS)
    assert world.words() == []


def test_sglang_ids_where_vllm_reads(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    draft = world.draft(SLOTS)
    rewrite(draft, top=[1, 15, 28])
    (error,) = world.plan().errors
    assert error.fault == "F4"
    assert str(draft / "config.json") in error.found
    assert "top level = [1, 15, 28]" in error.found
    assert "vllm" in error.found
    assert "off by -1" in error.found
    assert "[2, 16, 29]" in error.expected


def test_vllm_ids_where_sglang_reads(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    rewrite(world.draft(SLOTS), nested=[2, 16, 29])
    (error,) = world.plan().errors
    assert error.fault == "F4"
    assert "eagle_config" in error.found
    assert "reads as slots [3, 17, 30]" in error.found
    assert "off by +1" in error.found
    assert "written [1, 15, 28]" in error.expected


def test_the_incidents_ids(tmp_path: Path, left_over: ModuleType) -> None:
    """[2, 30, 58] became [-1, 2, 30]: here with the depth of the test's target."""
    world = left_over.World(tmp_path)
    rewrite(world.draft(SLOTS), nested=[-1, 1, 15])
    (error,) = world.plan().errors
    assert error.fault == "F4"
    assert "[-1, 1, 15]" in error.found


def test_absent_ids_mean_the_engines_defaults(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"capture": {"slots": [3, 16, 29]}})
    rewrite(world.draft((3, 16, 29)), drop=True)
    (error,) = world.plan().errors
    assert error.fault == "F4"
    assert "absent" in error.found
    assert "[2, 16, 29]" in error.found


def test_a_draft_from_elsewhere_off_by_one(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    draft = world.draft(SLOTS)
    (draft / "slipstream.json").unlink()
    rewrite(draft, top=[1, 15, 28])
    assert [error.fault for error in world.plan().errors] == ["F4"]


@pytest.mark.parametrize("ids", [{"top": [1, 15, 28]}, {"nested": [2, 16, 29]}])
def test_the_fault_passes_with_the_check_off(tmp_path: Path, left_over: ModuleType, ids: dict[str, list[int]]) -> None:
    world = left_over.World(tmp_path)
    rewrite(world.draft(SLOTS), **ids)
    assert world.words(skip=("F4",)) == []

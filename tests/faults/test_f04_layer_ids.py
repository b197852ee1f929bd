"""F4: layer ids off by one between conventions. Slot k is id k for vLLM and id k - 1 for SGLang."""

import json
from pathlib import Path
from types import ModuleType

import pytest

CAUGHT = [
    ("F4", "plan", "top level = [1, 15, 28]: off by -1, expected [2, 16, 29]"),
    ("F4", "plan", "the same ids, SGLang 0.5.14: slots (2, 30, 58); 0.5.12.post1: (3, 31, 59)"),
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


# --- the engine that serves: one config.json means other slots to another version ---

KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {"num_hidden_layers": 61, "hidden_size": 7168},
}


def serving(tmp_path: Path, left_over: ModuleType, version: str, ids: list[int], trained: list[int]) -> ModuleType:
    """A draft of another trainer for Kimi-K2.5, to be served by this version of SGLang."""
    world = left_over.World(tmp_path)
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"hidden_size": 7168, "eagle_config": {KEY: ids}}))
    (world.target / "config.json").write_text(json.dumps(KIMI))
    server = {"engine": "sglang", "engine_version": version}
    world.write({"server": server, "draft": {"path": str(draft), "slots": trained}})
    return world


def found(world: ModuleType, skip: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    return [(f.fault, f.found) for f in world.plan(skip=skip).errors if f.check == "serving-slots"]


@pytest.mark.parametrize(
    ("version", "ids"),
    [
        ("0.5.12.post1", [1, 29, 57]),
        ("0.5.14", [1, 29, 57]),  # the shifted list means the same to every version
        ("0.5.14", [2, 30, 58]),
        ("0.5.23", [2, 30, 58]),
    ],
)
def test_ids_that_this_version_reads_as_trained(
    tmp_path: Path, left_over: ModuleType, version: str, ids: list[int]
) -> None:
    assert found(serving(tmp_path, left_over, version, ids, [2, 30, 58])) == []


@pytest.mark.parametrize(
    ("version", "ids", "trained", "gives"),
    [
        ("0.5.12.post1", [2, 30, 58], [2, 30, 58], "(3, 31, 59)"),  # lost about 0.1 of accept length
        ("0.5.14", [2, 30, 58], [3, 31, 59], "(2, 30, 58)"),  # trained on what an old release dumped
        ("0.5.12.post1", [0, 3, 31], [0, 3, 31], "(1, 4, 32)"),  # the embedding silently becomes slot 1
    ],
)
def test_ids_that_it_reads_otherwise(
    tmp_path: Path, left_over: ModuleType, version: str, ids: list[int], trained: list[int], gives: str
) -> None:
    world = serving(tmp_path, left_over, version, ids, trained)
    ((fault, words),) = found(world)
    assert fault == "F4"
    assert f"capture by sglang {version} (kimi_k25 target) would give slots {gives}" in words
    assert "no check of shapes can tell them apart" in words
    assert found(world, skip=("serving-slots",)) == []  # and nothing else sees it

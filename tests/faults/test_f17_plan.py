"""F17 at plan: the cache is stale. Target, tokenizer, template or slots changed since the extraction."""

import json
from pathlib import Path
from types import ModuleType

import pytest

CAUGHT = [
    ("F17", "plan", "target, tokenizer, template, dtype or slots changed since the extraction"),
]

CHANGES = {
    "target weights or config": (
        "model.safetensors",
        (4).to_bytes(8, "little") + b"  {}",
    ),  # of the same size: only the content tells
    "tokenizer": ("tokenizer.json", b'{"added_tokens": []}'),
    "chat template": ("chat_template.jinja", b"{{ messages | tojson }}"),
}


def finished(root: Path, left_over: ModuleType) -> object:
    world = left_over.World(root)
    world.resolve()
    world.store((2, 16, 29))
    assert world.words() == []
    return world


@pytest.mark.parametrize("what", list(CHANGES))
def test_what_changed_is_named(tmp_path: Path, left_over: ModuleType, what: str) -> None:
    world = finished(tmp_path, left_over)
    file, content = CHANGES[what]
    (world.target / file).write_bytes(content)
    (error,) = world.plan().errors
    assert error.fault == "F17"
    assert what in error.found
    for other in CHANGES.keys() - {what}:
        assert other not in error.found
    assert str(world.workdir / "extract") in error.ways[1]


def test_a_draft_of_another_target_is_found_too(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    draft = world.draft((2, 16, 29))
    assert world.words() == []
    (world.target / "chat_template.jinja").write_text("another")
    (error,) = world.plan().errors
    assert error.fault == "F17"
    assert str(draft) in error.found


def test_another_source_in_the_deployment(tmp_path: Path, left_over: ModuleType) -> None:
    world = finished(tmp_path, left_over)
    (error,) = world.plan("target.source=hf://org/other@abc").errors
    assert error.fault == "F17"
    assert f"target.source was {world.target}, is hf://org/other@abc" in error.found


def test_another_dtype_in_the_deployment(tmp_path: Path, left_over: ModuleType) -> None:
    world = finished(tmp_path, left_over)
    (error,) = world.plan("target.dtype=float32").errors
    assert error.fault == "F17"
    assert "target.dtype was bfloat16, is float32" in error.found


def test_changed_slots(tmp_path: Path, left_over: ModuleType) -> None:
    world = finished(tmp_path, left_over)
    (error,) = world.plan("capture.slots=[1, 16, 29]").errors
    assert error.fault == "F2"
    assert "[2, 16, 29]" in error.found


@pytest.mark.parametrize("what", list(CHANGES))
def test_the_fault_passes_with_the_check_off(tmp_path: Path, left_over: ModuleType, what: str) -> None:
    world = finished(tmp_path, left_over)
    file, content = CHANGES[what]
    (world.target / file).write_bytes(content)
    assert world.words(skip=("F17",)) == []


def test_a_manifest_without_its_keys_is_an_error_that_names_it(tmp_path: Path, left_over: ModuleType) -> None:
    world = finished(tmp_path, left_over)
    manifest = world.workdir / "extract" / "store" / "manifest.json"
    value = json.loads(manifest.read_text())
    del value["identity"]
    manifest.write_text(json.dumps(value))
    with pytest.raises(Exception, match=r"manifest\.json is not the manifest of a hidden-state store"):
        world.plan()

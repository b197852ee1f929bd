"""F2: another engine would feed the draft other states than it was trained on. Caught at plan, before any GPU.

The incident in small: trained on (0, 3, 15), the embedding first; served by SGLang, whose capture gives (3, 15, 27).
"""

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.flows.cli import app

CAUGHT = [
    ("F2", "plan", "trained on slots (0, 3, 15), SGLang would give slots (3, 15, 27), both 3h wide; who can capture 0"),
]
IDS = "eagle_aux_hidden_state_layer_ids"
ASKED = {"speculation": {"num_steps": 15, "verify_width": 16, "topk": 1}}


def serving(tmp_path: Path, left_over: ModuleType, trained: tuple[int, ...], ids: list[int]) -> Any:
    """A draft trained on these slots, with these ids for SGLang 0.5.14, as `.../output_100k_sglang/4`."""
    world = left_over.World(tmp_path, ASKED)
    path = tmp_path / "output_100k_sglang" / "4"
    shutil.copytree(world.draft(trained), path)
    shutil.rmtree(world.workdir / "convert")
    (path / "slipstream.json").rename(path.parent / "slipstream.json")
    config = json.loads((path / "config.json").read_text())
    config["eagle_config"][IDS] = ids
    (path / "config.json").write_text(json.dumps(config))
    server = {"engine": "sglang", "engine_version": "0.5.14"}
    world.write({"server": server, "draft": {"path": str(path)}})
    return world


def faults(world: Any, **options: Any) -> list[str]:
    return [f.fault for f in world.plan(**options).errors if f.fault in ("F2", "F3", "F4")]


def test_the_clean_case(tmp_path: Path, left_over: ModuleType) -> None:
    assert faults(serving(tmp_path, left_over, (3, 15, 27), [2, 14, 26])) == []


def test_exit_code_2_and_both_lists(tmp_path: Path, left_over: ModuleType) -> None:
    world = serving(tmp_path, left_over, (0, 3, 15), [2, 14, 26])
    result = CliRunner().invoke(app, ["plan", str(world.file)])
    assert result.exit_code == 2
    words = " ".join(result.output.split())
    assert "was trained on slots (0, 3, 15)" in words
    assert (
        "capture by sglang 0.5.14 (llama target) would give slots (3, 15, 27) (eagle_config ids [2, 14, 26])" in words
    )
    assert "Both are 3h = 3 x 64 = 192 wide: no check of shapes can tell them apart" in words
    assert "serve with vLLM 0.24.0 with top-level ids [0, 3, 15] (as read" in words
    assert "serve with SGLang 0.5.22 to 0.5.23 with eagle_config ids [-1, 2, 14] (as read" in words
    assert "serve with Slipstream's own engine" in words


def test_stated_serving_slots(tmp_path: Path, left_over: ModuleType) -> None:
    """The same, with the slots of the server in the deployment."""
    world = serving(tmp_path, left_over, (0, 3, 15), [])
    world.write({"draft": {"slots": [3, 15, 27]}})
    errors = [f for f in world.plan().errors if f.fault == "F2"]
    assert "draft.slots = [3, 15, 27]" in errors[0].found
    assert "capture would give slots (3, 15, 27). Both are 3h = 3 x 64 = 192 wide" in errors[0].found
    assert "an empty list: no state is captured" in errors[1].found


@pytest.mark.parametrize("ids", [[2, 14, 26], []])
def test_the_fault_passes_with_the_check_off(tmp_path: Path, left_over: ModuleType, ids: list[int]) -> None:
    """Names, shapes, widths and positions all fit: nothing else of the plan sees it."""
    world = serving(tmp_path, left_over, (0, 3, 15), ids)
    assert faults(world) == ["F2"]
    assert faults(world, skip=("serving-slots",)) == []

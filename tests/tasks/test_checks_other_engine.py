"""What another engine would capture for a draft, against what it was trained on: the findings of plan."""

import json
import math
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

IDS = "eagle_aux_hidden_state_layer_ids"
SGLANG = {"engine": "sglang", "engine_version": "0.5.14"}


def given(
    tmp_path: Path,
    left_over: ModuleType,
    slots: tuple[int, ...],
    *,
    nested: list[int] | None = None,
    record: bool = True,
    **values: dict[str, Any],
) -> Any:
    """A world whose deployment serves a checkpoint of another trainer: `.../output/4`, trained on `slots`.

    Args:
        nested: ids that SGLang reads; None leaves the key out.
        record: whether slipstream.json lies in the directory above.
        values: sections of the deployment, over SGLang 0.5.14.
    """
    world = left_over.World(tmp_path)
    made = world.draft(slots)
    path = tmp_path / "output" / "4"
    shutil.copytree(made, path)
    shutil.rmtree(world.workdir / "convert")
    config = json.loads((path / "config.json").read_text())
    del config[IDS]
    if nested is None:
        del config["eagle_config"]
    else:
        config["eagle_config"][IDS] = nested
    (path / "config.json").write_text(json.dumps(config))
    if record:
        (path / "slipstream.json").rename(path.parent / "slipstream.json")
    else:
        (path / "slipstream.json").unlink()
    world.write({"server": SGLANG, "draft": {"path": str(path)}})
    world.write(values)
    return world


def only(world: Any, **options: Any) -> Any:
    (finding,) = [f for f in world.plan(**options).findings if f.check in ("serving-slots", "F20")]
    return finding


def silent(world: Any, **options: Any) -> bool:
    return not [f for f in world.plan(**options).findings if f.check in ("serving-slots", "F20")]


def test_right_ids_say_nothing(tmp_path: Path, left_over: ModuleType) -> None:
    assert silent(given(tmp_path, left_over, (2, 16, 29), nested=[1, 15, 28]))


def test_defaults_are_right_for_a_draft_that_was_trained_on_them(tmp_path: Path, left_over: ModuleType) -> None:
    assert silent(given(tmp_path, left_over, (2, 16, 29)))


def test_the_incident(tmp_path: Path, left_over: ModuleType) -> None:
    """Trained on (0, 3, 15); ids that capture (3, 15, 27)."""
    world = given(tmp_path, left_over, (0, 3, 15), nested=[2, 14, 26])
    finding = only(world)
    assert (finding.fault, finding.severity) == ("F2", "error")
    assert "output/4 was trained on slots (0, 3, 15)" in finding.found
    assert "output/slipstream.json" in finding.found
    assert "capture by sglang 0.5.14 (llama target) would give slots (3, 15, 27)" in finding.found
    assert "eagle_config ids [2, 14, 26]" in finding.found
    assert "Both are 3h = 3 x 64 = 192 wide: no check of shapes can tell them apart" in finding.found
    assert "slot 0 being the embedding output" in finding.expected
    assert "serve with vLLM 0.24.0 with top-level ids [0, 3, 15] (as read in its source, not run)" in finding.ways
    assert (
        "serve with SGLang 0.5.22 to 0.5.23 with eagle_config ids [-1, 2, 14] (as read in its source, not run)"
        in finding.ways
    )
    assert "serve with Slipstream's own engine, which captures by name" in finding.ways


def test_a_version_that_can(tmp_path: Path, left_over: ModuleType) -> None:
    later = {"server": {**SGLANG, "engine_version": "0.5.23"}}
    finding = only(given(tmp_path, left_over, (0, 3, 15), nested=[2, 14, 26], **later))
    assert "write the ids [-1, 2, 14] under eagle_config of" in finding.ways[0]


def test_a_version_that_can_with_the_right_ids(tmp_path: Path, left_over: ModuleType) -> None:
    later = {"server": {**SGLANG, "engine_version": "0.5.23"}}
    assert silent(given(tmp_path, left_over, (0, 3, 15), nested=[-1, 2, 14], **later))


def test_stated_serving_slots(tmp_path: Path, left_over: ModuleType) -> None:
    """draft.slots says what serving gives the draft; its record says what it was trained on. Whatever the engine."""
    world = given(tmp_path, left_over, (2, 16, 29), nested=[1, 15, 28], draft={"slots": [3, 16, 29]})
    finding = only(world)
    assert finding.fault == "F2"
    assert "was trained on slots (2, 16, 29)" in finding.found
    assert "draft.slots = [3, 16, 29]" in finding.found
    assert "write draft.slots: [2, 16, 29]" in finding.ways[0]
    world.write({"server": {"engine": "slipstream"}})
    assert only(world).found == finding.found


def test_widths_that_differ(tmp_path: Path, left_over: ModuleType) -> None:
    finding = only(given(tmp_path, left_over, (2, 16, 29), nested=[1, 15]))
    assert "2 x 64 = 128 wide, where the draft takes 3 x 64 = 192" in finding.found


def test_no_ids_means_the_defaults(tmp_path: Path, left_over: ModuleType) -> None:
    finding = only(given(tmp_path, left_over, (3, 16, 29)))
    assert "would give slots (2, 16, 29) (its defaults, without eagle_config ids)" in finding.found


def test_old_graphs_capture_the_defaults(tmp_path: Path, left_over: ModuleType) -> None:
    old = {"server": {**SGLANG, "engine_version": "0.5.10.post1"}}
    world = given(tmp_path, left_over, (3, 16, 29), nested=[2, 15, 28], **old)
    finding = only(world)
    assert "would give slots (2, 16, 29) inside CUDA graphs, whatever the config says" in finding.found
    assert "sglang 0.5.10.post1 (llama target) captures them only with CUDA graphs off" in finding.expected
    assert "serve with SGLang 0.5.11 to 0.5.23 with eagle_config ids [2, 15, 28]" in finding.ways
    world.write({"server": {**SGLANG, "engine_version": "0.5.11"}})
    assert silent(world)


def test_a_training_that_nobody_recorded(tmp_path: Path, left_over: ModuleType) -> None:
    """As the incident's draft stood there: ids in config.json, and nothing that says what they should be."""
    world = given(tmp_path, left_over, (2, 16, 29), nested=[1, 15, 28], record=False)
    finding = only(world)
    assert (finding.fault, finding.severity) == ("F2", "error")
    assert "no record tells which slots the draft" in finding.found
    assert "would give (2, 16, 29)" in finding.found
    world.write({"draft": {"slots": [2, 16, 29]}})
    assert silent(world)
    world.write({"draft": {"slots": [0, 3, 16]}})
    assert "was trained on slots (0, 3, 16) (draft.slots)" in only(world).found


def test_an_order_that_engines_do_not_keep(tmp_path: Path, left_over: ModuleType) -> None:
    finding = only(given(tmp_path, left_over, (16, 2, 29), nested=[15, 1, 28]))
    assert finding.fault == "F3"
    assert "would give slots (2, 16, 29)" in finding.found


def test_a_draft_that_is_not_here(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"server": SGLANG, "draft": {"path": "/data/eagle3/output_100k_sglang/4"}})
    finding = only(world)
    assert finding.severity == "warning"
    assert "it is not on this machine" in finding.found
    world.write({"draft": {"path": str(tmp_path)}})
    finding = only(world)
    assert finding.severity == "error"
    assert "holds no config.json" in finding.found


KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {"num_hidden_layers": 61, "hidden_size": 7168},
}


@pytest.mark.parametrize(
    ("version", "ids", "slots", "gives"),
    [
        ("0.5.12.post1", [2, 30, 58], (2, 30, 58), "(3, 31, 59)"),
        ("0.5.14", [2, 30, 58], (2, 30, 58), ""),
        ("0.5.12.post1", [1, 29, 57], (2, 30, 58), ""),
        ("0.5.14", [2, 30, 58], (0, 3, 31), "(2, 30, 58)"),
        ("0.5.14", [0, 3, 31], (0, 3, 31), ""),
        ("0.5.12.post1", [0, 3, 31], (0, 3, 31), "(1, 4, 32)"),  # id 0 silently becomes 1
        ("0.5.13.post1", [0, 3, 31], (0, 3, 31), "(3, 31)"),  # and here it stops
    ],
)
def test_a_target_that_only_others_serve(
    tmp_path: Path, left_over: ModuleType, version: str, ids: list[int], slots: tuple[int, ...], gives: str
) -> None:
    world = given(tmp_path, left_over, (2, 16, 29), nested=ids, record=False, draft={"slots": list(slots)})
    (world.target / "config.json").write_text(json.dumps(KIMI))
    world.write({"server": {**SGLANG, "engine_version": version}})
    if not gives:
        assert silent(world)
        return
    finding = only(world)
    assert f"slots {slots}" in finding.found.replace("trained on ", "")
    assert f"would give slots {gives}" in finding.found
    if len(slots) == 3 and gives.count(",") == 2:
        assert "3h = 3 x 7168 = 21,504 wide" in finding.found


ENDLESS = {"num_hidden_layers": math.inf, "hidden_size": 7168}


@pytest.mark.parametrize("config", ["[" * 100_000, json.dumps({**KIMI, "text_config": ENDLESS})])
def test_a_damaged_config_of_a_target_is_no_target(tmp_path: Path, left_over: ModuleType, config: str) -> None:
    world = given(tmp_path, left_over, (2, 16, 29), nested=[2, 30, 58], record=False)
    (world.target / "config.json").write_text(config)
    assert "neither the target nor a record of the draft's training is here" in only(world).found


def test_an_off_by_one_is_named_as_such(tmp_path: Path, left_over: ModuleType) -> None:
    finding = only(given(tmp_path, left_over, (2, 16, 29), nested=[2, 16, 29]))
    assert finding.fault == "F4"
    assert "would give slots (3, 17, 30)" in finding.found


def test_the_record_alone_tells_the_target(tmp_path: Path, left_over: ModuleType) -> None:
    """Planned where the target is not: depth and family stand in slipstream.json."""
    world = given(tmp_path, left_over, (2, 16, 29), nested=[2, 16, 29])
    world.write({"target": {"source": str(tmp_path / "elsewhere")}})
    assert "would give slots (3, 17, 30)" in only(world).found
    record = world.root / "output" / "slipstream.json"
    record.rename(world.root / "slipstream.json")
    assert only(world).severity == "warning"


def test_the_same_slots_stated_in_another_order(tmp_path: Path, left_over: ModuleType) -> None:
    finding = only(given(tmp_path, left_over, (2, 16, 29), nested=[1, 15, 28], draft={"slots": [16, 2, 29]}))
    assert finding.fault == "F3"


def test_right_slots_that_are_not_delivered(tmp_path: Path, left_over: ModuleType) -> None:
    finding = only(given(tmp_path, left_over, (2, 16, 29), nested=[1, 15, 28, 28]))
    assert "would give slots (2, 16, 29)" in finding.found
    assert "captured once: the draft gets too few states" in finding.found


def test_capture_switched_off(tmp_path: Path, left_over: ModuleType) -> None:
    world = given(tmp_path, left_over, (2, 16, 29), nested=[1, 15, 28])
    path = tmp_path / "output" / "4" / "config.json"
    config = json.loads(path.read_text())
    config["eagle_config"]["use_aux_hidden_state"] = False
    path.write_text(json.dumps(config))
    assert "no state is captured at all" in only(world).found


def test_an_unknown_version_is_told_once(tmp_path: Path, left_over: ModuleType) -> None:
    nightly = {"server": {**SGLANG, "engine_version": "nightly"}}
    assert only(given(tmp_path, left_over, (2, 16, 29), nested=[1, 15, 28], **nightly)).check == "F20"


def test_a_version_that_has_no_such_capture(tmp_path: Path, left_over: ModuleType) -> None:
    old = {"server": {**SGLANG, "engine_version": "0.5.9"}}
    world = given(tmp_path, left_over, (2, 16, 29), nested=[1, 29, 57], **old)
    (world.target / "config.json").write_text(json.dumps(KIMI))
    finding = only(world)
    assert (finding.check, finding.fault) == ("serving-slots", "F4")
    assert "SGLang 0.5.9 captures no states of kimi_k25 targets" in finding.found


def test_the_draft_that_convert_left(tmp_path: Path, left_over: ModuleType) -> None:
    """Without draft.path another engine would serve what this deployment trained."""
    world = left_over.World(tmp_path, {"server": SGLANG})
    world.draft((2, 16, 29))
    assert silent(world)
    world.draft((0, 3, 15))
    assert "convert/draft was trained on slots (0, 3, 15)" in only(world).found


def test_switched_off(tmp_path: Path, left_over: ModuleType) -> None:
    world = given(tmp_path, left_over, (0, 3, 15), nested=[2, 14, 26])
    assert silent(world, skip=("serving-slots",))

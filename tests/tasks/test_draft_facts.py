"""What is read of a draft's directory: ours, and one that another trainer left."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.draft_facts import read_draft

IDS = "eagle_aux_hidden_state_layer_ids"


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_our_own(tmp_path: Path, left_over: ModuleType) -> None:
    path = left_over.World(tmp_path).draft((0, 3, 15))
    draft = read_draft(path)
    assert draft is not None
    assert draft.slots == ("slot_0", "slot_3", "slot_15")
    assert draft.slots_from == path / "slipstream.json"
    assert (draft.top_level_ids, draft.nested_ids) == ((0, 3, 15), ())  # SGLang's Llama captures no slot 0
    assert draft.target_hidden_size == 64
    assert (draft.target_num_layers, draft.target_family) == (left_over.LAYERS, "llama")


def test_a_checkpoint_of_another_trainer(tmp_path: Path) -> None:
    path = tmp_path / "output_100k_sglang" / "4"
    write(path / "config.json", {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {IDS: [2, 30, 58]}})
    draft = read_draft(path)
    assert draft is not None
    assert (draft.slots, draft.slots_from) == (None, None)  # nothing tells
    assert (draft.top_level_ids, draft.nested_ids) == (None, (2, 30, 58))
    assert draft.architecture == "LlamaForCausalLMEagle3"
    write(path.parent / "slipstream.json", {"slots": [0, 3, 31]})
    again = read_draft(path)
    assert again is not None
    assert again.slots == ("slot_0", "slot_3", "slot_31")
    assert again.slots_from == path.parent / "slipstream.json"


@pytest.mark.parametrize(
    ("stage", "slots"), [("train", ("slot_0", "slot_3")), ("convert", ("slot_0", "slot_3")), ("extract", None)]
)
def test_the_manifest_of_the_training(tmp_path: Path, stage: str, slots: tuple[str, ...] | None) -> None:
    """Of a stage that made a draft; the store of its features may hold more slots than it reads."""
    write(tmp_path / "t" / "7" / "config.json", {})
    write(tmp_path / "t" / "manifest.json", {"stage": stage, "figures": {"slots": ["slot_0", "slot_3"]}})
    draft = read_draft(tmp_path / "t" / "7")
    assert draft is not None
    assert draft.slots == slots


def test_capture_switched_off_and_malformed_ids(tmp_path: Path) -> None:
    write(tmp_path / "a" / "config.json", {"eagle_config": {"use_aux_hidden_state": False}})
    write(tmp_path / "b" / "config.json", {"eagle_config": [2, 30, 58], IDS: "2,30,58"})
    off, odd = read_draft(tmp_path / "a"), read_draft(tmp_path / "b")
    assert off is not None
    assert odd is not None
    assert off.captures is False
    assert odd.captures is True
    assert (odd.top_level_ids, odd.nested_ids) == (None, None)


def test_no_draft(tmp_path: Path) -> None:
    assert read_draft(tmp_path) is None
    write(tmp_path / "config.json", [1])
    with pytest.raises(SlipstreamError, match="no JSON object"):
        read_draft(tmp_path)


CLEAN = {"eagle_config": {IDS: [2, 15, 27]}, "max_position_embeddings": 2048, "hidden_size": 64}
RECORD = {
    "slots": ["slot_2", "slot_15", "slot_27"],
    "target_num_layers": 30,
    "identity": {"target": "a", "tokenizer": "b", "chat_template": "c"},
}
ODD: tuple[object, ...] = ("x", 1.5, True, ["a"], [None], [[1]], {"a": 1}, [2.0, 15, 27], ["2", "15", "27"], [True, 15])


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    "place", ["ids", "max_position_embeddings", "hidden_size", "target_hidden_size", "slots", "target_num_layers"]
)
def test_a_value_of_another_kind_is_named_with_its_file(tmp_path: Path, place: str, odd: object) -> None:
    """Never a traceback, and never read as something else: ids as strings are no ids, true is not 1."""
    config, record = dict(CLEAN), dict(RECORD)
    if place == "ids":
        config["eagle_config"] = {IDS: odd}
    elif place in record:
        if place == "slots" and odd == ["2", "15", "27"]:
            return  # a name without its prefix is a name
        record[place] = odd
    else:
        config[place] = odd
    write(tmp_path / "config.json", CLEAN)
    write(tmp_path / "slipstream.json", RECORD)
    clean = read_draft(tmp_path)
    assert clean is not None
    assert clean.slots == ("slot_2", "slot_15", "slot_27")
    write(tmp_path / "config.json", config)
    write(tmp_path / "slipstream.json", record)
    with pytest.raises(SlipstreamError) as caught:
        read_draft(tmp_path)
    name = "slipstream.json" if place in RECORD else "config.json"
    key = IDS if place == "ids" else place
    assert str(tmp_path / name) in caught.value.found
    assert f"{key} is {json.dumps(odd)}" in caught.value.found


@pytest.mark.parametrize(
    "odd", [None, "x", 5, [], {}, {"target": "a"}, {"target": 1, "tokenizer": 2, "chat_template": 3}]
)
def test_a_damaged_identity(tmp_path: Path, odd: object) -> None:
    write(tmp_path / "config.json", CLEAN)
    write(tmp_path / "slipstream.json", RECORD | {"identity": odd})
    with pytest.raises(SlipstreamError, match=r"slipstream.json: identity is .*"):
        read_draft(tmp_path)


@pytest.mark.parametrize("off", [False, 0, None, ""])
def test_capture_is_off_by_whatever_counts_as_false(tmp_path: Path, off: object) -> None:
    """SGLang asks `if use_aux_hidden_state`."""
    write(tmp_path / "config.json", {"eagle_config": {"use_aux_hidden_state": off}})
    draft = read_draft(tmp_path)
    assert draft is not None
    assert draft.captures is False


def test_what_cannot_be_looked_into_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="cannot be read: File name too long"):
        read_draft(tmp_path / ("x" * 300))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SlipstreamError, match="cannot be read: Too many levels of symbolic links"):
        read_draft(tmp_path / "loop")
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(SlipstreamError, match="is not readable as JSON"):
        read_draft(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert read_draft(tmp_path) is None
    assert read_draft(tmp_path / "config.json" / "x") is None

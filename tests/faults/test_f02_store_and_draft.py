"""F2: the slots in the store differ from the draft's. Caught before training and before launch, by name.

The incident: `fc` trained on cat([embedding, slot 3, slot 31]), served with cat([slot 3, slot 31, slot 59]). Both are
three states wide, so no shape can tell.
"""

import json

import pytest

from slipstream.engine.capture import CapturePlan
from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.hidden_store import HiddenStateStore
from slipstream.engine.training.store_source import StoreSource
from slipstream.tasks import convert, extract, train
from slipstream.tasks.checks import Contradictions
from slipstream.tasks.stage import run_stage

CAUGHT = [
    ("F2", "training, launch, load", "slots ['slot_0', 'slot_1', 'slot_2'], expected ['slot_1', 'slot_2', 'slot_3']"),
]

STORED, ASKED = (0, 1, 2), (1, 2, 3)  # as (0, 3, 31) against (3, 31, 59): the embedding first, everything one on


@pytest.fixture(scope="module")
def stored(pipeline, chats, tiny, tmp_path_factory):
    """A pipeline whose store holds STORED."""
    made = pipeline.make_pipeline(tmp_path_factory.mktemp("f2"), chats, tiny, capture={"slots": STORED})
    run_stage(extract.STAGE, made.deployment, made.workdir)
    return made


@pytest.fixture(scope="module")
def trained(stored):
    """The same with a draft trained on STORED."""
    run_stage(train.STAGE, stored.deployment, stored.workdir)
    run_stage(convert.STAGE, stored.deployment, stored.workdir)
    return stored


def asking(pipeline, made):
    return pipeline.make_deployment(made.model_dir, capture={"slots": ASKED})


def test_caught_before_training(pipeline, stored, tmp_path):
    context = stored.context(train.STAGE, tmp_path, asking(pipeline, stored))
    with pytest.raises(SlipstreamError) as caught:
        train.run(context)
    assert caught.value.fault == "F2"
    assert "slots ['slot_0', 'slot_1', 'slot_2']" in caught.value.found
    assert "slots ['slot_1', 'slot_2', 'slot_3']" in caught.value.expected
    assert "extract again" in caught.value.do
    assert not list(tmp_path.iterdir())  # before anything was trained


def test_the_stage_framework_sees_it_too(pipeline, stored):
    with pytest.raises(SlipstreamError, match=r"extract was made with other settings: capture\.slots"):
        run_stage(train.STAGE, asking(pipeline, stored), stored.workdir)


def test_unnoticed_by_training_without_the_check(pipeline, stored, tmp_path):
    """Equal widths: the draft learns from the wrong states, finite loss and all."""
    figures = train.run(stored.context(train.STAGE, tmp_path, asking(pipeline, stored)), skip={"F2"})
    assert figures["steps"] > 0
    assert figures["loss"] == figures["loss"]  # a number
    assert figures["teacher"]["logits_error"] < 1e-6  # the teacher was right all along


def test_features_are_never_picked_by_position(stored):
    store = HiddenStateStore(stored.workdir / "extract" / "store")
    source = StoreSource(store, store.conversation_ids(), CapturePlan(ASKED, 4))
    with pytest.raises(KeyError, match=r"missing \['slot_3'\]"):
        source[0]


def test_caught_before_launch(trained):
    trained.check_before_launch(STORED)
    with pytest.raises(Contradictions) as caught:
        trained.check_before_launch(ASKED)
    store, draft = caught.value.findings
    assert (store.fault, draft.fault) == ("F2", "F2")
    assert f"the hidden-state store {trained.workdir / 'extract' / 'store'} holds slots [0, 1, 2]; " in store.found
    assert f"the draft {trained.workdir / 'convert' / 'draft'} holds slots [0, 1, 2]; " in draft.found
    assert "capture.slots = [1, 2, 3], which are [1, 2, 3]" in draft.found
    assert "by name: any three slots are equally wide" in draft.expected
    assert "write capture.slots: [0, 1, 2] to use it" in draft.ways
    trained.check_before_launch(ASKED, skip={"F2"})


def test_launch_3_of_the_incident(trained, tmp_path):
    """Ids in config.json edited by hand until the server captured something else than the draft was trained on."""
    draft = tmp_path / "draft"
    draft.mkdir()
    for path in (trained.workdir / "convert" / "draft").iterdir():
        (draft / path.name).write_bytes(path.read_bytes())
    config = json.loads((draft / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    (draft / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}))
    with pytest.raises(SlipstreamError, match=r"ids \[1, 2, 3\] as vllm 0\.24\.0 reads them") as caught:
        load_draft(draft)
    assert caught.value.fault == "F2"
    load_draft(draft, skip={"F2"})

"""F3: the same slots in another order. Caught before training and before launch, by name.

(That permuted columns fail numerically, too, is shown where slots are measured: in parity.)
"""

import json

import pytest
import torch

from slipstream.engine.capture import CapturePlan
from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.drafts.eagle3.layer_ids import KNOWN_VERSIONS, Engine, Family, reading
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.hidden_store import HiddenStateStore
from slipstream.engine.training.store_source import StoreSource
from slipstream.tasks import convert, extract, train
from slipstream.tasks.checks import Contradictions
from slipstream.tasks.stage import run_stage

CAUGHT = [
    ("F3", "training, launch, load", "order of the slots; other engines cannot be given another order"),
]

STORED, ASKED = (1, 2, 3), (2, 1, 3)


@pytest.fixture(scope="module")
def made(pipeline, chats, tiny, tmp_path_factory):
    made = pipeline.make_pipeline(tmp_path_factory.mktemp("f3"), chats, tiny, capture={"slots": STORED})
    for stage in (extract.STAGE, train.STAGE, convert.STAGE):
        run_stage(stage, made.deployment, made.workdir)
    return made


def test_caught_before_training(pipeline, made, tmp_path):
    deployment = pipeline.make_deployment(made.model_dir, capture={"slots": ASKED})
    with pytest.raises(SlipstreamError) as caught:
        train.run(made.context(train.STAGE, tmp_path, deployment))
    assert caught.value.fault == "F3"
    assert "order of the slots ['slot_1', 'slot_2', 'slot_3']" in caught.value.found
    assert "order of the slots ['slot_2', 'slot_1', 'slot_3']" in caught.value.expected
    assert not list(tmp_path.iterdir())


def test_unnoticed_by_training_without_the_check(pipeline, made, tmp_path):
    deployment = pipeline.make_deployment(made.model_dir, capture={"slots": ASKED})
    figures = train.run(made.context(train.STAGE, tmp_path, deployment), skip={"F3"})
    assert figures["steps"] > 0
    assert figures["slots"] == ["slot_1", "slot_2", "slot_3"]  # not what was asked for


def test_features_follow_the_plan_whatever_the_order_in_the_store(made):
    """Picked by name, the columns are those of the plan: nothing to notice, since nothing is wrong."""
    store = HiddenStateStore(made.workdir / "extract" / "store")
    ids = store.conversation_ids()
    ours = StoreSource(store, ids, CapturePlan(STORED, 4))[0].features  # [T, 3 h]
    permuted = StoreSource(store, ids, CapturePlan(ASKED, 4))[0].features
    a, b, c = ours.chunk(3, dim=-1)
    assert torch.equal(permuted, torch.cat((b, a, c), dim=-1))
    assert not torch.equal(permuted, ours)


def test_caught_before_launch(made):
    made.check_before_launch(STORED)
    with pytest.raises(Contradictions) as caught:
        made.check_before_launch(ASKED)
    store, draft = caught.value.findings
    assert (store.fault, draft.fault) == ("F3", "F3")
    assert f"the hidden-state store {made.workdir / 'extract' / 'store'} holds slots [1, 2, 3], the same" in store.found
    assert (
        f"the draft {made.workdir / 'convert' / 'draft'} holds slots [1, 2, 3], the same ones in another order; "
        "capture.slots = [2, 1, 3]"
    ) in draft.found
    assert "in the same order" in draft.expected
    made.check_before_launch(ASKED, skip={"F2"})  # one check looks at both, names and order


def test_permuted_ids_in_the_config_are_caught_at_load(made, tmp_path):
    for path in (made.workdir / "convert" / "draft").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}))
    with pytest.raises(SlipstreamError, match="order of the slots") as caught:
        load_draft(tmp_path)
    assert caught.value.fault == "F3"
    load_draft(tmp_path, skip={"F3"})


@pytest.mark.parametrize("engine", list(Engine))
def test_other_engines_cannot_be_given_another_order(engine):
    """They concatenate in layer order whatever order the ids are in, so such a draft is not written for them."""
    with pytest.raises(SlipstreamError, match="not in rising order") as caught:
        reading(engine, KNOWN_VERSIONS[engine], Family.LLAMA).ids(ASKED, 4)
    assert caught.value.fault == "F3"

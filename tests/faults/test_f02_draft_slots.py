"""F2: a store of four slots, a draft that reads three of them: picked by name, in the draft's order, never by position.

The incident's training took `[:-1]` of four stored states, whatever these were; the server fed the draft three others.
"""

import dataclasses
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.engine.capture import CapturePlan
from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.hidden_store import HiddenStateStore
from slipstream.engine.training.store_source import StoreSource
from slipstream.tasks import convert, extract, train
from slipstream.tasks.checks import Contradictions, find, gather, refuse
from slipstream.tasks.stage import run_stage

CAUGHT = [
    ("F2", "training, launch", "the draft holds slots [0, 1, 2] (the first three columns); draft.slots = [3, 0, 1]")
]

STORED, READ = (0, 1, 2, 3), (3, 0, 1)  # another three than the first ones, in another order than stored


def deployment(pipeline, made, **draft):
    sections = made.deployment.model_dump(exclude_unset=True)
    sections["draft"] = {**sections["draft"], **draft}
    return type(made.deployment)(**sections)


@pytest.fixture(scope="module")
def stored(pipeline, chats, tiny, tmp_path_factory):
    """A pipeline whose store holds four slots, and whose draft is to read three."""
    changes = {"capture": {"slots": STORED}, **pipeline.FITTING}
    made = pipeline.make_pipeline(tmp_path_factory.mktemp("f2-draft-slots"), chats, tiny, **changes)
    run_stage(extract.STAGE, made.deployment, made.workdir)
    return dataclasses.replace(made, deployment=deployment(pipeline, made, slots=READ))


@pytest.fixture
def own_copy(stored, tmp_path):
    """The same, to be trained in."""
    workdir = tmp_path / "work"
    shutil.copytree(stored.workdir, workdir)
    return dataclasses.replace(stored, workdir=workdir)


def train_and_convert(made):
    for stage in (train.STAGE, convert.STAGE):
        run_stage(stage, made.deployment, made.workdir)
    return made.workdir / "convert" / "draft"


def check_before_launch(made, skip=()):
    refuse(find(gather(made.deployment, made.workdir), skip))


def features_and_states(made, order):
    """Features that a draft of these slots trains on, and the states of transformers in the same order."""
    store = HiddenStateStore(made.workdir / "extract" / "store")
    (first, *_) = store.conversation_ids()
    conversation = StoreSource(store, [first], CapturePlan(order, 4))[0]
    target = AutoModelForCausalLM.from_pretrained(made.model_dir, dtype=torch.float32)
    with torch.no_grad():
        states = target(conversation.token_ids[None], output_hidden_states=True).hidden_states
    return conversation.features, torch.cat([states[slot][0] for slot in order], dim=-1)  # n x [T, h] -> [T, n * h]


@pytest.mark.parametrize("order", [READ, (0, 1, 3), (2,), (1, 3, 0, 2)])
def test_features_are_the_named_states(stored, order):
    features, expected = features_and_states(stored, order)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)


def test_a_positional_slice_would_be_noticed_there(stored, monkeypatch):
    """The incident's `[:-1]`: as wide as the right features, and quite another thing."""
    monkeypatch.setattr(CapturePlan, "select", lambda self, states: torch.cat(list(states.values())[:-1], dim=-1))
    features, expected = features_and_states(stored, READ)
    assert features.shape == expected.shape
    assert not torch.allclose(features, expected, rtol=0.1, atol=0.1)


def test_the_draft_is_trained_on_the_named_slots(own_copy):
    draft = train_and_convert(own_copy)
    assert json.loads((draft / "slipstream.json").read_text())["slots"] == ["slot_3", "slot_0", "slot_1"]
    assert load_draft(draft).config.plan == CapturePlan(READ, 4)
    check_before_launch(own_copy)  # no false alarm


def test_a_draft_trained_on_the_first_three_columns(own_copy, monkeypatch):
    """Injected into training: the plan is sliced by position. Caught by name before launch, and only by name."""
    monkeypatch.setattr(train, "draft_plan", lambda config, stored: CapturePlan(stored.slots[:-1], stored.num_layers))
    draft = train_and_convert(own_copy)
    assert load_draft(draft).config.plan.slots == (0, 1, 2)  # a sound draft, of other slots
    with pytest.raises(Contradictions) as caught:
        check_before_launch(own_copy)
    (finding,) = caught.value.findings
    assert finding.fault == "F2"
    assert f"the draft {draft} holds slots [0, 1, 2]" in finding.found
    assert "draft.slots = [3, 0, 1]" in finding.found
    check_before_launch(own_copy, skip={"F2"})  # as wide as the right one: nothing else sees it


def test_a_slot_that_is_not_stored(pipeline, stored, tmp_path):
    missing = deployment(pipeline, stored, slots=(0, 1, 4))
    with pytest.raises(SlipstreamError, match=r"\[4\] are not among them") as caught:
        train.run(stored.context(train.STAGE, tmp_path, missing))
    assert caught.value.fault == "F2"
    (error,) = [f for f in find(gather(missing, tmp_path / "none")) if f.check == "slots"]
    assert error.fault == "F2"
    assert "write capture.slots: [0, 1, 2, 3, 4]" in error.ways

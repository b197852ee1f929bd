"""Batches: whole conversations, each once an epoch, aligned with their teacher."""

import pytest
import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.training.data import collate, plan_batches, supervised_slots


def test_every_conversation_once_and_within_the_bound():
    lengths = [5, 60, 7, 300, 33, 34, 35, 90, 12, 13, 61, 8]
    indices = [i for i in range(len(lengths)) if i != 4]
    for epoch in range(3):
        batches = plan_batches(indices, lengths, 128, seed=3, epoch=epoch)
        assert sorted(i for batch in batches for i in batch) == indices
        for batch in batches:
            assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 128
    assert [3] in plan_batches(indices, lengths, 128, seed=3, epoch=0)  # longer than the bound: by itself


def test_order_is_fixed_by_seed_and_epoch():
    lengths = [10 + i % 7 for i in range(60)]
    plans = {
        (seed, epoch): str(plan_batches(range(60), lengths, 100, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len(set(plans.values())) == 4
    assert plans[1, 0] == str(plan_batches(range(60), lengths, 100, 1, 0))


def test_alignment_of_a_batch(draft_tools):
    """Slot t embeds x_{t+k}; its teacher is the state at t + k, counted from teacher_start."""
    c = draft_tools.make_conversation(4, 17, [(8, 17)], teacher_start=7)
    other = draft_tools.make_conversation(1, 12, [(4, 12)])
    batch = collate([other, c], 3)
    assert supervised_slots(c).tolist() == list(range(7, 15))
    for step in range(1, 4):
        on = batch.supervised[step - 1, 1]
        slots = batch.slots[1, on]
        assert slots.tolist() == list(range(7, 16 - step))
        assert torch.equal(batch.step_tokens(step)[1, on], c.token_ids[slots + step])
        teachers = batch.teacher[batch.teacher_rows[step - 1, 1, on]]
        assert torch.equal(teachers, c.teacher[slots + step - c.teacher_start])
    assert torch.equal(batch.features[1], c.features[:-1])
    assert torch.equal(batch.features[0, :11], other.features[:-1])
    assert not batch.features[0, 11:].any()


def test_mask_that_is_not_shifted_supervises_other_slots(draft_tools):
    """F10: with the label's own mask index in the place of the shifted one, the set of slots is another."""
    c = draft_tools.make_conversation(4, 17, [(8, 17)])
    unshifted = c.loss_mask.nonzero().squeeze(1).tolist()
    right = supervised_slots(c).tolist()
    assert right == list(range(7, 15))
    assert right != [t for t in unshifted if t <= 14]
    assert 7 in right  # the slot of the answer's first token: the first that serving drafts from
    assert 7 not in unshifted


def test_missing_teacher_states_are_named(draft_tools):
    c = draft_tools.make_conversation(4, 17, [(8, 17)], teacher_start=9)
    with pytest.raises(SlipstreamError, match="start at position 9, slot 7 needs 8"):
        collate([c], 2)


def test_padding_changes_nothing(draft_tools):
    """A conversation's loss does not depend on what it is batched with."""
    from slipstream.engine.training.loss import ttt_loss

    network = draft_tools.make_network()
    teacher = draft_tools.make_teacher(network)
    conversations = draft_tools.make_conversations()
    together = ttt_loss(network, collate(conversations, 3), teacher, 3, 0.8)
    sums = torch.zeros(3)
    for c in conversations:
        alone = ttt_loss(network, collate([c], 3), teacher, 3, 0.8)
        sums += alone.steps * alone.counts
    torch.testing.assert_close(together.steps, sums / together.counts, rtol=1e-5, atol=1e-6)

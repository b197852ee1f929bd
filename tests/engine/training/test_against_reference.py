"""The trainer equals the independent reference: logits of each step, loss, gradients of all parameters, mask, hits."""

import pytest
import torch

from slipstream.engine.alignment import slot_mask
from slipstream.engine.training.data import collate
from slipstream.engine.training.loss import ttt_loss
from slipstream.engine.training.unroll import unrolled_states

NUM_STEPS, DECAY = 4, 0.8
SWITCHES = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True},
    {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
]


def reference_run(reference, draft_tools, network, teacher, conversations):
    """Reference logits, masks and hits of each conversation, and the loss over all of them, with its gradients."""
    weights = {n: t.requires_grad_(t.is_floating_point()) for n, t in draft_tools.hf_tensors(network).items()}
    logits, masks, hits, sums = [], [], [], torch.zeros(NUM_STEPS)
    for c in conversations:
        states = torch.zeros(len(c.token_ids), draft_tools.HIDDEN)
        states[c.teacher_start :] = c.teacher
        logits.append(reference.step_logits(weights, network.config, c.token_ids, c.features, NUM_STEPS))
        masks.append(reference.supervised(c.loss_mask, NUM_STEPS))
        new, hit = reference.losses(
            weights, logits[-1], masks[-1], states, teacher.final_norm, teacher.head, teacher.eps
        )
        sums = sums + new
        hits.append(hit)
    counts = sum(m.sum(1) for m in masks)
    loss = reference.total_loss(sums, counts, DECAY)
    loss.backward()
    gradients = {n: t.grad for n, t in weights.items() if n not in ("d2t", "embed_tokens.weight")}
    return logits, masks, hits, sums / counts, loss, gradients


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = [
    *(("grouped", switches) for switches in SWITCHES),
    *(("latent", switches) for switches in SWITCHES),
    ("grouped", {"rope_scaling": YARN}),
    ("grouped", {"rope_scaling": LLAMA3}),
]


@pytest.mark.parametrize(("attention", "switches"), CASES, ids=lambda x: x if isinstance(x, str) else "+".join(x))
def test_logits_loss_and_gradients(reference, draft_tools, attention, switches):
    network = draft_tools.make_network(**(draft_tools.LATENT if attention == "latent" else {}), **switches)
    teacher, conversations = draft_tools.make_teacher(network), draft_tools.make_conversations()
    logits, masks, hits, steps, loss, gradients = reference_run(reference, draft_tools, network, teacher, conversations)
    batch = collate(conversations, NUM_STEPS)
    for index, state in enumerate(unrolled_states(network, batch, NUM_STEPS)):
        for b in range(len(conversations)):
            rows = batch.supervised[index, b]
            slots = batch.slots[b, rows]
            assert torch.equal(slots, masks[b][index].nonzero().squeeze(1))
            torch.testing.assert_close(network.logits(state[b, rows]), logits[b][index, slots], rtol=1e-4, atol=1e-5)
    result = ttt_loss(network, batch, teacher, NUM_STEPS, DECAY, with_hits=True)
    torch.testing.assert_close(result.steps, steps.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.total, loss, rtol=1e-5, atol=1e-6)
    assert result.counts.tolist() == sum(m.sum(1) for m in masks).tolist()
    complete = [m.all(0) for m in masks]
    expected = sum((h.int().cumprod(0).bool() & c).sum(1) for h, c in zip(hits, complete, strict=True))
    assert result.joint.tolist() == expected.tolist()
    assert result.complete == sum(int(c.sum()) for c in complete)
    result.total.backward()
    ours = draft_tools.hf_tensors(network, gradients=True)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("switch", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_each_switch_changes_the_logits(reference, draft_tools, switch):
    conversation = draft_tools.make_conversation(5, 10, [(3, 10)])
    outputs = []
    for on in (False, True):
        network = draft_tools.make_network(**{switch: on})
        plain = draft_tools.make_network()
        network.load_state_dict(plain.state_dict(), strict=False)  # the same weights but for the switch's own norm
        batch = collate([conversation], 2)
        outputs.append([network.logits(s).detach() for s in unrolled_states(network, batch, 2)])
    step_one, step_two = (float((a - b).abs().max()) for a, b in zip(*outputs, strict=True))
    assert step_two > 1e-2
    assert (step_one > 1e-2) == (switch != "norm_output")  # norm_output acts on what is fed back only


def test_mask_is_the_references(reference, draft_tools):
    for seed in range(20):
        mask = torch.rand(14, generator=torch.Generator().manual_seed(seed)) < 0.7
        expected = reference.supervised(mask, 5)
        for step in range(1, 6):
            assert torch.equal(slot_mask(mask, step)[:-1], expected[step - 1])
            assert not slot_mask(mask, step)[-1]


def test_rope_position_moves_with_the_step(reference, draft_tools):
    """Without the +k the later steps' logits differ: the reference would notice."""
    network = draft_tools.make_network()
    conversation = draft_tools.make_conversation(5, 10, [(3, 10)])
    batch = collate([conversation], 2)
    right = [network.logits(s) for s in unrolled_states(network, batch, 2)]
    original = network.rotary.forward
    first = int(batch.slots[0, 0])
    network.rotary.forward = lambda p, dtype: original(p - 1 if p.shape[1] == len(batch.slots[0]) else p, dtype)
    wrong = [network.logits(s) for s in unrolled_states(network, batch, 2)]
    assert first > 0
    torch.testing.assert_close(right[0], wrong[0])
    assert (right[1] - wrong[1]).abs().max() > 1e-3

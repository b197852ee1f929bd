"""The loss in parts, made again for the backward pass: the same loss, gradients and hits, and less memory."""

import pytest
import torch

from slipstream.engine.training.data import collate
from slipstream.engine.training.loss import ttt_loss

STEPS, DECAY = 3, 0.7


def measure(draft_tools, network, logits_kept):
    """(result, gradients, numbers kept for the backward pass that are as wide as the draft vocabulary)."""
    batch = collate(draft_tools.make_conversations(), STEPS)
    kept = []

    def pack(tensor):
        if tensor.shape[-1:] == (network.config.draft_vocab_size,) and not tensor.is_leaf:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = ttt_loss(
            network, batch, draft_tools.make_teacher(network), STEPS, DECAY, with_hits=True, logits_kept=logits_kept
        )
    result.total.backward()
    gradients = {n: p.grad.clone() for n, p in network.named_parameters() if p.requires_grad}
    network.zero_grad()
    return result, gradients, sum(kept)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_parts_give_the_same(draft_tools, rows):
    network = draft_tools.make_network()
    width = network.config.draft_vocab_size
    whole, gradients, kept = measure(draft_tools, network, 10**9)
    assert kept >= width * int(whole.counts.sum())
    parts, others, kept_in_parts = measure(draft_tools, network, 8 * rows * width)  # an eighth is held at a time
    assert kept_in_parts == 0
    torch.testing.assert_close(parts.total, whole.total, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(parts.steps, whole.steps, rtol=1e-6, atol=1e-7)
    assert parts.joint.tolist() == whole.joint.tolist()
    assert (parts.complete, parts.counts.tolist()) == (whole.complete, whole.counts.tolist())
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")

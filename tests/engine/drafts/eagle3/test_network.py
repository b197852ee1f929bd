"""The draft network: chain decoding with a KV cache equals the unrolled training steps, and equals no cache at all."""

import pytest
import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.training.data import collate
from slipstream.engine.training.unroll import unrolled_states

NUM_STEPS = 4


class ListContext:
    """Attention over a plain list of keys by position; a later write at a position replaces the earlier one."""

    def __init__(self, scale: float) -> None:
        self.scale, self.cache = scale, {}
        self.positions: list[int] = []

    def attend(self, q, k, v):
        """q [R, heads, d] at `self.positions`, causal by position."""
        out = torch.empty_like(q)
        group = q.shape[1] // k.shape[1]
        for row, position in enumerate(self.positions):
            self.cache[position] = (k[row], v[row])
        for row, position in enumerate(self.positions):
            seen = [self.cache[p] for p in sorted(self.cache) if p <= position]
            keys, values = (torch.stack([s[i] for s in seen]).repeat_interleave(group, 1) for i in (0, 1))
            weights = (torch.einsum("hd,thd->ht", q[row], keys) * self.scale).softmax(-1)
            out[row] = torch.einsum("ht,thd->hd", weights, values)
        return out


def chain(network, conversation, start, accepted, context):
    """One served round: absorb the accepted slots that end at `start`, then own-state steps. States of step 1..K."""
    absorbed = list(range(start - accepted + 1, start + 1))
    context.positions = absorbed
    tokens = conversation.token_ids[[t + 1 for t in absorbed]]
    g = network.fuse(conversation.features[absorbed])
    state = network(tokens, g, torch.tensor(absorbed), context.attend)[-1:]
    states = [state]
    for step in range(2, NUM_STEPS + 1):
        context.positions = [start + step - 1]
        token = conversation.token_ids[start + step : start + step + 1]
        state = network(token, network.feedback(state), torch.tensor(context.positions), context.attend)
        states.append(state)
    return torch.cat(states)


@pytest.mark.parametrize("norm_output", [False, True])
def test_chain_with_kv_equals_without_and_equals_training(draft_tools, norm_output):
    network = draft_tools.make_network(norm_output=norm_output)
    conversation = draft_tools.make_conversation(1, 16, [(5, 16)])
    batch = collate([conversation], NUM_STEPS)
    unrolled = torch.stack([s[0] for s in unrolled_states(network, batch, NUM_STEPS)])  # [K, S, h]
    scale = network.config.head_dim**-0.5
    cached = ListContext(scale)
    previous = -1
    for start in (4, 5, 8, 11):  # rounds that accept 0, 2 and 2 drafts
        served = chain(network, conversation, start, start - previous, cached)
        alone = chain(network, conversation, start, start + 1, ListContext(scale))
        trained = unrolled[:, int((batch.slots[0] == start).nonzero())]
        torch.testing.assert_close(served, alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(served, trained, rtol=1e-4, atol=1e-5)
        previous = start


def test_stale_own_keys_would_be_seen(draft_tools):
    """Own-state keys that the next round does not overwrite change its states: the equality above is not vacuous."""
    network = draft_tools.make_network()
    conversation = draft_tools.make_conversation(1, 16, [(5, 16)])
    context = ListContext(network.config.head_dim**-0.5)
    chain(network, conversation, 4, 5, context)
    stale = chain(network, conversation, 8, 1, context)  # slots 5..7 keep the keys of the round before
    right = chain(network, conversation, 8, 9, ListContext(network.config.head_dim**-0.5))
    assert (stale - right).abs().max() > 1e-3


def test_to_target_adds_offsets(draft_tools):
    network = draft_tools.make_network()
    ids = network.to_target(torch.arange(network.config.draft_vocab_size))
    assert torch.equal(ids, ids.sort().values)
    assert ids.unique().numel() == network.config.draft_vocab_size
    assert ids.max() < draft_tools.VOCAB


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm"),
        ({"num_heads": 3}, "3 heads and 2 KV heads"),
        ({"draft_vocab_size": 51}, "51 tokens"),
        ({"slots": ()}, "no slots"),
    ],
)
def test_contradicting_values_are_refused(draft_tools, changes, words):
    with pytest.raises(SlipstreamError, match=words):
        draft_tools.make_config(**changes)

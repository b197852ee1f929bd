"""The unrolled draft: K steps, each on the state that the step before made, with the true tokens."""

from collections.abc import Iterator

import torch

from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.training.data import Batch
from slipstream.engine.training.ttt_attention import TttAttention


def unrolled_states(network: Eagle3Network, batch: Batch, num_steps: int) -> Iterator[torch.Tensor]:
    """The draft's pre-norm state of each row at steps 1..num_steps, [B, S, h] each.

    Step 1 runs over every slot, because later slots attend to its keys; the rows are then gathered, and later steps
    run on them alone (they attend to step-1 keys and to their own).

        step 1   token x_{t+1}   feature fuse(a_t)            position t
        step k   token x_{t+k}   feature feedback(state k-1)  position t + k - 1
    """
    num_slots = batch.features.shape[1]
    context = TttAttention(batch.slots, network.midlayer.self_attn.scale)
    positions = torch.arange(num_slots, device=batch.tokens.device).expand(batch.features.shape[:2])  # [B, T]
    features = batch.features.to(network.fc.weight.dtype)
    state = network(batch.tokens[:, 1:], network.fuse(features), positions, context.attend)  # [B, T, h]
    index = batch.slots[..., None].expand(-1, -1, state.shape[-1])  # [B, S, h]
    state = state.gather(1, index)  # [B, T, h] -> [B, S, h]
    yield state
    for step in range(2, num_steps + 1):
        # Rows past the conversation's end carry no loss; their position must only stay inside the rope table.
        positions = (batch.slots + step - 1).clamp(max=network.config.max_position - 1)  # [B, S]
        state = network(batch.step_tokens(step), network.feedback(state), positions, context.attend)
        yield state

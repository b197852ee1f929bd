"""Attention of the unrolled training steps: causal over the keys of step 1, plus one own key for each later step.

At step k the draft of a round that starts at slot t has in its KV cache the target-made keys of slots 0..t and the keys
that it made itself at steps 2..k. So slot t's query sees, at step k:

    step-1 keys   0 .. t            (causal)
    own keys      k_2(t) .. k_k(t)  (one diagonal each)
"""

import torch


class TttAttention:
    """The attention context of one batch through all its steps. Call `attend` once a step, in order.

    Args:
        slots: [B, S] int64, the slot of each row of steps 2.. (step 1 runs over all slots 0..T-1).
        scale: multiplied onto q.k.

    Keys and values stay in the graph, so gradients reach the steps that made them. Scores take B x heads x rows x
    (T + k) numbers; `data.plan_batches` bounds B x T, so they grow with the longest conversation only.
    (Plain matrix products: at a few hundred tokens they are 3 times as fast on a CPU as the fused bf16 attention.)
    """

    def __init__(self, slots: torch.Tensor, scale: float) -> None:
        self.slots, self.scale = slots, scale
        self.first: tuple[torch.Tensor, torch.Tensor] | None = None
        self.own: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [B, R, heads, d]; k, v [B, R, kv_heads, d]; R = T at step 1, S later -> [B, R, heads, d]."""
        batch, rows, heads, size = q.shape
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, R, kv, d] -> [B, kv, R, d]
        slots = self.slots
        if self.first is None:
            self.first, slots = (k, v), torch.arange(rows, device=q.device)[None]
        else:
            self.own.append((k, v))
        first_k, first_v = self.first  # [B, kv, T, d]
        later = torch.arange(first_k.shape[2], device=q.device) > slots[..., None]  # [B or 1, R, T]: not to be seen
        # [B, R, heads, d] -> [B, kv, G, R, d]: the G query heads of one KV head beside each other
        q = q.transpose(1, 2).unflatten(1, (first_k.shape[1], -1)) * self.scale
        scores = q.flatten(2, 3) @ first_k.transpose(-1, -2)  # [B, kv, G * R, T]
        scores = scores.unflatten(2, q.shape[2:4]).masked_fill(later[:, None, None], float("-inf"))
        own = [(q * own_k[:, :, None]).sum(-1, keepdim=True) for own_k, _ in self.own]  # (k - 1) x [B, kv, G, R, 1]
        weights = torch.cat((scores, *own), dim=-1).softmax(-1, dtype=torch.float32).to(v.dtype)  # [B,kv,G,R,T+k-1]
        out = weights[..., : first_k.shape[2]].flatten(2, 3) @ first_v  # [B, kv, G * R, d]
        out = out.unflatten(2, q.shape[2:4])  # [B, kv, G, R, d]
        for index, (_, own_v) in enumerate(self.own):
            out = out + weights[..., first_k.shape[2] + index, None] * own_v[:, :, None]
        return out.reshape(batch, heads, rows, size).transpose(1, 2)  # [B, kv, G, R, d] -> [B, R, heads, d]

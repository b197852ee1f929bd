"""Attention of the unrolled training steps: causal over the keys of step 1, plus one own key for each later step.

At step k the draft of a round that starts at slot t has in its KV cache the target-made keys of slots 0..t and the keys
that it made itself at steps 2..k. So slot t's query sees, at step k:

    step-1 keys   0 .. t          (causal)
    own keys      k_2(t) .. k_k(t)  (one diagonal each)
"""

import torch
import torch.nn.functional as F


class TttAttention:
    """The attention context of one batch through all its steps. Call `attend` once a step, in order.

    Args:
        slots: [B, S] int64, the slot of each row of steps 2.. (step 1 runs over all slots 0..T-1).
        scale: multiplied onto q.k.

    Keys and values stay in the graph, so gradients reach the steps that made them. Scores of steps 2.. take
    B x heads x S x (T + k) numbers; `data.plan_batches` bounds them by batching conversations of like length.
    """

    def __init__(self, slots: torch.Tensor, scale: float) -> None:
        self.slots, self.scale = slots, scale
        self.first: tuple[torch.Tensor, torch.Tensor] | None = None
        self.own: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.hidden: torch.Tensor | None = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [B, R, heads, d]; k, v [B, R, kv_heads, d]; R = T at step 1, S later -> [B, R, heads, d]."""
        if self.first is None:
            return self._causal(q, k, v)
        return self._later(q, k, v)

    def _causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, T, heads, d] -> [B, heads, T, d]
        self.first = (k, v)
        # [B, S, T]: true where the key is later than the row's slot
        self.hidden = torch.arange(k.shape[2], device=k.device) > self.slots[..., None]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.transpose(1, 2)  # [B, heads, T, d] -> [B, T, heads, d]

    def _later(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert self.first is not None
        assert self.hidden is not None
        batch, rows, heads, size = q.shape
        kv_heads = k.shape[2]
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, S, kv, d] -> [B, kv, S, d]
        self.own.append((k, v))
        first_k, first_v = self.first  # [B, kv, T, d]
        # [B, S, heads, d] -> [B, kv, G, S, d]: the G query heads of one KV head beside each other
        q = q.transpose(1, 2).reshape(batch, kv_heads, heads // kv_heads, rows, size) * self.scale
        scores = q.flatten(2, 3) @ first_k.transpose(-1, -2)  # [B, kv, G * S, T]
        scores = scores.unflatten(2, q.shape[2:4]).masked_fill(self.hidden[:, None, None], float("-inf"))
        own = [(q * own_k[:, :, None]).sum(-1, keepdim=True) for own_k, _ in self.own]  # (k - 1) x [B, kv, G, S, 1]
        weights = torch.cat((scores, *own), dim=-1).softmax(-1, dtype=torch.float32).to(v.dtype)  # [B,kv,G,S,T+k-1]
        size_first = first_k.shape[2]
        out = weights[..., :size_first].flatten(2, 3) @ first_v  # [B, kv, G * S, d]
        out = out.unflatten(2, q.shape[2:4])  # [B, kv, G, S, d]
        for index, (_, own_v) in enumerate(self.own):
            out = out + weights[..., size_first + index, None] * own_v[:, :, None]
        return out.flatten(1, 2).transpose(1, 2)  # [B, heads, S, d] -> [B, S, heads, d]

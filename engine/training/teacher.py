"""The teacher: the target's distribution, from its stored last state."""

import torch
import torch.nn.functional as F

from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.rms_norm import rms_norm
from slipstream.kernels.stream import Norm, Stream

# Full-vocabulary logits held at a time, in the states' dtype; on a CPU few enough to stay in the cache.
_LOGITS_PER_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 27}


class Teacher:
    """The target's final norm and head.

    Args (the first two on the device of the states to come):
        final_norm: [ht] weight of the target's final norm.
        head: [V, ht] weight of the target's head.
        eps: of the final norm.
        target_ids: [Vd] int64, the target id of each draft id.

    States are pre-norm (slot N): the norm is applied here, once. Logits come in the states' dtype, as the engine's do,
    and by its kernels; the labels of training by plain matrix products, for no row's bits matter there.
    """

    def __init__(self, final_norm: torch.Tensor, head: torch.Tensor, eps: float, target_ids: torch.Tensor) -> None:
        self.final_norm, self.head, self.eps = final_norm.detach(), head.detach(), eps
        self.draft_head = self.head[target_ids.to(head.device)]  # [V, ht] -> [Vd, ht]

    @torch.no_grad()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """States [M, ht] -> the target's logits over its whole vocabulary, [M, V] in the states' dtype."""
        norm = Norm(self.final_norm.to(states.dtype), self.eps)
        return norm_linear(Stream(states), norm, self.head.to(states.dtype))

    @torch.no_grad()
    def probabilities(self, states: torch.Tensor) -> torch.Tensor:
        """States [M, ht] -> the target's softmax renormalised over the draft vocabulary, [M, Vd] fp32."""
        normed = rms_norm(states, self.final_norm.to(states.dtype), self.eps)
        return F.linear(normed, self.draft_head.to(states.dtype)).float().softmax(-1)

    @torch.no_grad()
    def argmax(self, states: torch.Tensor) -> torch.Tensor:
        """States [M, ht] -> the target's greedy token over its whole vocabulary, [M] int64 (ties to the lowest id)."""
        rows = max(1, _LOGITS_PER_CHUNK[states.device.type] // self.head.shape[0])
        chunks = [self.logits(c).argmax(-1) for c in states.split(rows)]
        return torch.cat(chunks) if chunks else states.new_zeros(0, dtype=torch.int64)

"""SwiGLU feed-forward block."""

import torch
from torch import nn

from slipstream.engine.layers.linear import Linear, MergedLinear
from slipstream.kernels.silu_mul import silu_mul


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, dtype=dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(silu_mul(self.gate_up_proj(x)))

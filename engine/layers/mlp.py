"""SwiGLU feed-forward block."""

import torch
from torch import nn

from slipstream.engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels.silu_mul import silu_mul


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)). The intermediate features are divided over the ranks."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, parallel: TensorParallel, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        cut = parallel.cut(intermediate_size)
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, {"gate_proj": cut, "up_proj": cut}, dtype=dtype)
        self.down_proj = RowParallelLinear(cut, hidden_size, parallel, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(silu_mul(self.gate_up_proj(x)))

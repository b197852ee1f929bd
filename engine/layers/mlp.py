"""SwiGLU feed-forward block."""

import torch
from torch import nn

from slipstream.engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels.norm_gate_up import norm_gate_up
from slipstream.kernels.stream import Norm, Stream


class GatedMLP(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x))). The intermediate features are divided over the ranks."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, parallel: TensorParallel, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        cut = parallel.cut(intermediate_size)
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, {"gate_proj": cut, "up_proj": cut}, dtype=dtype)
        self.down_proj = RowParallelLinear(cut, hidden_size, parallel, dtype=dtype)

    @property
    def last_add(self) -> nn.Module:
        """What adds the block's output to the stream, for those who watch it: `reduce`, `partial`, called with it."""
        return self.down_proj

    def forward(self, stream: Stream, norm: Norm) -> Stream:
        """The stream of M rows behind the block."""
        return self.down_proj(norm_gate_up(stream, norm, self.gate_up_proj.weight), stream)

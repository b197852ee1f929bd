"""First half of a SwiGLU block: norm, the gate and up projections, silu(gate) * up."""

import torch

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.int4 import Int4Weight
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.silu_mul import silu_mul
from slipstream.kernels.stream import Norm, Stream


def norm_gate_up(stream: Stream, norm: Norm, weight: torch.Tensor | Int4Weight) -> torch.Tensor:
    """silu(g) * u with [g; u] = norm(x) W^T; g and u are rounded to the dtype of `weight` first.

    Args:
        stream: M rows of width h.
        norm: of the block.
        weight: [2 I, h], gate rows first.

    Returns:
        [M, I].
    """
    if isinstance(weight, torch.Tensor) and on_gpu(stream.rows) and weight.numel():
        from slipstream.kernels.gpu import norm_gate_up as gpu

        return gpu.norm_gate_up(stream, norm, weight)
    return silu_mul(norm_linear(stream, norm, weight))  # [M, 2I] -> [M, I]

"""First half of a SwiGLU block: norm, the gate and up projections, silu(gate) * up."""

import torch

from slipstream.kernels.dispatch import cuda_products, triton_product
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.silu_mul import silu_mul
from slipstream.kernels.stream import Norm, Stream
from slipstream.kernels.weight import Weight


def norm_gate_up(stream: Stream, norm: Norm, weight: Weight) -> torch.Tensor:
    """silu(g) * u with [g; u] = norm(x) W^T; g and u are rounded to the dtype of `weight` first.

    Args:
        stream: M rows of width h.
        norm: of the block.
        weight: [2 I, h], gate rows first.

    Returns:
        [M, I].
    """
    if cuda := cuda_products(weight, stream.rows, half=weight.shape[0] // 2):
        return cuda.norm_gate_up(stream, norm, weight)
    if triton_product(weight, stream.rows):
        from slipstream.kernels.gpu import norm_gate_up as gpu

        return gpu.norm_gate_up(stream, norm, weight)
    return silu_mul(norm_linear(stream, norm, weight))  # [M, 2I] -> [M, I]

"""Last step of a block: linear layer, and the add of its output to the residual stream."""

import torch

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.int4 import Int4Weight
from slipstream.kernels.linear import linear
from slipstream.kernels.stream import Stream


def linear_add(x: torch.Tensor, weight: torch.Tensor | Int4Weight, stream: Stream) -> Stream:
    """The stream with x W^T added; the product is rounded to the dtype of `weight` before the add.

    Args:
        x: [M, K].
        weight: [h, K].
        stream: M rows of width h; left as it is.
    """
    if isinstance(weight, torch.Tensor) and on_gpu(x) and weight.numel():
        from slipstream.kernels.gpu import linear_add as gpu

        return gpu.linear_add(x, weight, stream)
    return Stream(stream.rows + linear(x, weight))

"""Last step of a block: linear layer, and the add of its output to the residual stream."""

import torch

from slipstream.kernels.dispatch import cuda_products, triton_product
from slipstream.kernels.linear import linear
from slipstream.kernels.stream import Stream
from slipstream.kernels.weight import Weight


def linear_add(x: torch.Tensor, weight: Weight, stream: Stream) -> Stream:
    """The stream with x W^T added; the product is rounded to the dtype of `weight` before the add.

    Args:
        x: [M, K].
        weight: [h, K].
        stream: M rows of width h; left as it is.
    """
    if cuda := cuda_products(weight, x):
        return cuda.linear_add(x, weight, stream)
    if triton_product(weight, x):
        from slipstream.kernels.gpu import linear_add as gpu

        return gpu.linear_add(x, weight, stream)
    return Stream(stream.rows + linear(x, weight))

"""Linear layer that reads the residual stream through a norm."""

import torch

from slipstream.kernels.dispatch import cuda_products, triton_product
from slipstream.kernels.linear import linear
from slipstream.kernels.rms_norm import rms_norm
from slipstream.kernels.stream import Norm, Stream
from slipstream.kernels.weight import Weight


def norm_linear(stream: Stream, norm: Norm | None, weight: Weight) -> torch.Tensor:
    """y = norm(x) W^T.

    Args:
        stream: M rows of width K.
        norm: None: the rows are read as they are.
        weight: [N, K].

    Returns:
        [M, N].
    """
    if cuda := cuda_products(weight, stream.rows, half=16 if norm is None else 0):
        return cuda.norm_linear(stream, norm, weight)
    if triton_product(weight, stream.rows):
        from slipstream.kernels.gpu import norm_linear as gpu

        return gpu.norm_linear(stream, norm, weight)
    return linear(normed(stream, norm), weight)


def normed(stream: Stream, norm: Norm | None) -> torch.Tensor:
    """What the matrix product reads: [M, K]."""
    return stream.rows if norm is None else rms_norm(stream.rows, norm.weight, norm.eps)

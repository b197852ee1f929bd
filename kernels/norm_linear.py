"""Linear layer that reads the residual stream through a norm."""

import torch

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.int4 import Int4Weight
from slipstream.kernels.linear import linear
from slipstream.kernels.rms_norm import rms_norm
from slipstream.kernels.stream import Norm, Stream


def norm_linear(stream: Stream, norm: Norm | None, weight: torch.Tensor | Int4Weight) -> torch.Tensor:
    """y = norm(x) W^T.

    Args:
        stream: M rows of width K.
        norm: None: the rows are read as they are.
        weight: [N, K].

    Returns:
        [M, N].
    """
    if isinstance(weight, torch.Tensor) and on_gpu(stream.rows) and weight.numel():
        from slipstream.kernels.gpu import norm_linear as gpu

        return gpu.norm_linear(stream, norm, weight)
    return linear(normed(stream, norm), weight)


def normed(stream: Stream, norm: Norm | None) -> torch.Tensor:
    """What the matrix product reads: [M, K]."""
    return stream.rows if norm is None else rms_norm(stream.rows, norm.weight, norm.eps)

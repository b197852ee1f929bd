"""RMSNorm on its own; the fused ops have it in them."""

import torch

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.stream import Norm, Stream


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis: x / sqrt(mean(x^2) + eps) * weight.

    Args:
        x: [..., hidden], any float dtype; statistics in fp32.
        weight: [hidden].
        eps: added to the mean square.

    Returns:
        [..., hidden], dtype of `x`, rounded before the weight is applied (as transformers' Llama does).
    """
    if on_gpu(x) and x.numel():
        from slipstream.kernels.gpu import rms_norm as gpu

        rows = x.reshape(-1, x.shape[-1])  # [..., hidden] -> [M, hidden]
        return gpu.rms_norm(Stream(rows), Norm(weight, eps)).view(x.shape)
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def norm_stream(stream: Stream, norm: Norm) -> torch.Tensor:
    """`rms_norm` of the M rows of a stream [M, h]; on a card by the sums of squares that their writer left."""
    if on_gpu(stream.rows) and stream.rows.numel():
        from slipstream.kernels.gpu import rms_norm as gpu

        return gpu.rms_norm(stream, norm)
    return rms_norm(stream.rows, norm.weight, norm.eps)

"""A linear layer of its own for each head."""

import torch

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.linear import linear


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y[m, h] = W[h] x[m, h]; a row's bits as in `linear`.

    Args:
        x: [M, H, K]; a view with other strides will do.
        weight: [H, N, K] in the dtype of `x`.

    Returns:
        [M, H, N].
    """
    if on_gpu(x):
        from slipstream.kernels.gpu import head_linear as gpu

        return gpu.head_linear(x, weight)
    if not weight.shape[0]:
        return x.new_zeros(x.shape[0], 0, weight.shape[1])
    return torch.stack([linear(x[:, head].contiguous(), w) for head, w in enumerate(weight)], dim=1)

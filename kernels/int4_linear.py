"""Linear layer over an INT4 weight."""

import torch

from slipstream.kernels.dispatch import cuda_products, on_gpu
from slipstream.kernels.int4 import Int4Weight, matrix
from slipstream.kernels.linear import linear
from slipstream.kernels.stream import Stream


def linear_int4(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """y = x W^T in fp32 with the exact weights (integer x scale), rounded once; a row's bits as in `linear`.

    Args:
        x: [..., K], fp32 or bf16.
        weight: [N, K]; a rank of a tensor-parallel group may hold none of either.

    Returns:
        [..., N], dtype of `x`.
    """
    if not weight.words.numel():
        return x.new_zeros(*x.shape[:-1], weight.num_rows)
    if cuda := cuda_products(weight, x):
        rows = x.reshape(-1, x.shape[-1])  # [..., K] -> [M, K]
        y: torch.Tensor = cuda.norm_linear(Stream(rows), None, weight)
        return y.view(*x.shape[:-1], weight.num_rows)  # [M, N] -> [..., N]
    if on_gpu(x):
        from slipstream.kernels.gpu.int4_linear import linear_int4 as on_card

        return on_card(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)  # [M, K] -> [M, N] -> [..., N]
    return linear(x.float(), matrix(weight)).to(x.dtype)

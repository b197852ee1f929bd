"""Linear layer whose rows do not depend on each other's number."""

import torch
import torch.nn.functional as F

from slipstream.kernels.cuda.pack import PackedWeight, unpack
from slipstream.kernels.dispatch import cuda_products, on_gpu
from slipstream.kernels.int4 import Int4Weight
from slipstream.kernels.stream import Stream
from slipstream.kernels.weight import Weight

# oneDNN keeps one summation order for bf16 up to this many rows (measured; probed at start), then changes its blocking.
_ROWS_PER_CALL = 32
# Fewer rows than this take paths of their own that sum in another order: one row, and in fp32 two and three as well.
# (In bf16 the difference is rare in random data, where rounding hides it; the probe's inputs cancel and show it.)
_MIN_ROWS = 4


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """y = x W^T, the bits of each row independent of the number of rows.

    Args:
        x: [..., in_features], the dtype of `weight`.
        weight: [out_features, in_features]; a rank of a tensor-parallel group may hold none of either. An INT4 weight
            goes to `int4_linear`, a packed one to its CUDA kernel, or is unpacked where that does not run.

    Returns:
        [..., out_features].

    While gradients are recorded (training) rows are left as they are: there the promise is not needed.
    """
    if isinstance(weight, Int4Weight):
        from slipstream.kernels.int4_linear import linear_int4  # not at the top: its twin is made of this function

        return linear_int4(x, weight)
    if isinstance(weight, PackedWeight):
        cuda = cuda_products(weight, x)
        if cuda is None:
            return linear(x, unpack(weight))
        rows = x.reshape(-1, x.shape[-1])  # [..., in] -> [M, in]
        packed_y: torch.Tensor = cuda.norm_linear(Stream(rows), None, weight)
        return packed_y.view(*x.shape[:-1], weight.shape[0])  # [M, out] -> [..., out]
    if torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad):
        return F.linear(x, weight)
    if not weight.numel() or not x.numel():
        return x.new_zeros(*x.shape[:-1], weight.shape[0])
    rows = x.reshape(-1, x.shape[-1])  # [..., in] -> [M, in]
    if on_gpu(rows):
        from slipstream.kernels.gpu import norm_linear as gpu

        y = gpu.norm_linear(Stream(rows), None, weight)
        return y.view(*x.shape[:-1], weight.shape[0])  # [M, out] -> [..., out]
    num_rows = rows.shape[0]
    if num_rows < _MIN_ROWS:
        return _few_rows(rows, weight).reshape(*x.shape[:-1], -1)  # [M, out] -> [..., out]
    if num_rows <= _ROWS_PER_CALL:
        return F.linear(x, weight)
    out = rows.new_empty(num_rows, weight.shape[0])
    for start in range(0, num_rows, _ROWS_PER_CALL):
        block = rows[start : start + _ROWS_PER_CALL]
        if block.shape[0] < _MIN_ROWS:
            out[start:] = _few_rows(block, weight)
        else:
            torch.mm(block, weight.t(), out=out[start : start + _ROWS_PER_CALL])
    return out.reshape(*x.shape[:-1], -1)  # [M, out] -> [..., out]


def _few_rows(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `linear` for 1 to 3 rows: the first row repeated until there are enough."""
    num_rows = rows.shape[0]
    filled = torch.cat((rows, rows[:1].expand(_MIN_ROWS - num_rows, -1)))  # [M, in] -> [4, in]
    return F.linear(filled, weight)[:num_rows]  # [4, out] -> [M, out]

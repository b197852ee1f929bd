"""Linear layer whose rows do not depend on each other's number."""

import torch
import torch.nn.functional as F

# oneDNN keeps one summation order for bf16 up to this many rows (measured; probed at start), then changes its blocking.
_ROWS_PER_CALL = 32
# For fp32 a single row takes a matrix-vector path that sums in another order than the matrix path for two and more.
_MIN_ROWS_FP32 = 2


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y = x W^T, the bits of each row independent of the number of rows.

    Args:
        x: [..., in_features], the dtype of `weight`.
        weight: [out_features, in_features].

    Returns:
        [..., out_features].

    While gradients are recorded (training) rows are not cut: there the promise is not needed and large calls are faster.
    """
    if torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad):
        return F.linear(x, weight)
    rows = x.reshape(-1, x.shape[-1])  # [..., in] -> [M, in]
    num_rows = rows.shape[0]
    if rows.dtype == torch.float32 and num_rows < _MIN_ROWS_FP32:
        rows = F.pad(rows, (0, 0, 0, _MIN_ROWS_FP32 - num_rows))  # [1, in] -> [2, in]
        return F.linear(rows, weight)[:num_rows].reshape(*x.shape[:-1], -1)  # [2, out] -> [..., out]
    if num_rows <= _ROWS_PER_CALL:
        return F.linear(x, weight)
    out = rows.new_empty(num_rows, weight.shape[0])
    for start in range(0, num_rows, _ROWS_PER_CALL):
        block = rows[start : start + _ROWS_PER_CALL]
        if block.dtype == torch.float32 and block.shape[0] < _MIN_ROWS_FP32:
            out[start:] = linear(block, weight)
        else:
            torch.mm(block, weight.t(), out=out[start : start + _ROWS_PER_CALL])
    return out.reshape(*x.shape[:-1], -1)  # [M, out] -> [..., out]

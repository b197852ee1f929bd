"""The norm in front of a matrix product, and sums of squares whose order does not hang on the number of rows.

Such a sum runs either over a tile as wide and of as many threads whatever the rows (`row_squares`), or in the matrix
unit (`column_sums`), whose order does not hang on how a tile lies in the registers.
"""

import triton
import triton.language as tl

from slipstream.kernels.gpu.launch import INTERPRET

# Triton's interpreter computes bf16 on its bit patterns: there, sums are taken in fp32.
_INTERPRET = tl.constexpr(INTERPRET)
# Width of the tile over which a row's squares, or its parts, are summed. Wide enough that the threads of a program lie
# along the row in the same way for 8 rows and for 128.
_STAT_WIDTH = tl.constexpr(256)
_PARTS_WIDTH = tl.constexpr(128)


@triton.jit
def norm_constants(norm_ptr, k, K: tl.constexpr, EVEN: tl.constexpr):
    """The norm's weight at k."""
    if EVEN:
        constants = tl.load(norm_ptr + k)
    else:
        constants = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    return constants


@triton.jit
def normalise(x, rstd, weight):
    """x * rstd, rounded, times weight, rounded: the steps of `rms_norm`."""
    rounded = (x.to(tl.float32) * rstd).to(x.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def normalise_tile(x, rstd, weight, SPLIT: tl.constexpr):
    """A tile [S, k, m] or [k, m] of rows, with rstd [m] and weight [S, k] or [k]."""
    if SPLIT > 1:
        normed = normalise(x, rstd[None, None, :], weight[:, :, None])
    else:
        normed = normalise(x, rstd[None, :], weight[:, None])
    return normed


@triton.jit
def row_squares(x_ptr, x_stride, m, num_rows, sumsq_ptr, num_parts, K: tl.constexpr, SUMSQ: tl.constexpr):
    """[m, a fixed width] fp32, whose sum along a row is its sum of squares: the parts that the rows' writer left, or
    made of the rows."""
    inside = (m < num_rows)[:, None]
    if SUMSQ:
        squares = tl.zeros((m.shape[0], _PARTS_WIDTH), tl.float32)
        for start in range(0, num_parts, _PARTS_WIDTH):
            part = start + tl.arange(0, _PARTS_WIDTH)
            at = (m * num_parts)[:, None] + part[None, :]  # [m], [p] -> [m, p]
            squares += tl.load(sumsq_ptr + at, mask=inside & (part < num_parts)[None, :], other=0.0)
    else:
        squares = tl.zeros((m.shape[0], _STAT_WIDTH), tl.float32)
        for start in range(0, K, _STAT_WIDTH):
            k = start + tl.arange(0, _STAT_WIDTH)
            at = (m.to(tl.int64) * x_stride)[:, None] + k[None, :]  # [m], [k] -> [m, k]
            x = tl.load(x_ptr + at, mask=inside & (k < K)[None, :], other=0.0).to(tl.float32)
            squares += x * x
    return squares


@triton.jit
def rstd_of(squares, eps, K: tl.constexpr):
    """1 / sqrt(mean square + eps) of the rows of `row_squares`: [m]."""
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit
def column_sums(v):
    """Sums of v [n, m] over n, in the matrix unit: [m]. v: fp32, of at most 16 significant bits where rows are bf16."""
    if _INTERPRET:
        total = tl.sum(v, 0)
    else:
        ones = tl.full((16, v.shape[0]), 1.0, tl.bfloat16)
        high = v.to(tl.bfloat16)
        rest = v - high.to(tl.float32)
        low = rest.to(tl.bfloat16)
        least = (rest - low.to(tl.float32)).to(tl.bfloat16)  # nothing for squares of bf16
        sums = tl.dot(ones, least)  # [16, n] x [n, m] -> [16, m], each row the same
        sums = tl.dot(ones, low, sums)
        sums = tl.dot(ones, high, sums)
        total = tl.max(sums, 0)  # -> [m], any of the rows
    return total

"""Triton kernel of `linear_add`: the product, the add to the stream, and the squares that the next norm will want."""

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu.gemm import finish, start
from slipstream.kernels.gpu.product_launch import launch_product
from slipstream.kernels.gpu.squares import column_sums
from slipstream.kernels.gpu.tiles import RESIDENT_K, tile_for
from slipstream.kernels.stream import Stream


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _linear_add_kernel(
    x_ptr,
    x_stride,
    num_rows,
    w_ptr,
    norm_ptr,
    eps,
    sumsq_ptr,
    num_parts,
    residual_ptr,
    residual_stride,
    out_ptr,
    out_sumsq_ptr,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    NORM: tl.constexpr,
    SUMSQ: tl.constexpr,
    OUT_SUMSQ: tl.constexpr,
    PREFETCH: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    nw = tl.minimum(n, N - 1)  # rows beyond the last are read as the last and not written
    held = start(w_ptr, nw, nw, norm_ptr, K, BLOCK_K, SPLIT, False, NORM, PREFETCH, WARPS, PDL)
    inside = (m < num_rows)[None, :] & (n < N)[:, None]
    at = m.to(tl.int64)[None, :] * residual_stride + n[:, None]  # [n, m]
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
    acc, _ = finish(
        held, x_ptr, x_stride, m, num_rows, w_ptr, nw, nw, norm_ptr, eps, sumsq_ptr, num_parts,
        K, BLOCK_K, SPLIT, False, NORM, SUMSQ,
    )  # fmt: skip
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    rows = (acc.to(TYPE).to(tl.float32) + residual.to(tl.float32)).to(TYPE)  # the product is rounded, then the sum
    tl.store(out_ptr + m.to(tl.int64)[None, :] * N + n[:, None], rows, mask=inside)
    if OUT_SUMSQ:
        kept = tl.where(inside, rows.to(tl.float32), 0.0)
        parts = m.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(out_sumsq_ptr + parts, column_sums(kept * kept), mask=m < num_rows)


def linear_add(x: torch.Tensor, weight: torch.Tensor, stream: Stream) -> Stream:
    """As the op. Wide rows come with their sums of squares, one a tile; narrow ones are read whole by their reader."""
    num_out, width = weight.shape
    residual = stream.rows
    if residual.shape != (x.shape[0], num_out) or residual.stride(1) != 1 or residual.dtype != weight.dtype:
        raise ValueError(f"the stream must be {(x.shape[0], num_out)} {weight.dtype}: found {tuple(residual.shape)}")
    tile = tile_for(num_out, width, weight.dtype)
    num_tiles = -(-num_out // tile.block_n)
    out = torch.empty((x.shape[0], num_out), dtype=weight.dtype, device=weight.device)
    sumsq = None
    if num_out > RESIDENT_K:
        sumsq = torch.empty((x.shape[0], num_tiles), dtype=torch.float32, device=weight.device)
    launch_product(
        _linear_add_kernel,
        Stream(x),
        None,
        weight,
        tile,
        num_tiles,
        residual_ptr=residual,
        residual_stride=residual.stride(0),
        out_ptr=out,
        out_sumsq_ptr=sumsq,
        N=num_out,
        OUT_SUMSQ=sumsq is not None,
    )
    return Stream(out, sumsq)

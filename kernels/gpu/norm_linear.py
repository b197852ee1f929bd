"""Triton kernel of `norm_linear`: y = norm(x) W^T."""

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu.gemm import finish, start
from slipstream.kernels.gpu.product_launch import launch_product
from slipstream.kernels.gpu.tiles import tile_for
from slipstream.kernels.stream import Norm, Stream


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _norm_linear_kernel(
    x_ptr,
    x_stride,
    num_rows,
    w_ptr,
    norm_ptr,
    eps,
    sumsq_ptr,
    num_parts,
    out_ptr,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    NORM: tl.constexpr,
    SUMSQ: tl.constexpr,
    PREFETCH: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    nw = tl.minimum(n, N - 1)  # rows beyond the last are read as the last and not written
    held = start(w_ptr, nw, nw, norm_ptr, K, BLOCK_K, SPLIT, False, NORM, PREFETCH, WARPS, PDL)
    acc, _ = finish(
        held, x_ptr, x_stride, m, num_rows, w_ptr, nw, nw, norm_ptr, eps, sumsq_ptr, num_parts,
        K, BLOCK_K, SPLIT, False, NORM, SUMSQ,
    )  # fmt: skip
    at = m.to(tl.int64)[None, :] * N + n[:, None]  # [n, m]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[None, :] & (n < N)[:, None])


def norm_linear(stream: Stream, norm: Norm | None, weight: torch.Tensor) -> torch.Tensor:
    """As the op: [M, N]."""
    num_out, width = weight.shape
    out = torch.empty((stream.rows.shape[0], num_out), dtype=weight.dtype, device=weight.device)
    tile = tile_for(num_out, width, weight.dtype)
    num_tiles = -(-num_out // tile.block_n)
    launch_product(_norm_linear_kernel, stream, norm, weight, tile, num_tiles, out_ptr=out, N=num_out)
    return out

"""Triton kernel of `norm_gate_up`: silu(gate) * up, both of one program."""

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu.gemm import finish, start
from slipstream.kernels.gpu.product_launch import launch_product
from slipstream.kernels.gpu.tiles import tile_for
from slipstream.kernels.stream import Norm, Stream


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _norm_gate_up_kernel(
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
    held = start(w_ptr, nw, nw + N, norm_ptr, K, BLOCK_K, SPLIT, True, NORM, PREFETCH, WARPS, PDL)
    gate, up = finish(
        held, x_ptr, x_stride, m, num_rows, w_ptr, nw, nw + N, norm_ptr, eps, sumsq_ptr, num_parts,
        K, BLOCK_K, SPLIT, True, NORM, SUMSQ,
    )  # fmt: skip
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    gate = gate.to(TYPE).to(tl.float32)  # the projection's output is rounded, and silu's
    up = up.to(TYPE).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(TYPE).to(tl.float32)
    at = m.to(tl.int64)[None, :] * N + n[:, None]  # [n, m]
    tl.store(out_ptr + at, (silu * up).to(TYPE), mask=(m < num_rows)[None, :] & (n < N)[:, None])


def norm_gate_up(stream: Stream, norm: Norm, weight: torch.Tensor) -> torch.Tensor:
    """As the op: [M, I]."""
    num_out = weight.shape[0] // 2
    out = torch.empty((stream.rows.shape[0], num_out), dtype=weight.dtype, device=weight.device)
    tile = tile_for(weight.shape[0], weight.shape[1], weight.dtype, paired=True)
    launch_product(
        _norm_gate_up_kernel,
        stream,
        norm,
        weight,
        tile,
        -(-num_out // tile.block_n),
        paired=True,
        out_ptr=out,
        N=num_out,
    )
    return out

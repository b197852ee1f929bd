"""Triton kernel of `norm_qkv`: the projections, and on each head its norm, its rotation and its place in the cache.

A program holds the same part of both halves of one head, so that the rotation needs no other program; with a head norm
it holds the whole head.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu.gemm import finish, start
from slipstream.kernels.gpu.product_launch import launch_product
from slipstream.kernels.gpu.squares import column_sums
from slipstream.kernels.gpu.tiles import tile_for
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Norm, Stream


@triton.jit
def _head_norm(low, high, norm_ptr, eps, n, HALF: tl.constexpr, TYPE: tl.constexpr):
    """RMSNorm of a head in two halves [n, m], steps as in `rms_norm`."""
    inside = n < HALF
    low = tl.where(inside[:, None], low, 0.0)
    high = tl.where(inside[:, None], high, 0.0)
    rstd = tl.rsqrt((column_sums(low * low) + column_sums(high * high)) / (2 * HALF) + eps)[None, :]  # [1, m]
    weight_low = tl.load(norm_ptr + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    weight_high = tl.load(norm_ptr + HALF + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    low = (low * rstd).to(TYPE).to(tl.float32) * weight_low
    high = (high * rstd).to(TYPE).to(tl.float32) * weight_high
    return low.to(TYPE).to(tl.float32), high.to(TYPE).to(tl.float32)


@triton.jit
def _times(x, y, TYPE: tl.constexpr):
    return (x * y.to(tl.float32)).to(TYPE).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _norm_qkv_kernel(
    x_ptr,
    x_stride,
    num_rows,
    w_ptr,
    norm_ptr,
    eps,
    sumsq_ptr,
    num_parts,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    q_eps,
    k_norm_ptr,
    k_eps,
    q_ptr,
    cells_ptr,
    cell_stride,
    kv_stride,
    head_stride,
    write_index_ptr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    HALF: tl.constexpr,
    PARTS_OF_HALF: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    NORM: tl.constexpr,
    SUMSQ: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    SINK: tl.constexpr,
    PREFETCH: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1) // PARTS_OF_HALF
    n = (tl.program_id(1) % PARTS_OF_HALF) * BLOCK_N + tl.arange(0, BLOCK_N)
    nw = head * (2 * HALF) + tl.minimum(n, HALF - 1)
    held = start(w_ptr, nw, nw + HALF, norm_ptr, K, BLOCK_K, SPLIT, True, NORM, PREFETCH, WARPS, PDL, True)
    # Both halves of a head side by side: [n, m, 2].
    d = n[:, None, None] + (tl.arange(0, 2) * HALF)[None, None, :]  # [n, 1, 2]
    inside = (m < num_rows)[None, :, None] & (n < HALF)[:, None, None]
    angle = (m * (2 * HALF))[None, :, None] + d
    rotates = inside & (head < Q + KV)
    cos = tl.load(cos_ptr + angle, mask=rotates, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=rotates, other=0.0)
    if SINK:
        cell = tl.load(write_index_ptr + m, mask=m < num_rows, other=0)
    else:
        cell = m.to(tl.int64)
    low, high = finish(
        held, x_ptr, x_stride, m, num_rows, w_ptr, nw, nw + HALF, norm_ptr, eps, sumsq_ptr, num_parts,
        K, BLOCK_K, SPLIT, True, NORM, SUMSQ,
    )  # fmt: skip
    TYPE: tl.constexpr = q_ptr.dtype.element_ty
    low = low.to(TYPE).to(tl.float32)  # the projection's output is rounded
    high = high.to(TYPE).to(tl.float32)
    if Q_NORM:  # noqa: SIM102 (one is known at compile time, the other is not)
        if head < Q:
            low, high = _head_norm(low, high, q_norm_ptr, q_eps, n, HALF, TYPE)
    if K_NORM:  # noqa: SIM102
        if (head >= Q) & (head < Q + KV):
            low, high = _head_norm(low, high, k_norm_ptr, k_eps, n, HALF, TYPE)
    y = tl.join(low, high)  # 2 x [n, m] -> [n, m, 2]
    if head < Q + KV:  # both products and their sum are rounded
        y = _times(y, cos, TYPE) + _times(tl.join(-high, low), sin, TYPE)
    if head < Q:
        out_ptr = q_ptr + head * (2 * HALF)
        at = m.to(tl.int64) * (Q * 2 * HALF)
    else:
        value = (head - Q) // KV  # 0: a key, 1: a value
        out_ptr = cells_ptr + (value * kv_stride + (head - Q - value * KV) * head_stride)
        at = cell * cell_stride
    tl.store(out_ptr + at[None, :, None] + d, y.to(TYPE), mask=inside)


def norm_qkv(
    stream: Stream,
    norm: Norm | None,
    weight: torch.Tensor,
    heads: Heads,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    sink: KVSink | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As the op."""
    num_rows, half = stream.rows.shape[0], heads.dim // 2
    if cos.shape != (num_rows, heads.dim) or sin.shape != cos.shape or cos.dtype != weight.dtype:
        raise ValueError(f"cos and sin must be {(num_rows, heads.dim)} {weight.dtype}: found {cos.shape} {cos.dtype}")
    tile = tile_for(weight.shape[0], weight.shape[1], weight.dtype, paired=True)
    if q_norm is not None or k_norm is not None:
        tile = tile.whole_head(half, weight.shape[1], weight.element_size())
    tile = replace(tile, block_n=min(tile.block_n, max(16, triton.next_power_of_2(half))))
    q = torch.empty((num_rows, heads.q, heads.dim), dtype=weight.dtype, device=weight.device)
    if sink is None:
        cells = torch.empty((num_rows, 2, heads.kv, heads.dim), dtype=weight.dtype, device=weight.device)
    else:
        cells = sink.cache.view(-1, *sink.cache.shape[2:])  # [blocks, block, 2, kv, d] -> [cells, 2, kv, d]
    parts_of_half = -(-half // tile.block_n)
    launch_product(
        _norm_qkv_kernel,
        stream,
        norm,
        weight,
        tile,
        (heads.q + 2 * heads.kv) * parts_of_half,
        paired=True,
        settles=True,
        cos_ptr=cos.contiguous(),
        sin_ptr=sin.contiguous(),
        q_norm_ptr=None if q_norm is None else q_norm.weight,
        q_eps=0.0 if q_norm is None else q_norm.eps,
        k_norm_ptr=None if k_norm is None else k_norm.weight,
        k_eps=0.0 if k_norm is None else k_norm.eps,
        q_ptr=q,
        cells_ptr=cells,
        cell_stride=cells.stride(0),
        kv_stride=cells.stride(1),
        head_stride=cells.stride(2),
        write_index_ptr=None if sink is None else sink.write_index,
        Q=heads.q,
        KV=heads.kv,
        HALF=half,
        PARTS_OF_HALF=parts_of_half,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        SINK=sink is not None,
    )
    return (q, cells[:, 0], cells[:, 1]) if sink is None else (q, None, None)

"""Triton: a linear layer of its own for each head, and queries taken into the latents' space with it.

The core is that of all products (`gemm`), so a row's bits do not hang on the number of rows.
"""

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu.gemm import finish, start
from slipstream.kernels.gpu.product_launch import launch_product
from slipstream.kernels.gpu.rotary import rotated
from slipstream.kernels.gpu.tiles import tile_for
from slipstream.kernels.stream import Stream


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _head_linear_kernel(
    x_ptr,
    x_stride,
    x_head_stride,
    num_rows,
    w_ptr,
    w_head_stride,
    norm_ptr,
    eps,
    sumsq_ptr,
    num_parts,
    cos_ptr,
    sin_ptr,
    out_ptr,
    out_stride,
    out_head_stride,
    N,
    TILES: tl.constexpr,
    ROPE: tl.constexpr,
    E: tl.constexpr,
    ROTATE: tl.constexpr,
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
    """The program of a head's first tile also brings the ROPE columns behind its K into those behind its N."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    nw = tl.minimum(n, N - 1)  # rows beyond the last are read as the last and not written
    w_ptr += head.to(tl.int64) * w_head_stride
    x_ptr += head.to(tl.int64) * x_head_stride
    out_ptr += head.to(tl.int64) * out_head_stride
    held = start(w_ptr, nw, nw, norm_ptr, K, BLOCK_K, SPLIT, False, NORM, PREFETCH, WARPS, PDL)
    acc, _ = finish(
        held, x_ptr, x_stride, m, num_rows, w_ptr, nw, nw, norm_ptr, eps, sumsq_ptr, num_parts,
        K, BLOCK_K, SPLIT, False, NORM, SUMSQ,
    )  # fmt: skip
    at = m.to(tl.int64)[None, :] * out_stride + n[:, None]  # [n, m]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[None, :] & (n < N)[:, None])
    if ROPE > 0:  # noqa: SIM102 (one is known at compile time, the other is not)
        if tile == 0:
            d = tl.arange(0, E)
            inside = (m < num_rows)[:, None] & (d < ROPE)[None, :]
            row = x_ptr + K + m.to(tl.int64)[:, None] * x_stride
            if ROTATE:
                y = rotated(row, cos_ptr, sin_ptr, m[:, None], d[None, :], inside, ROPE)
            else:
                y = tl.load(row + d[None, :], mask=inside, other=0.0)
            tl.store(out_ptr + N + m.to(tl.int64)[:, None] * out_stride + d[None, :], y, mask=inside)


def of_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y[m, h] = W[h] x[m, h].

    Args:
        x: [M, H, K], its last axis contiguous.
        weight: [H, N, K], each head's part contiguous.

    Returns:
        [M, H, N].
    """
    out = torch.empty((x.shape[0], *weight.shape[:2]), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, 0, None)
    return out


head_linear = of_heads


def into_latents(q: torch.Tensor, key: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """Queries absorbed, as `absorb_query`.

    Args:
        q: [M, H, nope + rope].
        key: [H, kv_rank, nope].
        angles: (cos, sin), each [M, rope], that turn the rope part; None: it is turned already.

    Returns:
        [M, H, kv_rank + rope].
    """
    rope = q.shape[2] - key.shape[2]
    out = torch.empty((*q.shape[:2], key.shape[1] + rope), dtype=q.dtype, device=q.device)
    _launch(q, key, out, rope, angles)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    rope: int,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    heads, num_out, width = weight.shape
    if x.shape[1] != heads or x.shape[2] != width + rope or weight.stride()[1:] != (width, 1):
        raise ValueError(
            f"rows {tuple(x.shape)} and weights {tuple(weight.shape)}, strides {weight.stride()}: expected [M, "
            f"{heads}, {width + rope}] and each head's weight contiguous"
        )
    if not out.numel():
        return
    tile = tile_for(num_out, width, weight.dtype)
    tiles = -(-num_out // tile.block_n)
    cos, sin = (None, None) if angles is None else (one.contiguous() for one in angles)
    launch_product(
        _head_linear_kernel,
        Stream(x[:, 0, :width]),
        None,
        weight[0],
        tile,
        heads * tiles,
        x_head_stride=x.stride(1),
        w_head_stride=weight.stride(0),
        cos_ptr=cos,
        sin_ptr=sin,
        out_ptr=out,
        out_stride=out.stride(0),
        out_head_stride=out.stride(1),
        N=num_out,
        TILES=tiles,
        ROPE=rope,
        E=max(2, triton.next_power_of_2(rope)),
        ROTATE=angles is not None,
    )

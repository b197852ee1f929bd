"""Triton: new cells of the latent cache, normed and rotated on their way, and queries made ready for attention."""

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.head_linear import into_latents
from slipstream.kernels.gpu.rotary import rotated
from slipstream.kernels.gpu.squares import normalise
from slipstream.kernels.stream import Norm


@triton.jit
def _write_latent_kernel(
    kv_ptr,
    kv_stride,
    norm_ptr,
    eps,
    cos_ptr,
    sin_ptr,
    cells_ptr,
    write_index_ptr,
    query_ptr,
    query_norm_ptr,
    query_eps,
    normed_ptr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    QUERY: tl.constexpr,
    Q: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for each row's cell, and one for the queries' latent in front of it, where there is one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    m, k, d = tl.program_id(0).to(tl.int64), tl.arange(0, D), tl.arange(0, E)
    weight = tl.load(norm_ptr + k, mask=k < RANK, other=0.0)
    if QUERY > 0:
        j = tl.arange(0, Q)
        query_weight = tl.load(query_norm_ptr + j, mask=j < QUERY, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if tl.program_id(1) == 0:
        cell = cells_ptr + tl.load(write_index_ptr + m) * (RANK + ROPE)
        row = kv_ptr + m * kv_stride
        x = tl.load(row + k, mask=k < RANK, other=0.0)
        x32 = x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x32 * x32, 0) / RANK + eps)
        tl.store(cell + k, normalise(x, rstd, weight), mask=k < RANK)
        rope = rotated(row + RANK, cos_ptr, sin_ptr, m, d, d < ROPE, ROPE)
        tl.store(cell + RANK + d, rope, mask=d < ROPE)
    elif QUERY > 0:
        y = tl.load(query_ptr + m * kv_stride + j, mask=j < QUERY, other=0.0)
        y32 = y.to(tl.float32)
        query_rstd = tl.rsqrt(tl.sum(y32 * y32, 0) / QUERY + query_eps)
        tl.store(normed_ptr + m * QUERY + j, normalise(y, query_rstd, query_weight), mask=j < QUERY)


def write_latent(
    kv: torch.Tensor, norm: Norm, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, write_index: torch.Tensor
) -> None:
    """As the op."""
    _write(kv, norm, cos, sin, cache, write_index, None, None)


def latent_rows(
    made: torch.Tensor,
    query_norm: Norm,
    norm: Norm,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    write_index: torch.Tensor,
) -> torch.Tensor:
    """As the op: one launch."""
    width = query_norm.weight.shape[0]
    normed = torch.empty((made.shape[0], width), dtype=made.dtype, device=made.device)
    _write(made[:, width:], norm, cos, sin, cache, write_index, query_norm, normed, made)
    return normed


def _write(
    kv: torch.Tensor,
    norm: Norm,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    write_index: torch.Tensor,
    query_norm: Norm | None,
    normed: torch.Tensor | None,
    made: torch.Tensor | None = None,
) -> None:
    num_rows, width = kv.shape
    rank = norm.weight.shape[0]
    if width != cache.shape[2] or cos.shape != (num_rows, width - rank) or sin.shape != cos.shape:
        raise ValueError(
            f"rows {tuple(kv.shape)} of latents of {rank} and angles {tuple(cos.shape)} do not fit the cache "
            f"{tuple(cache.shape)}"
        )
    if kv.stride(1) != 1 or not cache.is_contiguous() or not kv.dtype == cache.dtype == cos.dtype:
        raise ValueError(f"rows {kv.dtype}, strides {kv.stride()}: expected {cache.dtype}, columns side by side")
    query = 0 if query_norm is None else query_norm.weight.shape[0]
    if num_rows:
        launch.launch(
            _write_latent_kernel,
            (num_rows, 1 if query_norm is None else 2),
            num_warps=4,
            kv_ptr=kv,
            kv_stride=kv.stride(0),
            norm_ptr=norm.weight,
            eps=norm.eps,
            cos_ptr=cos.contiguous(),
            sin_ptr=sin.contiguous(),
            cells_ptr=cache,
            write_index_ptr=write_index,
            query_ptr=made,
            query_norm_ptr=None if query_norm is None else query_norm.weight,
            query_eps=0.0 if query_norm is None else query_norm.eps,
            normed_ptr=normed,
            RANK=rank,
            ROPE=width - rank,
            D=triton.next_power_of_2(rank),
            E=max(2, triton.next_power_of_2(width - rank)),
            QUERY=query,
            Q=triton.next_power_of_2(max(1, query)),
        )


@triton.jit
def _rotate_query_kernel(
    q_ptr,
    q_stride,
    q_head_stride,
    cos_ptr,
    sin_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row and head."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, d = tl.arange(0, N), tl.arange(0, E)
    row = q_ptr + m * q_stride + head * q_head_stride
    out = out_ptr + (m * HEADS + head) * (NOPE + ROPE)
    tl.store(out + n, tl.load(row + n, mask=n < NOPE, other=0.0), mask=n < NOPE)
    rope = rotated(row + NOPE, cos_ptr, sin_ptr, m, d, d < ROPE, ROPE)
    tl.store(out + NOPE + d, rope, mask=d < ROPE)


def rotate_query(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As the op."""
    num_rows, heads, width = q.shape
    rope = cos.shape[1]
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty((num_rows, heads, width), dtype=q.dtype, device=q.device)
    if out.numel():
        launch.launch(
            _rotate_query_kernel,
            (num_rows, heads),
            num_warps=1,
            q_ptr=q,
            q_stride=q.stride(0),
            q_head_stride=q.stride(1),
            cos_ptr=cos.contiguous(),
            sin_ptr=sin.contiguous(),
            out_ptr=out,
            HEADS=heads,
            NOPE=width - rope,
            ROPE=rope,
            N=max(2, triton.next_power_of_2(width - rope)),
            E=max(2, triton.next_power_of_2(rope)),
        )
    return out


def absorb_query(q: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As the op: one launch."""
    return into_latents(q if q.stride(2) == 1 else q.contiguous(), key, (cos, sin))

"""RMSNorm as a kernel of its own: for rows that many programs would otherwise normalise again and again."""

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.squares import normalise, row_squares, rstd_of
from slipstream.kernels.stream import Norm, Stream

_ROWS, _BLOCK_K = 8, 512


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _rms_norm_kernel(
    x_ptr,
    x_stride,
    num_rows,
    norm_ptr,
    eps,
    sumsq_ptr,
    num_parts,
    out_ptr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    SUMSQ: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program writes SPAN columns of its rows."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rstd = rstd_of(row_squares(x_ptr, x_stride, m, num_rows, sumsq_ptr, num_parts, K, SUMSQ), eps, K)
    first = tl.program_id(1) * SPAN
    for start in range(0, SPAN, BLOCK_K):
        k = first + start + tl.arange(0, BLOCK_K)
        inside = (m < num_rows)[:, None] & (k < K)[None, :]
        row = m.to(tl.int64)[:, None]
        x = tl.load(x_ptr + row * x_stride + k[None, :], mask=inside, other=0.0)  # [m, k]
        weight = tl.load(norm_ptr + k, mask=k < K, other=0.0)
        tl.store(out_ptr + row * K + k[None, :], normalise(x, rstd[:, None], weight[None, :]), mask=inside)


def rms_norm(stream: Stream, norm: Norm, num_warps: int = 4) -> torch.Tensor:
    """The normed rows [M, K].

    Args:
        stream: M rows of width K.
        norm: the norm.
        num_warps: of a program. Sums are the bits of a fused kernel of as many warps.
    """
    rows = stream.rows
    num_rows, width = rows.shape
    out = torch.empty((num_rows, width), dtype=rows.dtype, device=rows.device)
    parts = stream.sumsq
    # Where the sums of squares are there, a program need not read the whole row.
    span = width if parts is None else _BLOCK_K
    launch.launch(
        _rms_norm_kernel,
        (-(-num_rows // _ROWS), -(-width // span)),
        num_warps=num_warps,
        x_ptr=rows,
        x_stride=rows.stride(0),
        num_rows=num_rows,
        norm_ptr=norm.weight,
        eps=norm.eps,
        sumsq_ptr=parts,
        num_parts=0 if parts is None else parts.shape[1],
        out_ptr=out,
        K=width,
        BLOCK_M=_ROWS,
        BLOCK_K=_BLOCK_K,
        SPAN=span,
        SUMSQ=parts is not None,
    )
    return out

"""Triton kernel of `rotary_rows`, one program a row, and the rotation of a head for other kernels."""

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch


@triton.jit
def rotary_row(positions_ptr, table_ptr, num_positions, num_rows, out_ptr, m, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Angles of row m, into out [2, num_rows, WIDTH]; NaN for a position beyond the table."""
    position = tl.maximum(tl.load(positions_ptr + m), 0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < WIDTH
    known = inside & (position < num_positions)
    for half in tl.static_range(2):  # cos, sin
        row = (half * num_positions + position) * WIDTH
        x = tl.load(table_ptr + row + d, mask=known, other=float("nan"))
        tl.store(out_ptr + (half * num_rows + m) * WIDTH + d, x, mask=inside)


@triton.jit
def rotated(x_ptr, cos_ptr, sin_ptr, m, d, inside, WIDTH: tl.constexpr):
    """Columns d of x, rotated by the angles [.., WIDTH] of row m: both products and their sum are rounded, as in torch.

    x_ptr, m and d broadcast to the shape of `inside`, where there is something to read.
    """
    HALF: tl.constexpr = WIDTH // 2
    cos = tl.load(cos_ptr + m * WIDTH + d, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + m * WIDTH + d, mask=inside, other=0.0)
    x = tl.load(x_ptr + d, mask=inside, other=0.0)
    partner = tl.load(x_ptr + tl.where(d < HALF, d + HALF, d - HALF), mask=inside, other=0.0)
    partner = tl.where(d < HALF, -partner.to(tl.float32), partner.to(tl.float32))
    TYPE: tl.constexpr = x.dtype
    straight = (x.to(tl.float32) * cos.to(tl.float32)).to(TYPE).to(tl.float32)
    crossed = (partner * sin.to(tl.float32)).to(TYPE).to(tl.float32)
    return (straight + crossed).to(TYPE)


@triton.jit(do_not_specialize=["num_rows", "num_positions"])
def _rotary_rows_kernel(
    table_ptr,
    positions_ptr,
    out_ptr,
    num_rows,
    num_positions,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0).to(tl.int64)
    rotary_row(positions_ptr, table_ptr, num_positions, num_rows, out_ptr, m, WIDTH, BLOCK)


def rotary_rows(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the op: (cos, sin), both [M, d]."""
    num_rows, width = positions.shape[0], table.shape[2]
    out = torch.empty((2, num_rows, width), dtype=table.dtype, device=table.device)
    if num_rows:
        launch.launch(
            _rotary_rows_kernel,
            (num_rows,),
            num_warps=1,
            table_ptr=table,
            positions_ptr=positions.contiguous(),
            out_ptr=out,
            num_rows=num_rows,
            num_positions=table.shape[1],
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
        )
    return out[0], out[1]

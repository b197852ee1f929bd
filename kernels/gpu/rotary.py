"""Triton kernel of `rotary_rows`: one program a row."""

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

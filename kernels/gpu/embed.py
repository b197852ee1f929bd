"""Triton kernel of `embed` and `embed_at`: a program copies a row of the table, and the angles of its position."""

from typing import Any

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.rotary import rotary_row
from slipstream.kernels.gpu.tiles import RESIDENT_K
from slipstream.kernels.stream import Stream


@triton.jit(do_not_specialize=["start", "num_ids", "num_rows", "num_positions"])
def _embed_kernel(
    ids_ptr,
    ids_stride,
    table_ptr,
    start,
    num_ids,
    out_ptr,
    sumsq_ptr,
    positions_ptr,
    angles_ptr,
    num_positions,
    num_rows,
    to_angles_ptr,
    WIDTH: tl.constexpr,
    ANGLES: tl.constexpr,
    ANGLES_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMSQ: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0).to(tl.int64)
    if ANGLES:
        rotary_row(positions_ptr, angles_ptr, num_positions, num_rows, to_angles_ptr, m, ANGLES, ANGLES_BLOCK)
    place = tl.load(ids_ptr + m * ids_stride).to(tl.int64) - start
    held = (place >= 0) & (place < num_ids)
    row = tl.where(held, place, 0) * WIDTH
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, WIDTH, BLOCK):
        k = first + tl.arange(0, BLOCK)
        x = tl.load(table_ptr + row + k, mask=(k < WIDTH) & held, other=0.0)
        tl.store(out_ptr + m * WIDTH + k, x, mask=k < WIDTH)
        if SUMSQ:
            squares += x.to(tl.float32) * x.to(tl.float32)
    if SUMSQ:
        tl.store(sumsq_ptr + m, tl.sum(squares, 0))


def embed(token_ids: torch.Tensor, table: torch.Tensor) -> Stream:
    """As the op. Wide rows come with their sum of squares."""
    return _run(token_ids, table, 0, sumsq=table.shape[1] > RESIDENT_K)


def embed_at(
    token_ids: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, angles: torch.Tensor
) -> tuple[Stream, torch.Tensor, torch.Tensor]:
    """As the op. Wide rows come with their sum of squares."""
    turned = torch.empty((2, len(token_ids), angles.shape[2]), dtype=angles.dtype, device=angles.device)
    where = {
        "positions_ptr": positions.contiguous(),
        "angles_ptr": angles,
        "num_positions": angles.shape[1],
        "to_angles_ptr": turned,
        "ANGLES": angles.shape[2],
        "ANGLES_BLOCK": triton.next_power_of_2(angles.shape[2]),
    }
    return _run(token_ids, table, 0, sumsq=table.shape[1] > RESIDENT_K, angles=where), turned[0], turned[1]


def embed_part(token_ids: torch.Tensor, table: torch.Tensor, start: int) -> torch.Tensor:
    """As the op."""
    return _run(token_ids, table, start, sumsq=False).rows


_NO_ANGLES: dict[str, Any] = {
    "positions_ptr": None, "angles_ptr": None, "num_positions": 0, "to_angles_ptr": None, "ANGLES": 0, "ANGLES_BLOCK": 1
}  # fmt: skip


def _run(
    token_ids: torch.Tensor, table: torch.Tensor, start: int, *, sumsq: bool, angles: dict[str, Any] = _NO_ANGLES
) -> Stream:
    num_rows, width = token_ids.shape[0], table.shape[1]
    out = torch.empty((num_rows, width), dtype=table.dtype, device=table.device)
    squares = None
    if sumsq:
        squares = torch.empty((num_rows, 1), dtype=torch.float32, device=table.device)
    if num_rows:
        launch.launch(
            _embed_kernel,
            (num_rows,),
            num_warps=4,
            ids_ptr=token_ids,
            ids_stride=token_ids.stride(0),
            table_ptr=table,
            start=start,
            num_ids=table.shape[0],
            out_ptr=out,
            sumsq_ptr=squares,
            num_rows=num_rows,
            **angles,
            WIDTH=width,
            BLOCK=1024,
            SUMSQ=sumsq,
        )
    return Stream(out, squares)

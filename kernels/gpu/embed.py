"""Triton kernel of `embed`: rows of the table."""

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.tiles import RESIDENT_K
from slipstream.kernels.stream import Stream


@triton.jit(do_not_specialize=["start", "num_ids"])
def _embed_kernel(
    ids_ptr,
    ids_stride,
    table_ptr,
    start,
    num_ids,
    out_ptr,
    sumsq_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMSQ: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0).to(tl.int64)
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


def embed_part(token_ids: torch.Tensor, table: torch.Tensor, start: int) -> torch.Tensor:
    """As the op."""
    return _run(token_ids, table, start, sumsq=False).rows


def _run(token_ids: torch.Tensor, table: torch.Tensor, start: int, *, sumsq: bool) -> Stream:
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
            WIDTH=width,
            BLOCK=1024,
            SUMSQ=sumsq,
        )
    return Stream(out, squares)

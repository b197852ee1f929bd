"""Triton: the cache cells that rows are written to, in one launch."""

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch

_ROWS = 256  # of a program


@triton.jit(do_not_specialize=["table_stride", "positions_stride", "num_rows", "total"])
def _write_index(
    table_ptr,
    table_stride,
    positions_ptr,
    positions_stride,
    out_ptr,
    num_rows,
    total,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = index < total
    request, row = (index // num_rows).to(tl.int64), index % num_rows
    position = tl.load(positions_ptr + request * positions_stride + row, mask=real, other=-1)
    there = position >= 0
    block = tl.load(table_ptr + request * table_stride + position // BLOCK_SIZE, mask=there, other=0)
    tl.store(out_ptr + index, tl.where(there, block * BLOCK_SIZE + position % BLOCK_SIZE, 0), mask=real)


def write_index(block_table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Cell of each row in the flattened cache.

    Args:
        block_table: [B, blocks_per_sequence] int64.
        positions: [B, R] int64; -1 marks padding, which gets a cell of block 0.
        block_size: tokens a block.

    Returns:
        [B * R] int64.
    """
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    positions = positions if positions.stride(1) == 1 else positions.contiguous()
    total = positions.numel()
    out = torch.empty(total, dtype=torch.int64, device=positions.device)
    launch.launch(
        _write_index,
        (triton.cdiv(total, _ROWS),),
        num_warps=4,
        table_ptr=table,
        table_stride=table.stride(0),
        positions_ptr=positions,
        positions_stride=positions.stride(0),
        out_ptr=out,
        num_rows=positions.shape[1],
        total=total,
        BLOCK_SIZE=block_size,
        ROWS=_ROWS,
    )
    return out

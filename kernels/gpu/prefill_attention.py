"""Triton: attention of prompt rows over a paged cache, one program for a block of rows of a KV head.

Keys are walked in tiles at absolute multiples with a running maximum. A tile that a row does not see multiplies what
the row has by exactly 1 and adds exact zeros, and the block of rows has one size: so a row's bits depend neither on
where the prompt was cut, nor on padding, nor on its neighbours.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.attention_split import padded_dim
from slipstream.kernels.gpu.paged_attention import LOG2_E, check


@dataclass(frozen=True)
class Tile:
    """rows: of a program; keys: tokens a step of its loop; stages: of the load pipeline (no bits)."""

    rows: int
    keys: int
    stages: int


# By (padded) head_dim; shared memory fits the smallest architecture (99 KB a block on sm_120).
_TILES = {64: Tile(64, 64, 5), 128: Tile(64, 64, 5), 256: Tile(64, 32, 3)}
_TILE_FP32 = Tile(16, 16, 1)  # for tests of tiny models


@triton.jit(do_not_specialize=["table_stride", "positions_stride", "num_rows", "table_width", "window"])
def _prefill(
    q_ptr,
    q_stride,
    cache_ptr,
    table_ptr,
    table_stride,
    positions_ptr,
    positions_stride,
    out_ptr,
    num_rows,
    table_width,
    window,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # The last rows see the most keys: they start first.
    row_block, kv_head, request = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    folded = row_block * M + tl.arange(0, M)  # [M], rows with the group of query heads folded in
    row, head = folded // GROUP, kv_head * GROUP + folded % GROUP
    real = row < num_rows
    dims = tl.arange(0, D)
    held = dims < HEAD_DIM
    keys = tl.arange(0, T)
    q_cells = request.to(tl.int64) * num_rows + row
    cell_stride = 2 * KV_HEADS * HEAD_DIM
    cache_ptr += kv_head * HEAD_DIM
    table_ptr += request.to(tl.int64) * table_stride
    if PDL:
        tl.extra.cuda.gdc_wait()

    position = tl.load(positions_ptr + request.to(tl.int64) * positions_stride + row, mask=real, other=-1).to(tl.int32)
    q_cell = q_ptr + q_cells[:, None] * q_stride + (head * HEAD_DIM)[:, None] + dims[None, :]
    q = tl.load(q_cell, mask=real[:, None] & held[None, :], other=0.0)  # [M, D]
    if UPCAST:
        q = q.to(tl.float32)
    high = tl.max(position, 0)
    low = 0
    if WINDOWED:
        low = tl.maximum(tl.min(tl.where(position >= 0, position, high), 0) - window + 1, 0)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741
    acc = tl.zeros([M, D], tl.float32)
    for tile in tl.range(low // T, (high + T) // T, num_stages=STAGES):
        token = tile * T + keys
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=token < table_width * BLOCK_SIZE, other=0)
        cell = cache_ptr + (block * BLOCK_SIZE + token % BLOCK_SIZE) * cell_stride
        used = (token >= low) & (token <= high)
        mask = used[:, None] & held[None, :]
        k = tl.load(cell[:, None] + dims[None, :], mask=mask, other=0.0)  # [T, D]
        v = tl.load(cell[:, None] + (KV_HEADS * HEAD_DIM) + dims[None, :], mask=mask, other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, T]
        seen = token[None, :] <= position[:, None]
        if WINDOWED:
            seen = seen & (token[None, :] > position[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1) * scale)
        safe = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(tl.fma(s, tl.full([M, T], 1.0, tl.float32) * scale, tl.broadcast_to(-safe[:, None], [M, T])))
        old = tl.exp2(m - safe)
        l = l * old + tl.sum(p, 1)  # noqa: E741
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
        m = top
    inverse = 1.0 / tl.where(l == 0.0, 1.0, l)  # a padding row saw nothing: zeros
    cells = out_ptr + ((q_cells * KV_HEADS * GROUP + head) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(cells, acc * inverse[:, None], mask=real[:, None] & held[None, :])


def prefill_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Prompt rows; arguments and result as of `paged_attention` beside it."""
    batch, num_rows, heads, head_dim = q.shape
    _, block_size, _, kv_heads, _ = cache.shape
    check(q, cache, block_table, scale, window)
    q = q if q.stride()[2:] == (head_dim, 1) and q.stride(0) == num_rows * q.stride(1) else q.contiguous()
    positions = positions if positions.stride(1) == 1 else positions.contiguous()
    padded, group = padded_dim(head_dim), heads // kv_heads
    tile = _TILES[padded] if q.dtype.itemsize == 2 else _TILE_FP32
    out = torch.empty((batch, num_rows, heads, head_dim), dtype=q.dtype, device=q.device)
    launch.launch(
        _prefill,
        (triton.cdiv(num_rows * group, tile.rows), kv_heads, batch),
        num_warps=4,
        q_ptr=q,
        q_stride=q.stride(1),
        cache_ptr=cache,
        table_ptr=block_table,
        table_stride=block_table.stride(0),
        positions_ptr=positions,
        positions_stride=positions.stride(0),
        out_ptr=out,
        num_rows=num_rows,
        table_width=block_table.shape[1],
        window=window or 0,
        scale=scale * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        D=padded,
        BLOCK_SIZE=block_size,
        WINDOWED=window is not None,
        M=tile.rows,
        T=tile.keys,
        STAGES=tile.stages,
        UPCAST=launch.INTERPRET,
    )
    return out

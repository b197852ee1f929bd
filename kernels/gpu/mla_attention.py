"""Triton: latent attention (MLA) over a paged cache of latents, all heads over the same cells.

A cell is read once and used twice: whole (latent and rope part) as key, its latent as value. So scores are the sum of
two products, over the latents and over the rope parts, and heads are rows like others of one matrix product.

Decode and verify: a row's keys are cut into chunks whose size follows from the row's own position (`mla_split`), each
chunk is walked tile by tile into one partial, and a second kernel puts a row's partials together in their order. Which
program makes which chunk changes no bit, nor do rows, requests and padding that travel with a row: a tile that it does
not see multiplies what it has by exactly 1 and adds exact zeros.

Prompts: the same walk over all tiles at once, absorbed as well. Expanded keys and values would need room for as many
tokens as the block table can hold, since a captured graph does not know how many there are.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.attention_split import workspace_of
from slipstream.kernels.gpu.mla_split import CLASSES, COMBINE, PROGRAMS, Combine, Split, Tile, decode_tile, prefill_tile
from slipstream.kernels.gpu.paged_attention import LOG2_E
from slipstream.kernels.paged_attention import AttentionRows

_CLASSES = tl.constexpr(CLASSES)
_ROW_KEYS = ["table_stride", "positions_stride", "num_rows", "chunk_slots"]


@triton.jit
def _class_of(position, FIRST_BITS: tl.constexpr):
    """How often the chunks of a row at `position` are doubled."""
    doubled = position * 0
    for i in tl.static_range(_CLASSES):
        doubled += ((position >> (FIRST_BITS + i)) > 0).to(tl.int32)
    return doubled


@triton.jit
def _walk(
    q, q_rope, cache_ptr, table_ptr, first, end, high, position, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_BITS: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """(m, l, acc) of the rows at `position` over tiles first..end - 1; no token behind `high` is read."""
    dims, rope_dims, keys = tl.arange(0, D), tl.arange(0, E), tl.arange(0, T)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741
    acc = tl.zeros([M, D], tl.float32)
    for tile in tl.range(first, end, num_stages=STAGES):
        token = tile * T + keys
        used = token <= high
        block = tl.load(table_ptr + (token >> BLOCK_BITS), mask=used, other=0)
        cell = (block << BLOCK_BITS) + (token & (1 << BLOCK_BITS) - 1)
        at = cache_ptr + cell * (RANK + ROPE)
        latent = tl.load(at[:, None] + dims[None, :], mask=used[:, None] & (dims < RANK)[None, :], other=0.0)  # [T, D]
        rope_at = at[:, None] + RANK + rope_dims[None, :]
        rope = tl.load(rope_at, mask=used[:, None] & (rope_dims < ROPE)[None, :], other=0.0)  # [T, E]
        if UPCAST:
            latent, rope = latent.to(tl.float32), rope.to(tl.float32)
        s = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")  # [M, E] x [E, T] -> [M, T]
        s = tl.dot(q, tl.trans(latent), s, input_precision="ieee")  # [M, D] x [D, T] -> [M, T]
        s = tl.where(token[None, :] <= position[:, None], s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1) * scale)
        safe = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(tl.fma(s, tl.full([M, T], 1.0, tl.float32) * scale, tl.broadcast_to(-safe[:, None], [M, T])))
        old = tl.exp2(m - safe)
        l = l * old + tl.sum(p, 1)  # noqa: E741
        acc = tl.dot(p.to(latent.dtype), latent, acc * old[:, None], input_precision="ieee")  # [M, T] x [T, D]
        m = top
    return m, l, acc


@triton.jit
def _queries(
    q_ptr, cells, real, RANK: tl.constexpr, ROPE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """Rows `cells` of q [.., RANK + ROPE], as ([M, D], [M, E])."""
    dims, rope_dims = tl.arange(0, D), tl.arange(0, E)
    at = q_ptr + cells[:, None] * (RANK + ROPE)
    q = tl.load(at + dims[None, :], mask=real[:, None] & (dims < RANK)[None, :], other=0.0)
    rope = tl.load(at + RANK + rope_dims[None, :], mask=real[:, None] & (rope_dims < ROPE)[None, :], other=0.0)
    if UPCAST:
        q, rope = q.to(tl.float32), rope.to(tl.float32)
    return q, rope


@triton.jit(do_not_specialize=_ROW_KEYS)
def _chunks(
    q_ptr,
    cache_ptr,
    table_ptr,
    table_stride,
    positions_ptr,
    positions_stride,
    partials_ptr,
    sums_ptr,
    num_rows,
    chunk_slots,
    scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    M: tl.constexpr,
    T_BITS: tl.constexpr,
    FIRST_BITS: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program, row_block, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    folded = row_block * M + tl.arange(0, M)  # [M], rows with heads folded in
    row = folded // HEADS
    real = row < num_rows
    at = positions_ptr + request.to(tl.int64) * positions_stride + row
    position = tl.load(at, mask=real, other=-1).to(tl.int32)
    doubled = _class_of(position, FIRST_BITS)
    seen = position >= 0
    least, most = tl.min(tl.where(seen, doubled, _CLASSES), 0), tl.max(tl.where(seen, doubled, -1), 0)
    rows_of_all = request.to(tl.int64) * num_rows * HEADS + folded
    q, q_rope = _queries(q_ptr, rows_of_all, real, RANK, ROPE, D, E, UPCAST)
    table_ptr += request.to(tl.int64) * table_stride
    # Partials of a request's block of rows: [chunk_slots, M, D]; their maxima and sums: [chunk_slots, 2, M].
    first_slot = (request.to(tl.int64) * tl.num_programs(1) + row_block) * chunk_slots
    for size in range(least, most + 1):  # nearly always one
        mine = tl.where(doubled == size, position, -1)
        high = tl.max(mine, 0)
        for chunk in range(program, (high >> T_BITS + size) + 1, tl.num_programs(0)):
            end = tl.minimum((chunk + 1) << size, (high >> T_BITS) + 1)
            m, l, acc = _walk(  # noqa: E741
                q, q_rope, cache_ptr, table_ptr, chunk << size, end, high, mine, scale,
                RANK, ROPE, D, E, BLOCK_BITS, M, 1 << T_BITS, STAGES, UPCAST,
            )  # fmt: skip
            wanted = chunk <= mine >> T_BITS + size  # -1 stays -1
            slot = first_slot + chunk
            dims = tl.arange(0, D)
            cells = (slot * M + tl.arange(0, M))[:, None] * D + dims[None, :]
            tl.store(partials_ptr + cells, acc, mask=wanted[:, None])
            tl.store(sums_ptr + slot * 2 * M + tl.arange(0, M), m, mask=wanted)
            tl.store(sums_ptr + (slot * 2 + 1) * M + tl.arange(0, M), l, mask=wanted)


@triton.jit(do_not_specialize=["positions_stride", "num_rows", "row_blocks", "chunk_slots"])
def _combine(
    partials_ptr,
    sums_ptr,
    positions_ptr,
    positions_stride,
    out_ptr,
    num_rows,
    row_blocks,
    chunk_slots,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    T_BITS: tl.constexpr,
    FIRST_BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row, head and block of columns. Partials are read past the L1 cache, which may hold those of the
    launch before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    folded, request = tl.program_id(0), tl.program_id(2)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    position = tl.load(positions_ptr + request.to(tl.int64) * positions_stride + folded // HEADS).to(tl.int32)
    count = (position >> T_BITS + _class_of(position, FIRST_BITS)) + 1  # padding: 0
    first_slot = (request.to(tl.int64) * row_blocks + folded // M) * chunk_slots
    inside = folded % M
    sums_ptr += first_slot * 2 * M + inside
    every = tl.arange(0, MOST)
    top = tl.max(tl.load(sums_ptr + every * 2 * M, mask=every < count, other=float("-inf"), cache_modifier=".cg"), 0)
    l = tl.zeros([CHUNKS], tl.float32)  # noqa: E741
    acc = tl.zeros([CHUNKS, COLUMNS], tl.float32)
    for start in range(0, count, CHUNKS):
        chunks = start + tl.arange(0, CHUNKS)
        there = chunks < count
        tops = tl.load(sums_ptr + chunks * 2 * M, mask=there, other=float("-inf"), cache_modifier=".cg")
        weight = tl.exp2(tops - top)
        sums = tl.load(sums_ptr + (chunks * 2 + 1) * M, mask=there, other=0.0, cache_modifier=".cg")
        cells = ((first_slot + chunks) * M + inside)[:, None] * D + columns[None, :]
        part = tl.load(partials_ptr + cells, mask=there[:, None], other=0.0, cache_modifier=".cg")  # [CHUNKS, COLUMNS]
        l = tl.fma(sums, weight, l)  # noqa: E741
        acc = tl.fma(part, tl.broadcast_to(weight[:, None], [CHUNKS, COLUMNS]), acc)
    total = tl.sum(l, 0)
    mixed = tl.sum(acc, 0) * (1.0 / tl.where(total == 0.0, 1.0, total))  # padding: zeros
    cell = out_ptr + ((request.to(tl.int64) * num_rows * HEADS) + folded) * RANK + columns
    tl.store(cell, mixed, mask=columns < RANK)


@triton.jit(do_not_specialize=["table_stride", "positions_stride", "num_rows"])
def _prefill(
    q_ptr,
    cache_ptr,
    table_ptr,
    table_stride,
    positions_ptr,
    positions_stride,
    out_ptr,
    num_rows,
    scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    M: tl.constexpr,
    T_BITS: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # The last rows see the most keys: they start first.
    row_block, request = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    folded = row_block * M + tl.arange(0, M)
    row = folded // HEADS
    real = row < num_rows
    at = positions_ptr + request.to(tl.int64) * positions_stride + row
    position = tl.load(at, mask=real, other=-1).to(tl.int32)
    rows_of_all = request.to(tl.int64) * num_rows * HEADS + folded
    q, q_rope = _queries(q_ptr, rows_of_all, real, RANK, ROPE, D, E, UPCAST)
    high = tl.max(position, 0)
    _, l, acc = _walk(  # noqa: E741
        q, q_rope, cache_ptr, table_ptr + request.to(tl.int64) * table_stride,
        0, (high >> T_BITS) + 1, high, position, scale,
        RANK, ROPE, D, E, BLOCK_BITS, M, 1 << T_BITS, STAGES, UPCAST,
    )  # fmt: skip
    inverse = 1.0 / tl.where(l == 0.0, 1.0, l)  # a padding row saw nothing: zeros
    dims = tl.arange(0, D)
    cells = out_ptr + rows_of_all[:, None] * RANK + dims[None, :]
    tl.store(cells, acc * inverse[:, None], mask=real[:, None] & (dims < RANK)[None, :])


def mla_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    rows: AttentionRows,
    scale: float,
    kv_rank: int,
    tile: Tile | None = None,
    programs: int = PROGRAMS,
    combine: Combine = COMBINE,
) -> torch.Tensor:
    """As the op, for decode and verify rows; padding rows give zeros.

    Args:
        q, cache, rows, scale, kv_rank: of the op.
        tile: None: the card's.
        programs: of the launch, about; changes no bits.
        combine: how the second kernel works.
    """
    batch, num_rows, heads, _ = q.shape
    out = torch.empty((batch, num_rows, heads, kv_rank), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    tile = tile or decode_tile(q.dtype)
    table, positions = rows.block_table, rows.positions
    common = _common(q, cache, rows, scale, kv_rank)
    split = Split.of(batch, num_rows * heads, table.shape[1] * cache.shape[1], tile, programs)
    slots, width = batch * split.row_blocks * split.chunks, common["D"]
    workspace = workspace_of(q.device)
    workspace.reserve(slots * tile.rows * (width + 2), 0)
    sums = workspace.partials[slots * tile.rows * width :]
    cut: dict[str, Any] = {"M": tile.rows, "T_BITS": tile.keys.bit_length() - 1, "FIRST_BITS": tile.first_bits}
    launch.launch(
        _chunks,
        (split.programs, split.row_blocks, batch),
        num_warps=tile.warps,
        partials_ptr=workspace.partials,
        sums_ptr=sums,
        chunk_slots=split.chunks,
        STAGES=tile.stages,
        **common,
        **cut,
    )
    launch.launch(
        _combine,
        (num_rows * heads, triton.cdiv(kv_rank, min(combine.columns, width)), batch),
        num_warps=combine.warps,
        partials_ptr=workspace.partials,
        sums_ptr=sums,
        positions_ptr=positions,
        positions_stride=positions.stride(0),
        out_ptr=out,
        num_rows=num_rows,
        HEADS=heads,
        row_blocks=split.row_blocks,
        chunk_slots=split.chunks,
        RANK=kv_rank,
        D=width,
        COLUMNS=min(combine.columns, width),
        CHUNKS=combine.chunks,
        MOST=tile.chunks,
        **cut,
    )
    return out


def mla_prefill(
    q: torch.Tensor, cache: torch.Tensor, rows: AttentionRows, scale: float, kv_rank: int, tile: Tile | None = None
) -> torch.Tensor:
    """`mla_attention` for rows of prompts; tile: None: the card's. Bits do not hang on how a prompt is cut."""
    batch, num_rows, heads, _ = q.shape
    out = torch.empty((batch, num_rows, heads, kv_rank), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    tile = tile or prefill_tile(q.dtype)
    launch.launch(
        _prefill,
        (triton.cdiv(num_rows * heads, tile.rows), batch),
        num_warps=tile.warps,
        out_ptr=out,
        M=tile.rows,
        T_BITS=tile.keys.bit_length() - 1,
        STAGES=tile.stages,
        **_common(q, cache, rows, scale, kv_rank),
    )
    return out


def _common(q: torch.Tensor, cache: torch.Tensor, rows: AttentionRows, scale: float, kv_rank: int) -> dict[str, Any]:
    """Arguments of both walks. A ValueError names what the kernels cannot take."""
    block_size, table, positions = cache.shape[1], rows.block_table, rows.positions
    rope_dim = cache.shape[2] - kv_rank
    if q.shape[3] != cache.shape[2] or q.dtype != cache.dtype or rope_dim < 1:
        raise ValueError(
            f"q {q.dtype} {tuple(q.shape)} with latents of {kv_rank} does not fit the cache {cache.dtype} "
            f"{tuple(cache.shape)}"
        )
    if block_size & (block_size - 1) or not cache.is_contiguous() or table.stride(1) != 1 or positions.stride(1) != 1:
        raise ValueError(
            f"blocks of {block_size} tokens: a power of two and a contiguous cache, table and positions are needed"
        )
    if scale <= 0:
        raise ValueError(f"scale {scale} must be above 0")
    return {
        "q_ptr": q.contiguous(),
        "cache_ptr": cache,
        "table_ptr": table,
        "table_stride": table.stride(0),
        "positions_ptr": positions,
        "positions_stride": positions.stride(0),
        "num_rows": q.shape[1],
        "HEADS": q.shape[2],
        "scale": scale * LOG2_E,
        "RANK": kv_rank,
        "ROPE": rope_dim,
        "D": max(16, triton.next_power_of_2(kv_rank)),
        "E": max(16, triton.next_power_of_2(rope_dim)),
        "BLOCK_BITS": block_size.bit_length() - 1,
        "UPCAST": launch.INTERPRET,
    }

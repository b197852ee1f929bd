"""Triton: attention of decode and verify rows over a paged cache, split along the keys.

A request's keys are cut at absolute multiples: tiles of `Tile.keys` tokens, groups of FAN tiles, groups of FAN groups,
and so on. What a row gets from a tile is a partial (m, l, acc); a node of that tree is its children merged in order.
So a row's bits follow from its own position alone. Which program computes which node does not matter for them, and is
chosen by the request's length: single tiles while there are few, whole groups when there are many. The program that
completes a node's last child merges the node (integer counters that return to 0; no float atomics).

What a row does not see (keys behind its position, before its window) gives it m = -inf and weights of exact 0, so that
tiles which are there for other rows of the tile leave it as it is.
"""

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.attention_split import FAN, Cut, Split, padded_dim, reserve, rows_of, tile_of, usual_cut
from slipstream.kernels.gpu.gemm import pinned

LOG2_E = 1.4426950408889634  # the kernels raise 2, not e


@triton.jit
def _merge(m, l, acc, m2, l2, acc2):  # noqa: E741
    """Partial (m, l, acc) followed by (m2, l2, acc2). One that saw nothing leaves the other's bits as they are."""
    top = tl.maximum(m, m2)
    safe = tl.where(top == float("-inf"), 0.0, top)
    a, b = tl.exp2(m - safe), tl.exp2(m2 - safe)
    # The fused multiply-add is spelled out: left to the compiler, it could differ between a merge here and one there.
    l = tl.fma(l2, b, l * a)  # noqa: E741
    b = tl.broadcast_to(b[:, None], acc2.shape)  # [M] -> [M, D]
    acc = tl.fma(acc2, b, acc * a[:, None])
    return top, l, acc


@triton.jit
def _cells(cache_ptr, block, token, cell_stride, BLOCK_BITS: tl.constexpr):
    """Where the key of each token lies, given its block."""
    return cache_ptr + ((block << BLOCK_BITS) + (token & (1 << BLOCK_BITS) - 1)) * cell_stride


@triton.jit
def _guessed_blocks(
    table_ptr, table_width, program, keys, EARLY: tl.constexpr, T: tl.constexpr, BLOCK_BITS: tl.constexpr
):  # fmt: skip
    """Blocks of the tiles from `program` on, [T] each. Nearly always a program's first tile is the one of its number:
    so that blocks need not come after the positions, from which the first tile follows, they are asked for at once."""
    blocks = ()
    for i in tl.static_range(EARLY):
        token = (program + i) * T + keys
        inside = token < table_width << BLOCK_BITS
        block = tl.load(table_ptr + (token >> BLOCK_BITS), mask=inside, other=0, cache_modifier=".cg")
        blocks = blocks + (block,)  # type: ignore[assignment] # noqa: RUF005
    return blocks


@triton.jit
def _early_cells(
    cache_ptr, table_ptr, table_width, blocks, program, start, keys, cell_stride, EARLY: tl.constexpr, T: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
):  # fmt: skip
    """Cells of the tiles from `start` on, [T] each. `blocks`: those of the guess that `start` is `program`."""
    cells = ()
    for i in tl.static_range(EARLY):
        token = (start + i) * T + keys
        missed = (token < table_width << BLOCK_BITS) & (start != program)
        block = tl.load(table_ptr + (token >> BLOCK_BITS), mask=missed, other=blocks[i], cache_modifier=".cg")
        cells = cells + (_cells(cache_ptr, block, token, cell_stride, BLOCK_BITS),)  # type: ignore[assignment] # noqa: RUF005
    return cells


@triton.jit
def _early_load(cells, offset, token, low, high, held, dims, others, EARLY: tl.constexpr, T: tl.constexpr):
    """Of each tile, what lies `offset` behind the cells of tokens low..high, [T, D]; elsewhere `others`."""
    loaded = ()
    for i in tl.static_range(EARLY):
        used = (token + i * T >= low) & (token + i * T <= high)
        at = cells[i][:, None] + offset + dims[None, :]
        x = tl.load(at, mask=used[:, None] & held[None, :], other=others[i], cache_modifier=".cg")
        loaded = loaded + (x,)  # type: ignore[assignment] # noqa: RUF005
    return loaded


@triton.jit
def _attend(
    m, l, acc, q, k, v, token, position, window, scale,  # noqa: E741
    M: tl.constexpr, T: tl.constexpr, WINDOWED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The partial (m, l, acc) followed by what the rows get from one tile."""
    if UPCAST:
        k, v = k.to(tl.float32), v.to(tl.float32)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, D] x [D, T] -> [M, T]
    seen = token[None, :] <= position[:, None]
    if WINDOWED:
        seen = seen & (token[None, :] > position[:, None] - window)
    s = tl.where(seen, s, float("-inf"))
    top = tl.max(s, 1) * scale
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(tl.fma(s, tl.full([M, T], 1.0, tl.float32) * scale, tl.broadcast_to(-safe[:, None], [M, T])))
    mixed = tl.dot(p.to(v.dtype), v, input_precision="ieee")  # [M, T] x [T, D] -> [M, D]
    return _merge(m, l, acc, top, tl.sum(p, 1), mixed)


# Numbers that differ between batches, lengths of tables and K, and need no kernel of their own.
_PLAIN = ["table_stride", "positions_stride", "num_rows", "table_width", "slots", "tile_slots", "group_slots"]
_PLAIN += ["few", "whole", "window"]


@triton.jit(do_not_specialize=_PLAIN)
def _decode(
    q_ptr,
    q_stride,
    cache_ptr,
    table_ptr,
    table_stride,
    positions_ptr,
    positions_stride,
    out_ptr,
    partials_ptr,
    counters_ptr,
    num_rows,
    table_width,
    slots,
    tile_slots,
    group_slots,
    few,
    whole,
    window,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    M: tl.constexpr,
    T_BITS: tl.constexpr,
    FAN_BITS: tl.constexpr,
    EARLY: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    SETTLED: tl.constexpr,
    SETTLES: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    T: tl.constexpr = 1 << T_BITS
    FAN: tl.constexpr = 1 << FAN_BITS
    if PDL and not SETTLED:
        tl.extra.cuda.gdc_wait()
    program, num_programs, pair, request = tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.program_id(2)
    kv_head = pair % KV_HEADS
    pair_of_all = (request * tl.num_programs(1) + pair).to(tl.int64)
    folded = pair // KV_HEADS * M + tl.arange(0, M)  # [M], rows with the group of query heads folded in
    row, head = folded // GROUP, kv_head * GROUP + folded % GROUP
    real = row < num_rows
    dims = tl.arange(0, D)
    held = dims < HEAD_DIM
    keys = tl.arange(0, T)
    q_cells = (request * num_rows + row).to(tl.int64)
    cell_stride = 2 * KV_HEADS * HEAD_DIM
    cache_ptr += kv_head * HEAD_DIM
    table_ptr += request.to(tl.int64) * table_stride
    slot_size = M * (D + 2)
    partials_ptr += pair_of_all * slots * slot_size
    counters_ptr += pair_of_all * slots
    acc_cells = tl.arange(0, M)[:, None] * D + dims[None, :]  # [M, D], inside a slot; then m [M], then l [M]
    ml_cells = M * D + tl.arange(0, M)

    # Written before this launch's predecessor began: positions, tables, and all cells but those of the rows themselves.
    # They are read past the L1 cache, which may hold what lay there before.
    all_rows = tl.arange(0, ROWS)
    at_all = positions_ptr + request.to(tl.int64) * positions_stride + all_rows
    of_all = tl.load(at_all, mask=all_rows < num_rows, other=-1, cache_modifier=".cg").to(tl.int32)
    at = positions_ptr + request.to(tl.int64) * positions_stride + row
    position = tl.load(at, mask=real, other=-1, cache_modifier=".cg").to(tl.int32)
    blocks = _guessed_blocks(table_ptr, table_width, program, keys, EARLY, T, BLOCK_BITS)
    fresh = tl.min(tl.where(of_all >= 0, of_all, 0x7FFFFFFF), 0)  # where the rows' own cells begin
    high = tl.max(position, 0)
    low = 0
    if WINDOWED:
        low = tl.maximum(tl.min(tl.where(position >= 0, position, high), 0) - window + 1, 0)
    first, last = low >> T_BITS, tl.maximum(high, 0) >> T_BITS
    # The unit of work: a tile, or a group of FAN tiles.
    wide = ((last >> FAN_BITS) - (first >> FAN_BITS) + 1) * few >= num_programs
    wide = wide | (last - first < whole)
    unit_bits = tl.where(wide, FAN_BITS, 0)
    room_of_units = tl.where(wide, group_slots, tile_slots)
    first_slot = tl.where(wide, tile_slots, 0)

    # Nothing to do: end now, before the wait, and leave the SM to the next kernel (launch.py: why a program may, as
    # long as others wait: program 0 never ends here).
    unit = (first >> unit_bits) + program
    if unit > last >> unit_bits:
        return

    # The program's first tiles, into registers: all their bytes are on the way before the kernel waits.
    start, stop = tl.maximum(unit << unit_bits, first), tl.minimum((unit + 1) << unit_bits, last + 1)
    cells = _early_cells(
        cache_ptr, table_ptr, table_width, blocks, program, start, keys, cell_stride, EARLY, T, BLOCK_BITS
    )  # fmt: skip
    mine = tl.minimum(high, stop * T - 1)  # the last token of this unit
    nothing = (0.0,) * EARLY
    from_start = start * T + keys
    old = tl.minimum(mine, fresh - 1)
    ks = _early_load(cells, 0, from_start, low, old, held, dims, nothing, EARLY, T)
    vs = _early_load(cells, KV_HEADS * HEAD_DIM, from_start, low, old, held, dims, nothing, EARLY, T)
    if PDL:
        if not SETTLES:
            tl.extra.cuda.gdc_launch_dependents()
        if SETTLED:
            tl.extra.cuda.gdc_wait()
        if SETTLES:
            tl.extra.cuda.gdc_launch_dependents()
    q_cell = q_ptr + q_cells[:, None] * q_stride + (head * HEAD_DIM)[:, None] + dims[None, :]
    q = tl.load(q_cell, mask=real[:, None] & held[None, :], other=0.0)  # [M, D]
    new = tl.maximum(low, fresh)
    ks = _early_load(cells, 0, from_start, new, mine, held, dims, ks, EARLY, T)
    vs = _early_load(cells, KV_HEADS * HEAD_DIM, from_start, new, mine, held, dims, vs, EARLY, T)
    q = pinned(q)  # it, too, is on the way together with them
    if UPCAST:
        q = q.to(tl.float32)

    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741
    acc = tl.zeros([M, D], tl.float32)
    for i in tl.static_range(EARLY):
        if start + i < stop:
            m, l, acc = _attend(  # noqa: E741
                m, l, acc, q, pinned(ks[i]), pinned(vs[i]), from_start + i * T, position, window, scale,
                M, T, WINDOWED, UPCAST,
            )  # fmt: skip
    start += EARLY
    while unit <= last >> unit_bits:
        for tile in tl.range(start, stop, num_stages=STAGES):
            token = tile * T + keys
            inside = token < table_width << BLOCK_BITS
            block = tl.load(table_ptr + (token >> BLOCK_BITS), mask=inside, other=0)
            cell = _cells(cache_ptr, block, token, cell_stride, BLOCK_BITS)
            used = (token >= low) & (token <= high)
            mask = used[:, None] & held[None, :]
            k = tl.load(cell[:, None] + dims[None, :], mask=mask, other=0.0)  # [T, D]
            v = tl.load(cell[:, None] + (KV_HEADS * HEAD_DIM) + dims[None, :], mask=mask, other=0.0)
            m, l, acc = _attend(  # noqa: E741
                m, l, acc, q, k, v, token, position, window, scale, M, T, WINDOWED, UPCAST
            )  # fmt: skip

        # Up the tree, for as long as this program completes the node that its own belongs to.
        node, low_node, high_node = unit, first >> unit_bits, last >> unit_bits
        offset, room = first_slot, room_of_units
        alive = 1
        while (low_node < high_node) & (alive == 1):
            slot = partials_ptr + (offset + node - low_node) * slot_size
            tl.store(slot + acc_cells, acc, mask=real[:, None])
            tl.store(slot + ml_cells, m, mask=real)
            tl.store(slot + ml_cells + M, l, mask=real)
            parent = node >> FAN_BITS
            eldest = tl.maximum(low_node, parent << FAN_BITS)
            youngest = tl.minimum(high_node, (parent << FAN_BITS) + FAN - 1)
            counter = counters_ptr + offset + room + parent - (low_node >> FAN_BITS)
            tl.debug_barrier()  # all threads have stored before one of them counts
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == youngest - eldest:
                tl.store(counter, 0)
                m = tl.full([M], float("-inf"), tl.float32)
                l = tl.zeros([M], tl.float32)  # noqa: E741
                acc = tl.zeros([M, D], tl.float32)
                for i in tl.static_range(FAN):
                    child = (parent << FAN_BITS) + i
                    there = real & (child >= low_node) & (child <= high_node)
                    slot = partials_ptr + (offset + child - low_node) * slot_size
                    m2 = tl.load(slot + ml_cells, mask=there, other=float("-inf"), cache_modifier=".cg")
                    l2 = tl.load(slot + ml_cells + M, mask=there, other=0.0, cache_modifier=".cg")
                    acc2 = tl.load(slot + acc_cells, mask=there[:, None], other=0.0, cache_modifier=".cg")
                    m, l, acc = _merge(m, l, acc, m2, l2, acc2)  # noqa: E741
            else:
                alive = 0
            node = parent
            offset, room = offset + room, (room >> FAN_BITS) + 2
            low_node, high_node = low_node >> FAN_BITS, high_node >> FAN_BITS
        if alive == 1:
            inverse = 1.0 / tl.where(l == 0.0, 1.0, l)  # a padding row saw nothing: zeros
            out_cells = out_ptr + ((q_cells * KV_HEADS * GROUP + head) * HEAD_DIM)[:, None] + dims[None, :]
            tl.store(out_cells, acc * inverse[:, None], mask=real[:, None] & held[None, :])
        unit += num_programs
        start, stop = tl.maximum(unit << unit_bits, first), tl.minimum((unit + 1) << unit_bits, last + 1)
        m = tl.full([M], float("-inf"), tl.float32)
        l = tl.zeros([M], tl.float32)  # noqa: E741
        acc = tl.zeros([M, D], tl.float32)


def paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    cut: Cut | None = None,
) -> torch.Tensor:
    """Decode and verify rows.

    Args:
        q: [B, R, heads, head_dim].
        cache: [num_blocks, block_size, 2, kv_heads, head_dim], contiguous.
        block_table: [B, blocks_per_sequence] int64.
        positions: [B, R] int64; -1 marks padding, which gives zeros.
        scale: multiplied onto q.k; above 0.
        window: positions that a row sees, itself included; None: all.
        cut: None: the usual one. Changes no bits.

    Returns:
        [B, R, heads, head_dim].
    """
    batch, num_rows, heads, head_dim = q.shape
    _, block_size, _, kv_heads, _ = cache.shape
    check(q, cache, block_table, scale, window)
    q = q if q.stride()[2:] == (head_dim, 1) and q.stride(0) == num_rows * q.stride(1) else q.contiguous()
    positions = positions if positions.stride(1) == 1 else positions.contiguous()
    padded = padded_dim(head_dim)
    tile, group, width = tile_of(head_dim, q.dtype), heads // kv_heads, block_table.shape[1]
    cut = cut or usual_cut(batch, batch * kv_heads * rows_of(num_rows * group, tile)[1], tile)
    split = Split.of(batch, num_rows * group, kv_heads, width * block_size, tile, cut)
    workspace = reserve(q.device, batch, kv_heads, split, padded)
    out = torch.empty((batch, num_rows, heads, head_dim), dtype=q.dtype, device=q.device)
    launch.launch(
        _decode,
        (split.programs, kv_heads * split.row_blocks, batch),
        num_warps=tile.warps,
        maxnreg=cut.registers or tile.registers,
        settles=cut.settles,
        q_ptr=q,
        q_stride=q.stride(1),
        cache_ptr=cache,
        table_ptr=block_table,
        table_stride=block_table.stride(0),
        positions_ptr=positions,
        positions_stride=positions.stride(0),
        out_ptr=out,
        partials_ptr=workspace.partials,
        counters_ptr=workspace.counters,
        num_rows=num_rows,
        table_width=width,
        slots=split.slots,
        tile_slots=split.tile_slots,
        group_slots=split.group_slots,
        few=cut.wide,
        whole=cut.whole,
        window=window or 0,
        scale=scale * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        D=padded,
        BLOCK_BITS=block_size.bit_length() - 1,
        WINDOWED=window is not None,
        M=split.rows,
        T_BITS=split.keys.bit_length() - 1,
        FAN_BITS=FAN.bit_length() - 1,
        EARLY=min(cut.early, tile.early),
        STAGES=cut.stages,
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        SETTLED=launch.settled(),
        SETTLES=cut.settles,
        UPCAST=launch.INTERPRET,
    )
    return out


def check(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, scale: float, window: int | None = None
) -> None:
    """What the kernels assume of their arguments; a ValueError names what does not hold."""
    heads, kv_heads, block_size = q.shape[2], cache.shape[3], cache.shape[1]
    if heads % kv_heads or q.shape[3] != cache.shape[4] or q.dtype != cache.dtype:
        raise ValueError(f"q {q.dtype} {tuple(q.shape)} does not fit the cache {cache.dtype} {tuple(cache.shape)}")
    if block_size & (block_size - 1) or not cache.is_contiguous() or block_table.stride(1) != 1:
        raise ValueError(f"blocks of {block_size} tokens: a power of two and a contiguous cache and table are needed")
    if scale <= 0 or (window is not None and window < 1):
        raise ValueError(f"scale {scale} and window {window} must be above 0")

"""Triton kernels of `kernels.round_ops`. The work is a few hundred integers: one program, or one a request."""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.round_ring import HEADER, RoundRing

if TYPE_CHECKING:
    from slipstream.kernels.round_ops import DraftRows, Paging, RoundTable, VerifyRows

_COPIED = 4096  # features that a program copies


def draft_rows(
    table: "RoundTable",
    slots: torch.Tensor,
    num_steps: int,
    clock: torch.Tensor | None,
    block_table: torch.Tensor | None,
    features: torch.Tensor | None,
) -> "DraftRows":
    from slipstream.kernels.round_ops import DraftRows

    batch = slots.shape[0]
    rows = DraftRows(
        token_ids=slots.new_empty(batch, num_steps + 1),
        positions=slots.new_empty(batch, num_steps + 1),
        start=slots.new_empty(batch),
        num_valid=slots.new_empty(batch),
        last_row=slots.new_empty(batch),
        chain_positions=slots.new_empty(num_steps, batch),
        block_table=_rows_of(block_table, batch),
        features=_rows_of(features, batch),
    )
    size = 0 if features is None else features[0].numel()
    _launch_each(
        _draft_rows_kernel,
        table,
        slots,
        num_steps + 1,
        1 + triton.cdiv(size, _COPIED),
        block_table,
        num_fresh_ptr=table.num_fresh,
        batch=batch,
        ids_ptr=rows.token_ids,
        positions_ptr=rows.positions,
        start_ptr=rows.start,
        valid_ptr=rows.num_valid,
        last_ptr=rows.last_row,
        chain_ptr=rows.chain_positions,
        clock_ptr=clock,
        to_blocks_ptr=rows.block_table,
        features_ptr=features,
        to_features_ptr=rows.features,
        features_size=size,
        COPIED=_COPIED,
        K=num_steps,
    )
    return rows


def verify_rows(
    table: "RoundTable",
    slots: torch.Tensor,
    drafts: torch.Tensor | None,
    num_steps: int,
    clock: torch.Tensor | None,
    paging: "Paging | None",
    starts_round: bool = False,
) -> "VerifyRows":
    from slipstream.kernels.round_ops import VerifyRows

    batch = slots.shape[0]
    block_table = None if paging is None else paging.block_table
    rows = VerifyRows(
        token_ids=slots.new_empty(batch, num_steps + 1),
        positions=slots.new_empty(batch, num_steps + 1),
        start=slots.new_empty(batch),
        num_valid=slots.new_empty(batch),
        write_index=None if paging is None else slots.new_empty(batch * (num_steps + 1)),
        block_table=_rows_of(block_table, batch),
    )
    _launch_each(
        _verify_rows_kernel,
        table,
        slots,
        num_steps + 1,
        1,
        block_table,
        drafts_ptr=drafts,
        drafts_stride_b=0 if drafts is None else drafts.stride(0),
        drafts_stride_k=0 if drafts is None else drafts.stride(1),
        ids_ptr=rows.token_ids,
        positions_ptr=rows.positions,
        start_ptr=rows.start,
        valid_ptr=rows.num_valid,
        clock_ptr=clock,
        to_blocks_ptr=rows.block_table,
        write_index_ptr=rows.write_index,
        BLOCK_SIZE=1 if paging is None else paging.block_size,
        STARTS=starts_round,
        K=num_steps,
    )
    return rows


def _rows_of(whole: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """[S, ..] -> room for [B, ..]."""
    if whole is None:
        return None
    if not whole.is_contiguous():
        raise ValueError(f"a tensor {tuple(whole.shape)} of strides {whole.stride()}; expected a contiguous one")
    return whole.new_empty(batch, *whole.shape[1:])


def _launch_each(
    kernel: Any,
    table: "RoundTable",
    slots: torch.Tensor,
    width: int,
    programs: int,
    block_table: torch.Tensor | None,
    **arguments: Any,
) -> None:
    """A kernel with one program or more for each of the B requests, which hands out their rows of `block_table`."""
    num_blocks = 0 if block_table is None else block_table.shape[1]
    launch.launch(
        kernel,
        (slots.shape[0], programs),
        num_warps=4 if num_blocks > 128 or programs > 1 else 1,
        tokens_ptr=table.tokens,
        tokens_stride=table.tokens.stride(0),
        lengths_ptr=table.lengths,
        limits_ptr=table.limits,
        slots_ptr=slots,
        blocks_ptr=block_table,
        num_blocks=num_blocks,
        BLOCKS=min(1024, triton.next_power_of_2(max(1, num_blocks))),
        BK=triton.next_power_of_2(width),
        TIMER=not launch.INTERPRET,
        **arguments,
    )


def commit(
    table: "RoundTable",
    slots: torch.Tensor,
    token_ids: torch.Tensor | None,
    start: torch.Tensor | None,
    num_valid: torch.Tensor | None,
    tokens: torch.Tensor,
    gate: torch.Tensor | None,
    ring: RoundRing | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted, count), [B] int64 each. Arguments as in `round_ops._commit`."""
    batch, width = tokens.shape
    accepted, count = slots.new_empty(batch), slots.new_empty(batch)
    if ring is not None and (ring.records.shape[1] < batch or ring.records.shape[2] < HEADER + width):
        raise ValueError(f"a ring of {tuple(ring.records.shape)} cannot hold {batch} requests of {width} tokens")
    _launch_one(
        _commit_kernel,
        table,
        slots,
        width,
        num_fresh_ptr=table.num_fresh,
        rows_ids_ptr=token_ids,
        rows_start_ptr=start,
        rows_valid_ptr=num_valid,
        chosen_ptr=tokens.contiguous(),
        gate_ptr=gate,
        accepted_ptr=accepted,
        count_ptr=count,
        records_ptr=ring and ring.records,
        stamps_ptr=ring and ring.stamps,
        seq_ptr=ring and ring.seq,
        counter_ptr=ring and ring.counter,
        clock_ptr=ring and ring.clock,
        depth=ring.depth if ring else 0,
        entry_stride=ring.records.stride(0) if ring else 0,
        request_stride=ring.records.stride(1) if ring else 0,
        WIDTH=width,
        HEADER=HEADER,
    )
    return accepted, count


def _launch_one(kernel: Any, table: "RoundTable", slots: torch.Tensor, width: int, **arguments: Any) -> None:
    """A kernel in which one program does all B x width values."""
    batch = slots.shape[0]
    block_b, block_k = triton.next_power_of_2(batch), triton.next_power_of_2(width)
    launch.launch(
        kernel,
        (1,),
        num_warps=1 if block_b * block_k <= 128 else 4,
        tokens_ptr=table.tokens,
        tokens_stride=table.tokens.stride(0),
        lengths_ptr=table.lengths,
        limits_ptr=table.limits,
        slots_ptr=slots,
        batch=batch,
        BB=block_b,
        BK=block_k,
        TIMER=not launch.INTERPRET,
        **arguments,
    )


@triton.jit
def _now(TIMER: tl.constexpr):
    """Nanoseconds of the device's clock; 0 in the interpreter, which has none."""
    now = tl.full((), 0, tl.int64)
    if TIMER:
        now = tl.extra.cuda.globaltimer()
    return now


@triton.jit
def _requests(slots_ptr, lengths_ptr, limits_ptr, batch, K, BB: tl.constexpr):
    """Of each request [BB]: whether it is real, slot, committed tokens, limit, usable drafts."""
    b = tl.arange(0, BB)
    real = b < batch
    slot = tl.load(slots_ptr + b, real, other=0)
    start = tl.load(lengths_ptr + slot, real, other=0)
    limit = tl.load(limits_ptr + slot, real, other=0)
    return real, slot, start, limit, tl.minimum(tl.maximum(limit - start - 1, 0), K)


@triton.jit
def _request(slots_ptr, lengths_ptr, limits_ptr, K):
    """Of the program's request: its number in the batch, slot, committed tokens, limit, usable drafts."""
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + b)
    start = tl.load(lengths_ptr + slot)
    limit = tl.load(limits_ptr + slot)
    return b, slot, start, limit, tl.minimum(tl.maximum(limit - start - 1, 0), K)


@triton.jit
def _copy_row(from_ptr, to_ptr, size, BLOCK: tl.constexpr):
    for first in tl.range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(to_ptr + at, tl.load(from_ptr + at, at < size), at < size)


@triton.jit(do_not_specialize=["batch"])
def _draft_rows_kernel(
    tokens_ptr,
    tokens_stride,
    lengths_ptr,
    limits_ptr,
    num_fresh_ptr,
    slots_ptr,
    batch,
    ids_ptr,
    positions_ptr,
    start_ptr,
    valid_ptr,
    last_ptr,
    chain_ptr,
    clock_ptr,
    blocks_ptr,
    num_blocks,
    to_blocks_ptr,
    features_ptr,
    to_features_ptr,
    features_size,
    K: tl.constexpr,
    BK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COPIED: tl.constexpr,
    TIMER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (b, 0): what the draft runs of request b; (b, i): a piece of its features."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, slot, start, _limit, num_valid = _request(slots_ptr, lengths_ptr, limits_ptr, K)
    piece = tl.program_id(1)
    if piece > 0:
        if features_ptr is not None:
            at = (piece - 1) * COPIED + tl.arange(0, COPIED)
            copied = tl.load(features_ptr + slot * features_size + at, at < features_size)
            tl.store(to_features_ptr + b * features_size + at, copied, at < features_size)
    else:
        if clock_ptr is not None:
            tl.store(clock_ptr, _now(TIMER), b == 0)
        fresh = tl.load(num_fresh_ptr + slot)
        tl.store(start_ptr + b, start)
        tl.store(valid_ptr + b, num_valid)
        tl.store(last_ptr + b, tl.maximum(fresh - 1, 0))
        k = tl.arange(0, BK)
        is_fresh = (k <= K) & (k < fresh)
        positions = start - 1 - fresh + k
        ids = tl.load(tokens_ptr + slot * tokens_stride + positions + 1, is_fresh, other=0)
        tl.store(ids_ptr + b * (K + 1) + k, ids, k <= K)
        tl.store(positions_ptr + b * (K + 1) + k, tl.where(is_fresh, positions, -1), k <= K)
        usable = ((k == 0) | (k < num_valid)) & (fresh > 0)
        tl.store(chain_ptr + k * batch + b, tl.where(usable, start - 2 + k, -1), k < K)
        if blocks_ptr is not None:
            _copy_row(blocks_ptr + slot * num_blocks, to_blocks_ptr + b * num_blocks, num_blocks, BLOCKS)


@triton.jit
def _verify_rows_kernel(
    tokens_ptr,
    tokens_stride,
    lengths_ptr,
    limits_ptr,
    slots_ptr,
    drafts_ptr,
    drafts_stride_b,
    drafts_stride_k,
    ids_ptr,
    positions_ptr,
    start_ptr,
    valid_ptr,
    clock_ptr,
    blocks_ptr,
    num_blocks,
    to_blocks_ptr,
    write_index_ptr,
    BLOCK_SIZE: tl.constexpr,
    STARTS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BLOCKS: tl.constexpr,
    TIMER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program b: what the target runs of request b."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, slot, start, limit, num_valid = _request(slots_ptr, lengths_ptr, limits_ptr, K)
    if clock_ptr is not None:
        now = _now(TIMER)
        tl.store(clock_ptr + 1, now, b == 0)
        if STARTS:
            tl.store(clock_ptr, now, b == 0)
    tl.store(start_ptr + b, start)
    tl.store(valid_ptr + b, num_valid)
    k = tl.arange(0, BK)
    cell, inside = b * (K + 1) + k, k <= K
    ids = tl.load(tokens_ptr + slot * tokens_stride + tl.maximum(start - 1, 0)) + k * 0  # the root
    if drafts_ptr is not None:
        at = b * drafts_stride_b + (k - 1) * drafts_stride_k
        ids = tl.where(k == 0, ids, tl.load(drafts_ptr + at, inside & (k > 0), other=0))
    tl.store(ids_ptr + cell, ids, inside)
    runs = (k <= num_valid) & (start >= 1) & (start < limit)
    position = start - 1 + k
    tl.store(positions_ptr + cell, tl.where(runs, position, -1), inside)
    if blocks_ptr is not None:
        blocks_ptr += slot * num_blocks
        block = tl.load(blocks_ptr + position // BLOCK_SIZE, runs & inside, other=0)
        index = tl.where(runs, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
        tl.store(write_index_ptr + cell, index, inside)
        _copy_row(blocks_ptr, to_blocks_ptr + b * num_blocks, num_blocks, BLOCKS)


@triton.jit(do_not_specialize=["batch", "depth"])
def _commit_kernel(
    tokens_ptr,
    tokens_stride,
    lengths_ptr,
    limits_ptr,
    num_fresh_ptr,
    slots_ptr,
    batch,
    rows_ids_ptr,
    rows_start_ptr,
    rows_valid_ptr,
    chosen_ptr,
    gate_ptr,
    accepted_ptr,
    count_ptr,
    records_ptr,
    stamps_ptr,
    seq_ptr,
    counter_ptr,
    clock_ptr,
    depth,
    entry_stride,
    request_stride,
    WIDTH: tl.constexpr,
    HEADER: tl.constexpr,
    BB: tl.constexpr,
    BK: tl.constexpr,
    TIMER: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    real, slot, start, limit, num_valid = _requests(slots_ptr, lengths_ptr, limits_ptr, batch, 0, BB)
    b, k = tl.arange(0, BB), tl.arange(0, BK)[None, :]
    inside = real[:, None] & (k < WIDTH)
    cell = b[:, None] * WIDTH + k  # [BB, BK]
    token = tl.load(chosen_ptr + cell, inside, other=0)
    accepted = tl.full((BB,), 0, tl.int64)
    if rows_ids_ptr is not None:
        start = tl.load(rows_start_ptr + b, real, other=0)
        num_valid = tl.load(rows_valid_ptr + b, real, other=0)
        draft = tl.load(rows_ids_ptr + cell + 1, inside & (k + 1 < WIDTH), other=-1)
        stands = (draft == token) & (k < num_valid[:, None])
        accepted = tl.min(tl.where(stands, BK, k), axis=1).to(tl.int64)  # column of the first that does not
    count = tl.maximum(tl.minimum(accepted + 1, limit - start), 0)
    if gate_ptr is not None:
        count = count * tl.load(gate_ptr + b, real, other=0)
    tl.store(accepted_ptr + b, accepted, real)
    tl.store(count_ptr + b, count, real)
    appended = inside & (k < count[:, None])
    tl.store(tokens_ptr + slot[:, None] * tokens_stride + start[:, None] + k, token, appended)
    # Padding rows all name the dummy slot and all store the same there: its length, 0.
    tl.store(lengths_ptr + slot, start + count, real)
    tl.store(num_fresh_ptr + slot, count, real)
    if seq_ptr is not None:
        index = tl.load(counter_ptr)
        place = index % depth
        entry = records_ptr + place * entry_stride + b * request_stride  # [BB]
        tl.store(entry, start, real)
        tl.store(entry + 1, num_valid, real)
        tl.store(entry + 2, accepted, real)
        tl.store(entry + 3, count, real)
        tl.store(entry[:, None] + HEADER + k, token, inside)
        began = tl.full((), 0, tl.int64)
        drafted = tl.full((), 0, tl.int64)
        if gate_ptr is None:
            began = tl.load(clock_ptr)
            drafted = tl.load(clock_ptr + 1)
        tl.store(stamps_ptr + place * 3, began)
        tl.store(stamps_ptr + place * 3 + 1, drafted)
        tl.store(stamps_ptr + place * 3 + 2, _now(TIMER))
        # Every thread makes its own stores visible to the host, then all meet, then one says so.
        if TIMER:
            tl.inline_asm_elementwise("fence.acq_rel.sys; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
        tl.store(seq_ptr + place, index + 1)
        tl.store(counter_ptr, index + 1)

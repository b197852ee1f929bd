"""Triton kernels of `kernels.round_ops`. The work is a few hundred integers, so each is one program where it can be."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu.launch import INTERPRET, pdl_enabled
from slipstream.kernels.round_ring import HEADER, RoundRing

if TYPE_CHECKING:
    from slipstream.kernels.round_ops import DraftRows, RoundTable, VerifyRows

_COPY_BLOCK = 1024  # values a program copies


def draft_rows(table: "RoundTable", slots: torch.Tensor, num_steps: int, clock: torch.Tensor | None) -> "DraftRows":
    from slipstream.kernels.round_ops import DraftRows

    batch = slots.shape[0]
    rows = DraftRows(
        token_ids=slots.new_empty(batch, num_steps + 1),
        positions=slots.new_empty(batch, num_steps + 1),
        start=slots.new_empty(batch),
        num_valid=slots.new_empty(batch),
        last_row=slots.new_empty(batch),
        chain_positions=slots.new_empty(num_steps, batch),
    )
    _draft_rows_kernel[(1,)](
        *_table_of(table),
        table.num_fresh,
        slots,
        rows.token_ids,
        rows.positions,
        rows.start,
        rows.num_valid,
        rows.last_row,
        rows.chain_positions,
        slots if clock is None else clock,
        batch,
        K=num_steps,
        STAMP=clock is not None,
        **_one_program(batch, num_steps + 1),
    )
    return rows


def verify_rows(
    table: "RoundTable", slots: torch.Tensor, drafts: torch.Tensor | None, num_steps: int, clock: torch.Tensor | None
) -> "VerifyRows":
    from slipstream.kernels.round_ops import VerifyRows

    batch = slots.shape[0]
    rows = VerifyRows(
        token_ids=slots.new_empty(batch, num_steps + 1),
        positions=slots.new_empty(batch, num_steps + 1),
        start=slots.new_empty(batch),
        num_valid=slots.new_empty(batch),
    )
    _verify_rows_kernel[(1,)](
        *_table_of(table),
        slots,
        slots if drafts is None else drafts,
        0 if drafts is None else drafts.stride(0),
        0 if drafts is None else drafts.stride(1),
        rows.token_ids,
        rows.positions,
        rows.start,
        rows.num_valid,
        slots if clock is None else clock,
        batch,
        K=num_steps,
        STAMP=clock is not None,
        **_one_program(batch, num_steps + 1),
    )
    return rows


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
    _commit_kernel[(1,)](
        *_table_of(table),
        table.num_fresh,
        slots,
        slots if token_ids is None else token_ids,
        slots if start is None else start,
        slots if num_valid is None else num_valid,
        tokens.contiguous(),
        slots if gate is None else gate,
        accepted,
        count,
        *((slots,) * 5 if ring is None else (ring.records, ring.stamps, ring.seq, ring.counter, ring.clock)),
        1 if ring is None else ring.depth,
        0 if ring is None else ring.records.stride(0),
        0 if ring is None else ring.records.stride(1),
        batch,
        WIDTH=width,
        DRAFTS=token_ids is not None,
        GATE=gate is not None,
        RING=ring is not None,
        HEADER=HEADER,
        **_one_program(batch, width),
    )
    return accepted, count


def select_last(states: torch.Tensor, last_row: torch.Tensor) -> torch.Tensor:
    states = states.contiguous()
    batch, rows, hidden = states.shape
    out = states.new_empty(batch, hidden)
    grid = (batch, triton.cdiv(hidden, _COPY_BLOCK))
    pdl = pdl_enabled()
    _select_last_kernel[grid](
        states, last_row, out, rows, hidden, BLOCK=_COPY_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out


def store_features(
    states: Sequence[torch.Tensor], features: torch.Tensor, slots: torch.Tensor, last_row: torch.Tensor | None
) -> None:
    (rows, hidden), batch = states[0].shape, slots.shape[0]
    per_request = rows // batch
    grid = (batch if last_row is not None else rows, triton.cdiv(hidden, _COPY_BLOCK))
    pdl = pdl_enabled()
    _store_features_kernel[grid](
        tuple(state.contiguous() for state in states),
        features,
        features.stride(0),
        features.stride(1),
        slots,
        slots if last_row is None else last_row,
        per_request,
        hidden,
        NUM_STATES=len(states),
        LAST=last_row is not None,
        BLOCK=_COPY_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def _table_of(table: "RoundTable") -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    """tokens and its row stride, lengths, limits: how each kernel's arguments begin."""
    return table.tokens, table.tokens.stride(0), table.lengths, table.limits


def _one_program(batch: int, width: int) -> dict[str, Any]:
    """Block sizes and launch options of a kernel in which one program does all B x width values."""
    block_b, block_k, pdl = triton.next_power_of_2(batch), triton.next_power_of_2(width), pdl_enabled()
    warps = 1 if block_b * block_k <= 128 else 4
    return {"BB": block_b, "BK": block_k, "TIMER": not INTERPRET, "PDL": pdl, "num_warps": warps, "launch_pdl": pdl}


@triton.jit
def _now(TIMER: tl.constexpr):
    """Nanoseconds of the device's clock; 0 in the interpreter, which has none."""
    now = tl.full((), 0, tl.int64)
    if TIMER:
        now = tl.extra.cuda.globaltimer()
    return now


@triton.jit
def _draft_rows_kernel(
    tokens, tokens_stride, lengths, limits, num_fresh, slots,
    out_ids, out_positions, out_start, out_valid, out_last, out_chain, clock, batch,
    K: tl.constexpr, STAMP: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr, TIMER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if STAMP:
        tl.store(clock, _now(TIMER))
    b, k = tl.arange(0, BB), tl.arange(0, BK)[None, :]
    real = b < batch
    slot = tl.load(slots + b, real, other=0)
    start = tl.load(lengths + slot, real, other=0)
    fresh = tl.load(num_fresh + slot, real, other=0)
    limit = tl.load(limits + slot, real, other=0)
    num_valid = tl.minimum(tl.maximum(limit - start - 1, 0), K)
    tl.store(out_start + b, start, real)
    tl.store(out_valid + b, num_valid, real)
    tl.store(out_last + b, tl.maximum(fresh - 1, 0), real)
    cell = b[:, None] * (K + 1) + k  # [BB, BK]
    inside = real[:, None] & (k <= K)
    is_fresh = inside & (k < fresh[:, None])
    positions = (start - 1 - fresh)[:, None] + k
    ids = tl.load(tokens + slot[:, None] * tokens_stride + positions + 1, is_fresh, other=0)
    tl.store(out_ids + cell, ids, inside)
    tl.store(out_positions + cell, tl.where(is_fresh, positions, -1), inside)
    usable = ((k == 0) | (k < num_valid[:, None])) & (fresh[:, None] > 0)
    chain = tl.where(usable, start[:, None] - 2 + k, -1)
    tl.store(out_chain + k * batch + b[:, None], chain, real[:, None] & (k < K))


@triton.jit
def _verify_rows_kernel(
    tokens, tokens_stride, lengths, limits, slots, drafts, drafts_stride_b, drafts_stride_k,
    out_ids, out_positions, out_start, out_valid, clock, batch,
    K: tl.constexpr, STAMP: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr, TIMER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if STAMP:
        now = _now(TIMER)
        tl.store(clock + 1, now)
        if K == 0:
            tl.store(clock, now)
    b, k = tl.arange(0, BB), tl.arange(0, BK)[None, :]
    real = b < batch
    slot = tl.load(slots + b, real, other=0)
    start = tl.load(lengths + slot, real, other=0)
    limit = tl.load(limits + slot, real, other=0)
    num_valid = tl.minimum(tl.maximum(limit - start - 1, 0), K)
    tl.store(out_start + b, start, real)
    tl.store(out_valid + b, num_valid, real)
    cell = b[:, None] * (K + 1) + k  # [BB, BK]
    inside = real[:, None] & (k <= K)
    root = tl.load(tokens + slot * tokens_stride + tl.maximum(start - 1, 0), real, other=0)
    ids = root[:, None] + k * 0
    if K > 0:
        draft = tl.load(drafts + b[:, None] * drafts_stride_b + (k - 1) * drafts_stride_k, inside & (k > 0), other=0)
        ids = tl.where(k == 0, ids, draft)
    tl.store(out_ids + cell, ids, inside)
    has_room = (start >= 1) & (start < limit)
    runs = (k <= num_valid[:, None]) & has_room[:, None]
    tl.store(out_positions + cell, tl.where(runs, start[:, None] - 1 + k, -1), inside)


@triton.jit
def _commit_kernel(
    table_tokens, table_stride, lengths, limits, num_fresh, slots, rows_ids, rows_start, rows_valid, tokens, gate,
    out_accepted, out_count, records, stamps, seq, counter, clock, depth, record_stride, request_stride, batch,
    WIDTH: tl.constexpr, DRAFTS: tl.constexpr, GATE: tl.constexpr, RING: tl.constexpr, HEADER: tl.constexpr,
    BB: tl.constexpr, BK: tl.constexpr, TIMER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, k = tl.arange(0, BB), tl.arange(0, BK)[None, :]
    real = b < batch
    inside = real[:, None] & (k < WIDTH)
    slot = tl.load(slots + b, real, other=0)
    cell = b[:, None] * WIDTH + k  # [BB, BK]
    token = tl.load(tokens + cell, inside, other=0)
    limit = tl.load(limits + slot, real, other=0)
    if DRAFTS:
        start = tl.load(rows_start + b, real, other=0)
        num_valid = tl.load(rows_valid + b, real, other=0)
        draft = tl.load(rows_ids + cell + 1, inside & (k + 1 < WIDTH), other=-1)
        stands = (draft == token) & (k < num_valid[:, None])
        accepted = tl.min(tl.where(stands, BK, k), axis=1).to(tl.int64)  # column of the first that does not
    else:
        start = tl.load(lengths + slot, real, other=0)
        num_valid = start * 0
        accepted = num_valid
    count = tl.maximum(tl.minimum(accepted + 1, limit - start), 0)
    if GATE:
        count = count * tl.load(gate + b, real, other=0)
    tl.store(out_accepted + b, accepted, real)
    tl.store(out_count + b, count, real)
    appended = inside & (k < count[:, None])
    tl.store(table_tokens + slot[:, None] * table_stride + start[:, None] + k, token, appended)
    tl.store(lengths + slot, start + count, real)
    tl.store(num_fresh + slot, count, real)
    if RING:
        index = tl.load(counter)
        place = index % depth
        entry = records + place * record_stride + b * request_stride  # [BB]
        tl.store(entry, start, real)
        tl.store(entry + 1, num_valid, real)
        tl.store(entry + 2, accepted, real)
        tl.store(entry + 3, count, real)
        tl.store(entry[:, None] + HEADER + k, token, inside)
        if GATE:
            tl.store(stamps + place * 3, tl.full((), 0, tl.int64))
            tl.store(stamps + place * 3 + 1, tl.full((), 0, tl.int64))
        else:
            tl.store(stamps + place * 3, tl.load(clock))
            tl.store(stamps + place * 3 + 1, tl.load(clock + 1))
        tl.store(stamps + place * 3 + 2, _now(TIMER))
        # Every thread makes its own stores visible to the host, then all meet, then one says so.
        if TIMER:
            tl.inline_asm_elementwise("fence.acq_rel.sys; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
        tl.store(seq + place, index + 1)
        tl.store(counter, index + 1)


@triton.jit
def _select_last_kernel(states, last_row, out, rows, hidden, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = b * rows + tl.load(last_row + b)
    value = tl.load(states + row * hidden + column, column < hidden)
    tl.store(out + b * hidden + column, value, column < hidden)


@triton.jit
def _store_features_kernel(
    states, features, slot_stride, row_stride, slots, last_row, per_request, hidden,
    NUM_STATES: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    if LAST:
        b, to_row = program, 0
        row = program * per_request + tl.load(last_row + program)
    else:
        b, to_row = program // per_request, program % per_request
        row = program.to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = features + tl.load(slots + b) * slot_stride + to_row * row_stride + column
    for i in tl.static_range(NUM_STATES):
        value = tl.load(states[i] + row * hidden + column, column < hidden)
        tl.store(to + i * hidden, value, column < hidden)

"""Triton kernels of `kernels.round_ops`: the rows of a round, one program a request or more. Commits: `commit.py`."""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch

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
    block_size: int | None = None,
) -> "DraftRows":
    from slipstream.kernels.round_ops import DraftRows

    batch = slots.shape[0]
    first = batch * (num_steps + 1)
    every = slots.new_empty(first + num_steps * batch)
    has_cells = block_table is not None and block_size is not None
    rows = DraftRows(
        token_ids=slots.new_empty(batch, num_steps + 1),
        positions=every[:first].view(batch, num_steps + 1),
        start=slots.new_empty(batch),
        num_valid=slots.new_empty(batch),
        last_row=slots.new_empty(batch),
        chain_positions=every[first:].view(num_steps, batch),
        all_positions=every,
        block_table=_rows_of(block_table, batch),
        features=_rows_of(features, batch),
        write_index=torch.empty_like(every) if has_cells else None,
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
        write_index_ptr=rows.write_index,
        BLOCK_SIZE=block_size or 1,
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


@triton.jit
def now(TIMER: tl.constexpr):
    """Nanoseconds of the device's clock; 0 in the interpreter, which has none."""
    time = tl.full((), 0, tl.int64)
    if TIMER:
        time = tl.extra.cuda.globaltimer()
    return time


@triton.jit
def _request(slots_ptr, lengths_ptr, limits_ptr, K):
    """Of the program's request: its number in the batch, slot, committed tokens, limit, usable drafts."""
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + b)
    start = tl.load(lengths_ptr + slot)
    limit = tl.load(limits_ptr + slot)
    return b, slot, start, limit, tl.minimum(tl.maximum(limit - start - 1, 0), K)


@triton.jit
def _cell(blocks_ptr, position, real, BLOCK_SIZE: tl.constexpr):
    """Where `position` lies in the flattened cache; in block 0 where it is not `real`."""
    block = tl.load(blocks_ptr + position // BLOCK_SIZE, real, other=0)
    return tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)


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
    write_index_ptr,
    BLOCK_SIZE: tl.constexpr,
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
            tl.store(clock_ptr, now(TIMER), b == 0)
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
        if write_index_ptr is not None:
            own = blocks_ptr + slot * num_blocks
            cell = _cell(own, positions, is_fresh, BLOCK_SIZE)
            tl.store(write_index_ptr + b * (K + 1) + k, cell, k <= K)
            cell = _cell(own, start - 2 + k, usable & (k < K), BLOCK_SIZE)
            tl.store(write_index_ptr + batch * (K + 1) + k * batch + b, cell, k < K)
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
        ended = now(TIMER)
        tl.store(clock_ptr + 1, ended, b == 0)
        if STARTS:
            tl.store(clock_ptr, ended, b == 0)
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
        tl.store(write_index_ptr + cell, _cell(blocks_ptr, position, runs & inside, BLOCK_SIZE), inside)
        _copy_row(blocks_ptr, to_blocks_ptr + b * num_blocks, num_blocks, BLOCKS)

"""The small ops between the model calls of a round: which rows run, what is committed, what the host gets to know.

They work on a request table: tensors with one row a request slot, of which a round names B by their slots. The last row
is a dummy (length 0, limit 0) that padding rows of a batch name, so a slot can stand in `slots` several times there.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.kernels.accept import accept
from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.round_ring import RoundRing


class RoundTable(Protocol):
    """The part of a request table (`engine.request_table.RequestTable`) that rounds read and write.

    tokens: [S, T] int64, committed tokens, then leftovers; T is at least limit + K + 1. lengths: [S] int64, committed
    tokens (n). limits: [S] int64, most committed tokens. num_fresh: [S] int64, newly committed slots that the draft has
    not taken in. All contiguous.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    limits: torch.Tensor
    num_fresh: torch.Tensor


@dataclass(frozen=True)
class Paging:
    """Where the requests' keys lie. block_table: [S, blocks] int64, contiguous. block_size: tokens a block."""

    block_table: torch.Tensor
    block_size: int


@dataclass(frozen=True)
class DraftRows:
    """What the draft runs, of B requests with n committed tokens each.

    Args:
        token_ids: [B, K + 1] int64, the token that each newly committed slot embeds (slot t embeds x_{t+1}); 0: none.
        positions: [B, K + 1] int64, those slots, n - 1 - fresh .. n - 2; -1: padding, behind them.
        start: [B] int64, n.
        num_valid: [B] int64, drafts that the round can use: the bonus token needs room, too.
        last_row: [B] int64, column of the last newly committed slot; 0 where there is none.
        chain_positions: [K, B] int64, where each draft step's row stands: at the last slot, then one further a step; -1
            where the round cannot use the step (its position may lie beyond the context's end).
        all_positions: [B * (K + 1) + K * B] int64, `positions` and `chain_positions` one behind the other: the tensor
            that both are parts of.
        block_table: [B, blocks] int64 and features: [B, K + 1, F], the requests' rows of both; None where not given.
        write_index: as `all_positions`, cell of each row in the flattened cache; of padding rows, in block 0. None
            where no block size was given.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    start: torch.Tensor
    num_valid: torch.Tensor
    last_row: torch.Tensor
    chain_positions: torch.Tensor
    all_positions: torch.Tensor
    block_table: torch.Tensor | None = None
    features: torch.Tensor | None = None
    write_index: torch.Tensor | None = None


@dataclass(frozen=True)
class VerifyRows:
    """What the target runs, of B requests with n committed tokens each.

    Args:
        token_ids: [B, K + 1] int64, the root x_{n-1} and the drafts.
        positions: [B, K + 1] int64, n - 1 .. n - 1 + K; -1 behind the last usable draft, and in every row of a request
            that has no committed token or no room for one more.
        start: [B] int64, n.
        num_valid: [B] int64, drafts that the round can use.
        write_index: [B * (K + 1)] int64, cell of each row in the flattened cache; of padding rows, in block 0. None
            where no paging was given.
        block_table: [B, blocks] int64, the requests' rows of it; None, too.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    start: torch.Tensor
    num_valid: torch.Tensor
    write_index: torch.Tensor | None = None
    block_table: torch.Tensor | None = None


@dataclass(frozen=True)
class Committed:
    """accepted: [B] int64, drafts that stood; count: [B] int64, tokens committed."""

    accepted: torch.Tensor
    count: torch.Tensor


def draft_rows(
    table: RoundTable,
    slots: torch.Tensor,
    num_steps: int,
    clock: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    features: torch.Tensor | None = None,
    block_size: int | None = None,
) -> DraftRows:
    """The rows of the draft's first step, and where its later steps stand.

    Args:
        table: the request table.
        slots: [B] int64.
        num_steps: K.
        clock: [2] int64 (`RoundRing.clock`); entry 0 becomes the time in nanoseconds: the round starts here.
        block_table: [S, blocks] int64 and features: [S, K + 1, F], contiguous; the requests' rows of both are handed
            out, where they are given.
        block_size: tokens a block; given with `block_table`, the cells of all rows are worked out.
    """
    if on_gpu(slots):
        from slipstream.kernels.gpu import round_ops

        return round_ops.draft_rows(table, slots, num_steps, clock, block_table, features, block_size)
    if clock is not None:
        clock[0] = time.perf_counter_ns()
    offsets = torch.arange(num_steps + 1, device=slots.device)  # [K + 1]
    start, fresh = table.lengths[slots], table.num_fresh[slots]  # [B] each
    num_valid = (table.limits[slots] - start - 1).clamp(0, num_steps)
    is_fresh = offsets < fresh[:, None]  # [B] -> [B, K + 1]
    first = (start - 1 - fresh)[:, None]
    positions = torch.where(is_fresh, first + offsets, -1)
    token_ids = torch.where(is_fresh, table.tokens[slots[:, None], positions + 1], 0)
    usable = ((offsets[:num_steps, None] == 0) | (offsets[:num_steps, None] < num_valid)) & (fresh > 0)  # [K, B]
    chain_positions = torch.where(usable, start - 2 + offsets[:num_steps, None], -1)  # [K, B]
    every = torch.cat((positions.flatten(), chain_positions.flatten()))  # [B, K + 1], [K, B] -> [B * (K + 1) + K * B]
    size = positions.numel()
    positions, chain_positions = every[:size].view_as(positions), every[size:].view_as(chain_positions)
    blocks, picked = (None if whole is None else whole[slots] for whole in (block_table, features))  # [B, ..]
    cells = None
    if blocks is not None and block_size is not None:
        of_chain = _cells(blocks, chain_positions.T, block_size).T  # [B, K] -> [K, B]
        cells = torch.cat((_cells(blocks, positions, block_size).flatten(), of_chain.flatten()))
    last_row = (fresh - 1).clamp(min=0)
    return DraftRows(token_ids, positions, start, num_valid, last_row, chain_positions, every, blocks, picked, cells)


def _cells(block_table: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Cells of `positions` [B, R] in the flattened cache, block_table [B, blocks]: [B, R]; 0 where a position is -1."""
    at = positions.clamp(min=0)
    return torch.where(positions >= 0, block_table.gather(1, at // size) * size + at % size, 0)


def verify_rows(
    table: RoundTable,
    slots: torch.Tensor,
    drafts: torch.Tensor | None,
    num_steps: int,
    clock: torch.Tensor | None = None,
    paging: Paging | None = None,
    starts_round: bool = False,
) -> VerifyRows:
    """The rows that the target verifies.

    Args:
        table: the request table.
        slots: [B] int64.
        drafts: [B, K] int64 target ids; None exactly at K = 0.
        num_steps: K.
        clock: [2] int64 (`RoundRing.clock`); entry 1 becomes the time in nanoseconds: drafting is over.
        paging: given, the cells of the rows are worked out, and the requests' rows of the table handed out.
        starts_round: no draft ran before: entry 0 of the clock becomes the time, too.
    """
    if (drafts is None) != (num_steps == 0):
        raise ValueError(
            f"K = {num_steps} and {'no drafts' if drafts is None else 'drafts'}: drafts come exactly at K > 0"
        )
    if on_gpu(slots):
        from slipstream.kernels.gpu import round_ops

        return round_ops.verify_rows(table, slots, drafts, num_steps, clock, paging, starts_round)
    if clock is not None:
        clock[0 if starts_round else 1 :] = time.perf_counter_ns()
    offsets = torch.arange(num_steps + 1, device=slots.device)  # [K + 1]
    start, limit = table.lengths[slots], table.limits[slots]  # [B] each
    num_valid = (limit - start - 1).clamp(0, num_steps)
    token_ids = table.tokens[slots, (start - 1).clamp(min=0)][:, None]  # [B, 1], the root
    if drafts is not None:
        token_ids = torch.cat((token_ids, drafts), dim=1)  # [B, K + 1]
    has_room = (start >= 1) & (start < limit)
    runs = (offsets <= num_valid[:, None]) & has_room[:, None]  # [B, K + 1]
    positions = torch.where(runs, start[:, None] - 1 + offsets, -1)  # [B, K + 1]
    if paging is None:
        return VerifyRows(token_ids, positions, start, num_valid)
    block_table = paging.block_table[slots]  # [B, blocks]
    cells = _cells(block_table, positions, paging.block_size)  # [B, R]
    return VerifyRows(token_ids, positions, start, num_valid, cells.flatten(), block_table)


def commit_round(
    table: RoundTable, slots: torch.Tensor, rows: VerifyRows, tokens: torch.Tensor, ring: RoundRing | None = None
) -> Committed:
    """Accepts, appends to the table, and tells the host.

    The leading drafts that equal the target's own tokens stand; they and the token behind them are appended, as far as
    the request has room. `table.lengths` grows by that count, `table.num_fresh` becomes it.

    Args:
        table: the request table, changed in place.
        slots: [B] int64.
        rows: what the target ran.
        tokens: [B, K + 1] int64, the target's token behind each row.
        ring: gets one entry; None: the host is not told.
    """
    return _commit(table, slots, rows.token_ids, rows.start, rows.num_valid, tokens, None, ring)


def commit_first(
    table: RoundTable, slots: torch.Tensor, tokens: torch.Tensor, is_last: torch.Tensor, ring: RoundRing | None = None
) -> Committed:
    """Commits the first new token of a prompt, where the chunk that just ran was its last.

    Args:
        table: the request table, changed in place; the whole prompt counts as committed.
        slots: [B] int64.
        tokens: [B, 1] int64, the target's token behind the last row.
        is_last: [B] int64, 1 or 0: whether the chunk ended the prompt. Where not, nothing is committed.
        ring: gets one entry either way; its first two stamps are 0.
    """
    return _commit(table, slots, None, None, None, tokens, is_last, ring)


def _commit(
    table: RoundTable,
    slots: torch.Tensor,
    token_ids: torch.Tensor | None,
    start: torch.Tensor | None,
    num_valid: torch.Tensor | None,
    tokens: torch.Tensor,
    gate: torch.Tensor | None,
    ring: RoundRing | None,
) -> Committed:
    """Both commits; without `token_ids` there are no drafts, and `start` is the table's."""
    if on_gpu(slots):
        from slipstream.kernels.gpu import commit

        accepted, count = commit.commit(table, slots, token_ids, start, num_valid, tokens, gate, ring)
        return Committed(accepted, count)
    if token_ids is None or start is None or num_valid is None:
        start = table.lengths[slots]  # [B]
        num_valid = accepted = torch.zeros_like(start)
    else:
        accepted = accept(token_ids[:, 1:], tokens, num_valid)  # [B]
    count = torch.minimum(accepted + 1, table.limits[slots] - start).clamp(min=0)
    if gate is not None:
        count = count * gate
    offsets = torch.arange(tokens.shape[1], device=tokens.device)  # [r]
    row, column = torch.where(offsets < count[:, None])
    table.tokens[slots[row], start[row] + column] = tokens[row, column]
    table.lengths[slots] = start + count
    table.num_fresh[slots] = count
    if ring is not None:
        columns = torch.cat((torch.stack((start, num_valid, accepted, count), dim=1), tokens), dim=1)  # [B, 4 + r]
        start_ns, draft_end_ns = ring.clock.tolist() if gate is None else (0, 0)
        ring.publish(columns, start_ns, draft_end_ns)
    return Committed(accepted, count)

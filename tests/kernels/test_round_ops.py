"""The small ops of a round against plain Python that reads like their definition, request by request."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.round_ops import (
    VerifyRows,
    commit_first,
    commit_round,
    draft_rows,
    verify_rows,
)
from slipstream.kernels.round_ring import RoundRing
from slipstream.kernels.row_copies import select_last, store_features

NUM_SLOTS, MAX_TOKENS, VOCAB = 4, 12, 3  # few tokens, so that drafts often match


@dataclass
class Table:
    """A request table of plain lists; the last row is the dummy."""

    tokens: list[list[int]]
    lengths: list[int]
    limits: list[int]
    num_fresh: list[int]
    slots: list[int] = field(default_factory=list)
    num_steps: int = 0

    def tensors(self) -> "TensorTable":
        return TensorTable(*(torch.tensor(x) for x in (self.tokens, self.lengths, self.limits, self.num_fresh)))


@dataclass
class TensorTable:
    tokens: torch.Tensor
    lengths: torch.Tensor
    limits: torch.Tensor
    num_fresh: torch.Tensor


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Requests at any point of their life, some at or past their limit, and batches with padding rows."""
    num_steps = draw(st.integers(0, 4))
    lengths, limits, fresh = [], [], []
    for _ in range(NUM_SLOTS):
        limit = draw(st.integers(2, MAX_TOKENS))
        length = draw(st.integers(1, limit))
        lengths.append(length)
        limits.append(limit)
        fresh.append(draw(st.integers(0, min(num_steps + 1, length - 1))))
    width = MAX_TOKENS + num_steps + 1
    tokens = [draw(st.lists(st.integers(0, VOCAB - 1), min_size=width, max_size=width)) for _ in range(NUM_SLOTS + 1)]
    slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=NUM_SLOTS, unique=True))
    slots += [NUM_SLOTS] * draw(st.integers(0, 2))
    return Table(tokens, [*lengths, 0], [*limits, 0], [*fresh, 0], slots, num_steps)


def num_valid_of(table: Table, slot: int) -> int:
    return max(0, min(table.num_steps, table.limits[slot] - table.lengths[slot] - 1))


@given(tables())
@settings(max_examples=200, deadline=None)
def test_draft_rows(table: Table) -> None:
    got = draft_rows(table.tensors(), torch.tensor(table.slots), table.num_steps)
    for b, slot in enumerate(table.slots):
        n, fresh, padding = table.lengths[slot], table.num_fresh[slot], table.num_steps + 1 - table.num_fresh[slot]
        positions = list(range(n - 1 - fresh, n - 1))
        assert got.positions[b].tolist() == positions + [-1] * padding
        assert got.token_ids[b].tolist() == [table.tokens[slot][t + 1] for t in positions] + [0] * padding
        assert (got.start[b], got.num_valid[b]) == (n, num_valid_of(table, slot))
        assert got.last_row[b] == max(fresh - 1, 0)
        chain = [
            n - 2 + step - 1 if fresh and (step == 1 or step <= num_valid_of(table, slot)) else -1
            for step in range(1, table.num_steps + 1)
        ]
        assert got.chain_positions[:, b].tolist() == chain


@given(tables(), st.data())
@settings(max_examples=200, deadline=None)
def test_verify_rows(table: Table, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, VOCAB - 1), min_size=table.num_steps, max_size=table.num_steps)
    drafts = [data.draw(row) for _ in table.slots]
    tensor = torch.tensor(drafts) if table.num_steps else None
    got = verify_rows(table.tensors(), torch.tensor(table.slots), tensor, table.num_steps)
    for b, slot in enumerate(table.slots):
        n, valid = table.lengths[slot], num_valid_of(table, slot)
        runs = valid + 1 if 1 <= n < table.limits[slot] else 0
        assert got.positions[b].tolist() == [n - 1 + k if k < runs else -1 for k in range(table.num_steps + 1)]
        assert got.token_ids[b].tolist()[1:] == drafts[b]
        if n:
            assert got.token_ids[b, 0] == table.tokens[slot][n - 1]
        assert (got.start[b], got.num_valid[b]) == (n, valid)


def commit_by_hand(table: Table, drafts: list[list[int]], tokens: list[list[int]]) -> list[list[int]]:
    """Changes `table`; what each request of the batch committed."""
    committed = []
    for slot, proposed, chosen in zip(table.slots, drafts, tokens, strict=True):
        accepted = 0
        while accepted < num_valid_of(table, slot) and proposed[accepted] == chosen[accepted]:
            accepted += 1
        room = table.limits[slot] - table.lengths[slot]
        new = chosen[: min(accepted + 1, room)]
        for token in new:
            table.tokens[slot][table.lengths[slot]] = token
            table.lengths[slot] += 1
        table.num_fresh[slot] = len(new)
        committed.append(new)
    return committed


@given(tables(), st.data())
@settings(max_examples=300, deadline=None)
def test_commit_round(table: Table, data: st.DataObject) -> None:
    steps, batch = table.num_steps, len(table.slots)
    token = st.integers(0, VOCAB - 1)
    drafts = [data.draw(st.lists(token, min_size=steps, max_size=steps)) for _ in range(batch)]
    tokens = [data.draw(st.lists(token, min_size=steps + 1, max_size=steps + 1)) for _ in range(batch)]
    tensors, slots = table.tensors(), torch.tensor(table.slots)
    starts, valid = [table.lengths[s] for s in table.slots], [num_valid_of(table, s) for s in table.slots]
    rows = verify_rows(tensors, slots, torch.tensor(drafts) if steps else None, steps)
    ring = RoundRing.allocate(2, batch + 1, 4, "cpu")
    assert ring.read(0, batch) is None
    got = commit_round(tensors, slots, rows, torch.tensor(tokens), ring)
    committed = commit_by_hand(table, drafts, tokens)
    assert tensors.tokens.tolist() == table.tokens
    assert tensors.lengths.tolist() == table.lengths
    assert tensors.num_fresh.tolist() == table.num_fresh
    assert got.count.tolist() == [len(new) for new in committed]
    record = ring.read(0, batch)
    assert record is not None
    assert [r.tokens for r in record.requests] == committed
    assert [(r.start, r.num_valid) for r in record.requests] == list(zip(starts, valid, strict=True))
    assert [r.accepted for r in record.requests] == got.accepted.tolist()
    assert all(r.accepted >= len(r.tokens) - 1 for r in record.requests)
    assert ring.read(1, batch) is None


def test_first_token_is_committed_by_the_last_chunk_alone() -> None:
    table = TensorTable(torch.zeros(3, 9, dtype=torch.int64), *torch.tensor([[4, 5, 0], [8, 8, 0], [0, 0, 0]]))
    slots, ring = torch.tensor([1]), RoundRing.allocate(4, 2, 3, "cpu")
    for is_last, token in ((0, 6), (1, 7)):
        commit_first(table, slots, torch.tensor([[token]]), torch.tensor([is_last]), ring)
    assert table.lengths.tolist() == [4, 6, 0]
    assert table.num_fresh.tolist() == [0, 1, 0]
    assert table.tokens[1].tolist() == [0] * 5 + [7] + [0] * 3
    records = [ring.read(i, 1) for i in range(2)]
    assert [r.requests[0].tokens for r in records if r] == [[], [7]]
    assert [r.requests[0].start for r in records if r] == [5, 5]


def test_ring_goes_round_and_says_when_an_entry_is_lost() -> None:
    table = TensorTable(torch.zeros(1, 40, dtype=torch.int64), *torch.tensor([[1], [30], [0]]))
    slots, ring = torch.tensor([0]), RoundRing.allocate(3, 1, 0, "cpu")
    for i in range(7):
        assert ring.read(i, 1) is None
        rows = verify_rows(table, slots, None, 0, ring.clock, starts_round=True)
        assert (int(rows.start), int(rows.num_valid)) == (1 + i, 0)
        commit_round(table, slots, rows, torch.tensor([[i + 10]]), ring)
        record = ring.read(i, 1)
        assert record is not None
        assert record.requests[0].tokens == [i + 10]
        start, draft_end, end = record.stamps_ns
        assert 0 < start <= draft_end <= end
    with pytest.raises(ValueError, match="entry 3 of a ring of 3 was overwritten by entry 6"):
        ring.read(3, 1)


def test_drafts_come_exactly_above_k_0() -> None:
    table = TensorTable(torch.zeros(1, 9, dtype=torch.int64), *torch.tensor([[1], [5], [0]]))
    for drafts, num_steps in ((None, 2), (torch.zeros(1, 2, dtype=torch.int64), 0)):
        with pytest.raises(ValueError, match="exactly at K > 0"):
            verify_rows(table, torch.tensor([0]), drafts, num_steps)


def test_a_tail_token_of_a_request_without_room_changes_nothing() -> None:
    """Overshoot of a finished request: it runs once more before the host knows, and must not write past its limit."""
    table = TensorTable(torch.arange(10)[None].clone(), *torch.tensor([[6], [6], [2]]))
    rows = VerifyRows(torch.tensor([[5, 1, 1]]), torch.full((1, 3), -1), torch.tensor([6]), torch.tensor([0]))
    got = commit_round(table, torch.tensor([0]), rows, torch.tensor([[1, 1, 1]]))
    assert got.count.tolist() == [0]
    assert table.tokens[0].tolist() == list(range(10))
    assert table.lengths.tolist() == [6]
    assert table.num_fresh.tolist() == [0]


def test_select_last() -> None:
    states = torch.arange(24.0).view(2, 3, 4)
    assert select_last(states, torch.tensor([2, 0])).tolist() == [states[0, 2].tolist(), states[1, 0].tolist()]


@pytest.mark.parametrize("last", [False, True])
def test_store_features(last: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(6, 4, generator=generator) for _ in range(3)]  # 2 requests of 3 rows
    features = torch.zeros(5, 3, 12)
    store_features(states, features, torch.tensor([3, 1]), torch.tensor([1, 2]) if last else None)
    for b, slot in enumerate((3, 1)):
        rows = [torch.cat([s[3 * b + r] for s in states]) for r in range(3)]
        want = [rows[(1, 2)[b]], torch.zeros(12), torch.zeros(12)] if last else rows
        assert torch.equal(features[slot], torch.stack(want))
    assert not features[[0, 2, 4]].any()
    with pytest.raises(ValueError, match="do not fit features"):
        store_features(states[:2], features, torch.tensor([3, 1]))

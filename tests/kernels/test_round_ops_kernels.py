"""The Triton kernels of the round ops against their torch twins, and the ring of records as a host sees it."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.kernels import round_ops, row_copies
from slipstream.kernels.gpu import commit
from slipstream.kernels.gpu import round_ops as gpu
from slipstream.kernels.gpu import row_copies as gpu_copies
from slipstream.kernels.paged_attention import plan_rows
from slipstream.kernels.round_ops import Paging
from slipstream.kernels.round_ring import RoundRing

LAUNCHES = Path(__file__).with_name("sampling_to_compile.py")


@dataclass
class Table:
    tokens: torch.Tensor
    lengths: torch.Tensor
    limits: torch.Tensor
    num_fresh: torch.Tensor

    def to(self, device: str) -> "Table":
        return Table(*(getattr(self, f.name).to(device, copy=True) for f in fields(self)))


def random_table(num_steps: int, seed: int) -> Table:
    """Six requests at any point of their life, some without room, and the dummy."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    limits = draw(2, 15, 6)
    lengths = torch.minimum(draw(1, 15, 6), limits)
    fresh = torch.minimum(draw(0, num_steps + 2, 6), lengths - 1)
    dummy = torch.zeros(1, dtype=torch.int64)
    columns = (torch.cat((column, dummy)) for column in (lengths, limits, fresh))
    return Table(draw(0, 2, 7, 15 + num_steps + 1), *columns)


def write_index(block_table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    return plan_rows(block_table, positions, block_size).write_index


def assert_same(got: Any, want: Any) -> None:
    for f in fields(want):
        if getattr(want, f.name) is None:
            assert getattr(got, f.name) is None, f.name
            continue
        assert torch.equal(getattr(got, f.name).cpu(), getattr(want, f.name)), f.name


@pytest.mark.parametrize("num_steps", [0, 1, 3, 8])
@pytest.mark.parametrize("slots", [[2], [5, 0, 3], [1, 4, 6, 6, 0]])
def test_a_round_is_the_twins(num_steps: int, slots: list[int], kernel_device: str) -> None:
    for seed in range(3):
        table = random_table(num_steps, seed)
        on_device, at = table.to(kernel_device), torch.tensor(slots)
        at_device, generator = at.to(kernel_device), torch.Generator().manual_seed(seed)
        blocks = torch.randperm(7 * 5, generator=generator).view(7, 5)  # [S, blocks] of 5 tokens
        features = torch.randn(7, num_steps + 1, 1030, generator=generator)
        ring = RoundRing.allocate(2, len(slots) + 1, 8, kernel_device)
        twin_ring = RoundRing.allocate(2, len(slots) + 1, 8, "cpu")
        for i in range(3):
            want = round_ops.draft_rows(table, at, num_steps, twin_ring.clock, blocks, features, 5)
            there = (whole.to(kernel_device) for whole in (blocks, features))
            assert_same(gpu.draft_rows(on_device, at_device, num_steps, ring.clock, *there, 5), want)
            cells = [write_index(want.block_table, p, 5) for p in (want.positions, want.chain_positions.T)]
            every = torch.cat((cells[0], cells[1].view(len(slots), num_steps).T.flatten()))  # [B * K] -> [K * B]
            assert torch.equal(want.write_index, every)
            bare = gpu.draft_rows(on_device, at_device, num_steps, None, None, None)
            assert (bare.block_table, bare.features, bare.write_index) == (None, None, None)
            drafts = torch.randint(0, 2, (len(slots), num_steps), generator=generator) if num_steps else None
            rows = round_ops.verify_rows(table, at, drafts, num_steps, twin_ring.clock, Paging(blocks, 5))
            drafts_there = None if drafts is None else drafts.t().contiguous().to(kernel_device).t()  # any strides
            paging = Paging(blocks.to(kernel_device), 5)
            ring.clock.fill_(-1)
            got = gpu.verify_rows(on_device, at_device, drafts_there, num_steps, ring.clock, paging, i == 1)
            assert [int(at) >= 0 for at in ring.clock] == [i == 1, True]
            assert_same(got, rows)
            assert torch.equal(got.write_index.cpu(), write_index(rows.block_table, rows.positions, 5))
            assert gpu.verify_rows(on_device, at_device, drafts_there, num_steps, None, None).write_index is None
            chosen = torch.randint(0, 2, (len(slots), num_steps + 1), generator=generator)
            committed = round_ops.commit_round(table, at, rows, chosen, twin_ring)
            accepted, count = commit.commit(
                on_device, at_device, got.token_ids, got.start, got.num_valid, chosen.to(kernel_device), None, ring
            )
            assert torch.equal(accepted.cpu(), committed.accepted)
            assert torch.equal(count.cpu(), committed.count)
            assert_same(on_device, table)
            record, twin_record = ring.read(i, len(slots)), twin_ring.read(i, len(slots))
            assert record is not None
            assert twin_record is not None
            assert record.requests == twin_record.requests
            assert ring.read(i + 1, len(slots)) is None


def test_the_first_token_is_the_twins(kernel_device: str) -> None:
    table = random_table(3, 1)
    on_device, slots = table.to(kernel_device), torch.tensor([1, 2])
    ring = RoundRing.allocate(4, 2, 3, kernel_device)
    ring.clock.fill_(123)  # of an earlier round
    for i, is_last in enumerate(([0, 1], [1, 0])):
        chosen, gate = torch.tensor([[7], [8]]), torch.tensor(is_last)
        want = round_ops.commit_first(table, slots, chosen, gate)
        device_arguments = (slots.to(kernel_device), None, None, None, chosen.to(kernel_device), gate.to(kernel_device))
        _, count = commit.commit(on_device, *device_arguments, ring)
        assert torch.equal(count.cpu(), want.count)
        assert_same(on_device, table)
        record = ring.read(i, 2)
        assert record is not None
        assert [len(r.tokens) for r in record.requests] == want.count.tolist()
        assert record.stamps_ns[:2] == (0, 0)


def test_a_ring_too_small_is_refused(kernel_device: str) -> None:
    table, slots = random_table(3, 1).to(kernel_device), torch.tensor([1, 2], device=kernel_device)
    gate, chosen = slots, slots[:, None]
    for ring in (RoundRing.allocate(2, 1, 3, kernel_device), RoundRing.allocate(2, 2, -1, kernel_device)):
        with pytest.raises(ValueError, match="cannot hold 2 requests of 1 tokens"):
            commit.commit(table, slots, None, None, None, chosen, gate, ring)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [48, 1100])
def test_copies_are_the_twins(hidden: int, dtype: torch.dtype, kernel_device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(6, hidden, generator=generator).to(dtype) for _ in range(5)]
    slots, last = torch.tensor([4, 1]), torch.tensor([2, 0])
    three = states[0].view(2, 3, hidden)
    got = gpu_copies.select_last(three.to(kernel_device), last.to(kernel_device))
    assert torch.equal(got.cpu(), row_copies.select_last(three, last))
    for n, row in ((1, None), (3, None), (5, None), (3, last)):
        features = torch.zeros(6, 4, n * hidden, dtype=dtype)
        there = features.to(kernel_device, copy=True)
        row_copies.store_features(states[:n], features, slots, row)
        on_device = [s.to(kernel_device) for s in states[:n]]
        gpu_copies.store_features(
            on_device, there, slots.to(kernel_device), None if row is None else row.to(kernel_device)
        )
        assert torch.equal(there.cpu(), features)


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles_for_cards_that_are_not_here(
    capability: int, cross_compile: Callable[..., list[dict[str, Any]]]
) -> None:
    made = cross_compile(LAUNCHES, "rounds", capability)
    assert len({m["kernel"] for m in made}) == 5
    for m in made:
        assert ("griddepcontrol.wait" in m["ptx"]) is (capability >= 90)
    published = [m["ptx"] for m in made if "fence.acq_rel.sys" in m["ptx"]]
    assert published
    for ptx in published:
        behind = ptx.split("fence.acq_rel.sys")[1]
        assert "bar" in behind.split("st.global")[0]  # threads meet between their fences and the sequence number
        assert behind.count("st.global") <= 2  # the sequence number, and the counter


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ten_thousand_replays_reach_the_host_whole() -> None:
    """The drafts are right up to a step that changes every round; the host sees every record, whole and in order."""
    batch, num_steps, replays, in_flight = 3, 3, 10_000, 3
    width = replays * (num_steps + 1) + 2
    lengths = torch.tensor([1, 1, 1, 0])
    limits = torch.tensor([width, width, 50, 0])  # the third request soon has no room
    table = Table(torch.zeros(4, width + num_steps + 1, dtype=torch.int64), lengths, limits, lengths * 0).to("cuda")
    slots = torch.tensor([0, 1, 2], device="cuda")
    steps = torch.arange(num_steps + 1, device="cuda")
    ring = RoundRing.allocate(in_flight + 1, batch, num_steps, "cuda")

    def one_round() -> None:
        round_ops.draft_rows(table, slots, num_steps, ring.clock)
        start = table.lengths[slots]
        chosen = start[:, None] * 10 + steps  # [B, K + 1]
        right = (start * 7 + slots) % (num_steps + 1)  # how many drafts are right
        drafts = torch.where(steps[:-1] < right[:, None], chosen[:, :-1], -5)
        rows = round_ops.verify_rows(table, slots, drafts, num_steps, ring.clock)
        round_ops.commit_round(table, slots, rows, chosen, ring)

    with torch.inference_mode():
        saved = copy.deepcopy(table)
        one_round()  # warm-up
        torch.cuda.synchronize()
        for f in fields(table):
            getattr(table, f.name).copy_(getattr(saved, f.name))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one_round()
        torch.cuda.synchronize()
        known, last_end = [1, 1, 1], 0
        for i in range(replays + in_flight):
            if i < replays:
                graph.replay()
            if i < in_flight:
                continue
            index, deadline = i - in_flight + 1, time.monotonic() + 5  # entry 0 was the warm-up's
            while (record := ring.read(index, batch)) is None:
                assert time.monotonic() < deadline, f"entry {index} never came"
            start, draft_end, end = record.stamps_ns
            assert last_end <= start <= draft_end <= end
            last_end = end
            for b, request in enumerate(record.requests):
                assert request.start == known[b]
                right = min((known[b] * 7 + b) % (num_steps + 1), request.num_valid)
                room = int(limits[b]) - known[b]
                assert request.accepted == right
                assert request.tokens == [known[b] * 10 + k for k in range(min(right + 1, room))]
                known[b] += len(request.tokens)
        assert table.lengths.tolist() == [*known, 0]
        assert known[2] == 50

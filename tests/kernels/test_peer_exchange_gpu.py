"""Exchange between ranks on a real card: two of them in two streams of one card, and in two processes of it.

Two cards: tests/engine/test_card_ranks_gpu.py.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.kernels.stream import Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
HELPERS = Path(__file__).with_name("exchanges.py")
JOBS = Path(__file__).parents[1] / "engine" / "parallel_jobs.py"
WIDTHS = (576, 4096, 7168)


@pytest.fixture(scope="module")
def exchanges(load_test_module) -> ModuleType:
    return load_test_module(HELPERS)


class Pair:
    """Two ranks, each with a stream of its own."""

    def __init__(self, exchanges: ModuleType) -> None:
        self.ranks = exchanges.peers(2, "cuda")
        self.streams = [torch.cuda.Stream() for _ in self.ranks]
        torch.cuda.synchronize()

    def warm_up(self, call: Any) -> None:
        """Compiles without waiting for anybody: to load a kernel may wait for the one that runs."""
        torch.cuda.synchronize()  # what it reads was made in another stream
        for rank, one in enumerate(self.ranks):
            with torch.cuda.stream(self.streams[rank]):
                one.be_patient(0.0)
                call(one, rank)
        torch.cuda.synchronize()
        for one in self.ranks:
            one._state[1] = 0
            one._lost.zero_()
            one.be_patient(5.0)
        torch.cuda.synchronize()

    def run(self, call: Any) -> list[Any]:
        """call(exchange, rank) of both at once: their results, when all is done."""
        results = []
        for rank, one in enumerate(self.ranks):
            with torch.cuda.stream(self.streams[rank]):
                results.append(call(one, rank))
        torch.cuda.synchronize()
        assert [one.lost() for one in self.ranks] == [None, None]
        return results

    def captured(self, call: Any) -> list[torch.cuda.CUDAGraph]:
        """call(exchange, rank) as a graph of each rank."""
        graphs = [torch.cuda.CUDAGraph() for _ in self.ranks]
        for rank, one in enumerate(self.ranks):
            with torch.cuda.graph(graphs[rank], stream=self.streams[rank]):
                call(one, rank)
        torch.cuda.synchronize()
        return graphs

    def replay(self, graphs: list[torch.cuda.CUDAGraph], times: int) -> None:
        """All ranks' graphs in turn, until all is done."""
        for _ in range(times):
            for rank, graph in enumerate(graphs):
                with torch.cuda.stream(self.streams[rank]):
                    graph.replay()
        torch.cuda.synchronize()


@pytest.fixture
def pair(exchanges) -> Pair:
    return Pair(exchanges)


def parts_of(rows: int, width: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(rows, width, generator=generator, device="cuda").bfloat16() for _ in range(2)]


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    return (parts[0].float() + parts[1].float()).bfloat16()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_bits_of_the_twin_for_any_number_of_rows(pair, width):
    whole, residual = parts_of(300, width, 1), parts_of(300, width, 2)[0]
    expected, squares = residual + in_order(whole), None
    for rows in (300, 1, 2, 3, 4, 7, 8, 16, 33, 64):

        def call(one, rank, rows=rows):
            return one.all_reduce_add(whole[rank][:rows], Stream(residual[:rows]))

        pair.warm_up(call)
        for stream in pair.run(call):
            squares = stream.sumsq if squares is None else squares
            assert torch.equal(stream.rows, expected[:rows])
            assert torch.equal(stream.sumsq, squares[:rows])
    torch.testing.assert_close(squares.sum(1), expected.float().square().sum(1), rtol=1e-4, atol=0)


def test_parts_are_gathered(pair):
    for widths in ((2048, 2048), (130, 129)):
        parts = [parts_of(5, width, 3)[0] for width in widths]

        def call(one, rank, parts=parts, widths=widths):
            return one.all_gather(parts[rank], widths)

        pair.warm_up(call)
        for whole in pair.run(call):
            assert torch.equal(whole, torch.cat(parts, dim=1))


def test_a_thousand_replays_of_a_graph_lose_nothing(pair):
    """Each replay runs six exchanges of other numbers; what differs from the twin is counted in the graph itself."""
    base = parts_of(4, 4096, 4)
    step = [torch.zeros((), device="cuda") for _ in range(2)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2)]

    def call(one, rank):
        step[rank].add_(1)
        for i, rows in enumerate((4, 1, 4, 2, 4, 4)):
            parts = [(part[:rows].float() * (step[rank] % 64 + i)).bfloat16() for part in base]
            stream = one.all_reduce_add(parts[rank], Stream(base[0][:rows]))
            wrong[rank].add_((stream.rows != base[0][:rows] + in_order(parts)).sum())

    pair.warm_up(call)
    pair.run(call)
    graphs = pair.captured(call)
    for one in wrong:
        one.zero_()
    torch.cuda.synchronize()
    for _ in range(20):
        pair.replay(graphs, 50)
    assert [one.lost() for one in pair.ranks] == [None, None]
    assert [int(one) for one in wrong] == [0, 0]
    assert [float(one) for one in step] == [1002.0, 1002.0]
    assert int(pair.ranks[0]._epochs[0]) == 1 + 6 * 1002


def test_programs_of_many_items_lose_nothing(pair):
    """More items than programs: each program takes several, and its warps are not at the same one."""
    sums, halves = parts_of(300, 4096, 6), parts_of(8, 64128, 7)
    expected, whole = in_order(sums), torch.cat(halves, dim=1)
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2)]

    def call(one, rank):
        wrong[rank].add_((one.all_reduce(sums[rank]) != expected).sum())
        wrong[rank].add_((one.all_gather(halves[rank], (64128, 64128)) != whole).sum())

    pair.warm_up(call)
    pair.run(call)
    graphs = pair.captured(call)
    for one in wrong:
        one.zero_()  # the warm-up waited for nobody
    torch.cuda.synchronize()
    pair.replay(graphs, 300)
    assert [one.lost() for one in pair.ranks] == [None, None]
    assert [int(one) for one in wrong] == [0, 0]


def test_a_peer_that_does_not_come_raises_a_flag_and_the_graph_ends(pair):
    parts = parts_of(1, 4096, 5)

    def call(one, rank):
        x = parts[rank]
        for _ in range(40):
            x = one.all_reduce(x)

    pair.warm_up(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=pair.streams[1]):
        call(pair.ranks[1], 1)
    pair.ranks[1].be_patient(0.1)
    torch.cuda.synchronize()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(pair.streams[1]):
        began.record()
        graph.replay()
        ended.record()
    torch.cuda.synchronize()
    assert pair.ranks[1].lost() == 0
    waited = began.elapsed_time(ended)  # only the first of 40 has waited its 100 ms: by the card's own clock
    assert 90 < waited < 1000


def test_two_processes_reach_each_other_through_shared_handles(ranks):
    """On one card, which they take in turn: slow, and the same memory."""
    for sums in ranks.run(2, JOBS, "on_one_card", 3):
        assert sums == [True] * 3

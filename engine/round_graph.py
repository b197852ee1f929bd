"""Steps that are captured once and replayed: one graph for each batch size of a round, and of chunks of each length.

A captured step reads its inputs from buffers that stay where they are, and its outputs lie where the capture put them.
So a replay is one call: nothing is looked up, allocated or compiled. Batches between two sizes are filled up with the
request table's last row, which is nobody's: length 0, and the dummy block for a cache.

On the CPU the same class works with `RecordedGraphs`, whose replay runs the captured function again on the same
buffers and puts its results where those of the capture lie. What graphs demand of the engine (no stale inputs, padding
that changes nothing, results read before the next replay) is so tested without a card.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from slipstream.engine.compile_count import COMPILES
from slipstream.engine.config import MAX_ROUNDS_IN_FLIGHT
from slipstream.engine.runner import PrefillResult, RoundResult, Runner
from slipstream.engine.scheduler import Chunk

Result = TypeVar("Result")
# Runs before a capture: the first compiles kernels, the second finds out whether everything is there.
WARM_UP_RUNS = 2
TIMED_REPLAYS = 8
NAP_SECONDS = 100e-6
CHUNK_FACTS = 4  # slot, start, rows, is_last


class Steps(Protocol):
    """How steps reach the device. Each launch writes one record into the ring; `launched` counts them."""

    launched: int
    captures: int
    round_ms: dict[int, dict[int, float]]  # requests of a captured round -> K -> milliseconds; empty: not measured

    def describe(self) -> dict[str, Any] | None:
        """For people and JSON: what is captured; None without graphs."""

    def prepare(self) -> None:
        """Whatever must be done before the first launch."""

    def context(self) -> AbstractContextManager[object]:
        """What host code that touches the request table, and every launch, runs in."""

    def round(self, slots: list[int], num_steps: int) -> RoundResult:
        """A round of K = `num_steps` of the requests at `slots`; row b of the result is the request at slots[b]."""

    def prefill(self, chunks: list[Chunk]) -> PrefillResult:
        """Chunks of prompts, one a request; row c of the result is chunks[c], its first rows are the chunk's own."""


class EagerSteps:
    """Steps in their exact shapes, without graphs."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.launched, self.captures = runner, 0, 0
        self.round_ms: dict[int, dict[int, float]] = {}
        self._slots: tuple[list[int], torch.Tensor] = ([], torch.empty(0))

    def describe(self) -> None:
        return None

    def prepare(self) -> None:
        pass

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def round(self, slots: list[int], num_steps: int) -> RoundResult:
        if slots != self._slots[0]:
            self._slots = (slots, torch.tensor(slots, device=self.runner.device))
        self.launched += 1
        return self.runner.round(self._slots[1], num_steps)

    def prefill(self, chunks: list[Chunk]) -> PrefillResult:
        inputs = torch.tensor(_facts(chunks), device=self.runner.device).view(-1, CHUNK_FACTS)  # [C * 4] -> [C, 4]
        self.launched += 1
        return self.runner.prefill(inputs, max(chunk.rows for chunk in chunks))


@dataclass
class Captured(Generic[Result]):
    """One captured step.

    Args:
        size: requests.
        inputs: int64, what it reads: slots [size] of a round, (slot, start, rows, is_last) [size, 4] of chunks.
        replay: runs it on what `inputs` holds.
        result: where its outputs lie.
        values: what `inputs` holds, as far as the host has queued it.
    """

    size: int
    inputs: torch.Tensor
    replay: Callable[[], None]
    result: Result
    values: list[int] = field(default_factory=list)


class Graphs(Protocol):
    """What captures functions of static buffers."""

    def capture(self, function: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Runs and captures `function`: (replay, where its results lie)."""

    def context(self) -> AbstractContextManager[object]:
        """What replays run in, and whatever must keep its order with them."""

    def write(self, inputs: torch.Tensor, values: list[int]) -> None:
        """Puts `values` into `inputs`, in the order of the replays, without waiting for them."""

    def finish(self) -> None:
        """Waits until everything is done, whoever launched it."""


class RecordedGraphs:
    """Graphs for the CPU: a replay is a call, whose results are copied to where the first call's lie."""

    def capture(self, function: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        result = function()
        kept = list(_tensors(result))

        def replay() -> None:
            with torch.inference_mode():
                for place, new in zip(kept, _tensors(function()), strict=True):
                    place.copy_(new)

        return replay, result

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def write(self, inputs: torch.Tensor, values: list[int]) -> None:
        inputs.view(-1).copy_(torch.tensor(values))

    def finish(self) -> None:
        pass


class CudaGraphs:
    """CUDA graphs on one stream with one memory pool.

    Args: largest: most values that an input takes.
    """

    def __init__(self, largest: int) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        # Values wait here for their copy. A row is used again only when the launches behind it have been waited for.
        rows = 2 * MAX_ROUNDS_IN_FLIGHT + 4
        self._staging = torch.zeros(rows, largest, dtype=torch.int64, pin_memory=True)
        self._next = 0

    def __del__(self) -> None:
        # Launches may still be out; what they write to is given back together with this.
        with suppress(RuntimeError, AttributeError):
            self.stream.synchronize()

    def capture(self, function: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def write(self, inputs: torch.Tensor, values: list[int]) -> None:
        row = self._staging[self._next, : len(values)]
        self._next = (self._next + 1) % len(self._staging)
        row.copy_(torch.tensor(values))
        inputs.view(-1).copy_(row, non_blocking=True)

    def finish(self) -> None:
        while not self.stream.query():  # a kernel may wait for another rank: its death, a signal, is heard meanwhile
            time.sleep(NAP_SECONDS)
        torch.cuda.synchronize()  # also what other streams have put into caches and weights


@dataclass
class StartSeconds:
    """Wall seconds of `GraphSteps.prepare`: the first runs, in which kernels are compiled, the captures, the timing."""

    warm_up: float = 0.0
    capture: float = 0.0
    timing: float = 0.0


class GraphSteps:
    """Steps as replays.

    Args:
        runner: whose rounds and chunks are captured.
        graphs: what captures them.

    `captures` counts captures; after `prepare` there are none.
    """

    def __init__(self, runner: Runner, graphs: Graphs) -> None:
        self.runner, self.graphs, self.launched, self.captures = runner, graphs, 0, 0
        self.seconds = StartSeconds()
        self.round_ms: dict[int, dict[int, float]] = {}
        self.rounds: dict[int, list[Captured[RoundResult]]] = {k: [] for k in runner.config.round_steps}  # K -> by size
        self.chunks: dict[int, list[Captured[PrefillResult]]] = {}  # rows of a request -> by requests; both ascending
        self._round_of: dict[int, list[Captured[RoundResult]]] = {}  # K -> [n]: what runs n requests

    def prepare(self) -> None:
        """Warms up and captures every size, the largest first: what it frees, the smaller ones use again."""
        config, runner = self.runner.config, self.runner
        dummy = runner.table.dummy_slot
        if runner.device.type == "cuda":
            COMPILES.install()
        self.graphs.finish()
        with self.context():
            for bucket in reversed(config.prefill_buckets):
                rows = bucket.rows
                of_rows: list[Captured[PrefillResult]] = []
                for size in reversed(bucket.batches):
                    chunks = torch.tensor([self._nobody] * size, device=runner.device)  # [size, 4]
                    of_rows.insert(0, self._capture(chunks, partial(runner.prefill, num_rows=rows)))
                self.chunks = {rows: of_rows, **self.chunks}
                if runner.device.type == "cuda":  # a trace asks for the logits of all rows: compiled now, if at all
                    with torch.inference_mode():
                        runner.target.logits(of_rows[0].result.last[0])
            for size in reversed(config.batch_buckets):
                for num_steps in reversed(config.round_steps):
                    slots = torch.full((size,), dummy, dtype=torch.int64, device=runner.device)
                    captured = self._capture(slots, partial(runner.round, num_steps=num_steps))
                    self.rounds[num_steps].insert(0, captured)
                    if captured.result.proposal is not None:  # as a trace asks for it, see above
                        captured.result.proposal.whole()
            for num_steps, captured_rounds in self.rounds.items():
                self._round_of[num_steps] = _by_requests(captured_rounds, config.max_running_requests)
            if config.choose_steps:
                self._time_rounds()
        self.graphs.finish()
        self.launched = int(runner.ring.counter)

    def context(self) -> AbstractContextManager[object]:
        return self.graphs.context()

    def round(self, slots: list[int], num_steps: int) -> RoundResult:
        bucket = self._round_of[num_steps][len(slots)]
        if slots != bucket.values:
            bucket.values = slots
            padding = [self.runner.table.dummy_slot] * (bucket.size - len(slots))
            self.graphs.write(bucket.inputs, slots + padding)
        bucket.replay()
        self.launched += 1
        return bucket.result

    def prefill(self, chunks: list[Chunk]) -> PrefillResult:
        most = max(chunk.rows for chunk in chunks)
        of_rows = next(captured for rows, captured in self.chunks.items() if rows >= most)
        bucket = next(captured for captured in of_rows if captured.size >= len(chunks))
        self.graphs.write(bucket.inputs, _facts(chunks) + self._nobody * (bucket.size - len(chunks)))
        bucket.replay()
        self.launched += 1
        return bucket.result

    def describe(self) -> dict[str, Any]:
        return {
            "batches": list(self.runner.config.batch_buckets),
            "prefill_rows": list(self.chunks),
            "prefill_requests": max(one.size for of_rows in self.chunks.values() for one in of_rows),
            "num_steps": self.runner.config.num_steps,
            "round_steps": list(self.rounds),
            "captures": self.captures,
            "warm_up_seconds": round(self.seconds.warm_up, 3),
            "capture_seconds": round(self.seconds.capture, 3),
            "timing_seconds": round(self.seconds.timing, 3),
            # Requests -> K -> milliseconds, of this rank; of nobody where K is not chosen.
            "round_ms": {
                str(size): {str(k): round(ms, 4) for k, ms in times.items()} for size, times in self.round_ms.items()
            },
        }

    def _time_rounds(self) -> None:
        """Milliseconds of each captured round, of requests that are nobody's: contexts cost all K alike."""
        began = time.perf_counter()
        for num_steps, captured_rounds in self.rounds.items():
            for one in captured_rounds:
                one.replay()
                self.graphs.finish()
                start = time.perf_counter()
                for _ in range(TIMED_REPLAYS):
                    one.replay()
                self.graphs.finish()
                ms = (time.perf_counter() - start) * 1e3 / TIMED_REPLAYS
                self.round_ms.setdefault(one.size, {})[num_steps] = ms
        self.seconds.timing = time.perf_counter() - began

    @property
    def _nobody(self) -> list[int]:
        """A chunk that stands for nobody: one row of the dummy slot."""
        return [self.runner.table.dummy_slot, 0, 1, 0]

    def _capture(self, inputs: torch.Tensor, function: Callable[[torch.Tensor], Result]) -> Captured[Result]:
        began = time.perf_counter()
        for _ in range(WARM_UP_RUNS):
            function(inputs)
        self.graphs.finish()
        warm = time.perf_counter()
        replay, result = self.graphs.capture(lambda: function(inputs))
        self.captures += 1
        self.graphs.finish()
        self.seconds.warm_up += warm - began
        self.seconds.capture += time.perf_counter() - warm
        return Captured(len(inputs), inputs, replay, result)


def make_steps(runner: Runner) -> Steps:
    """What the runner's config asks for."""
    config = runner.config
    if not config.uses_graphs:
        return EagerSteps(runner)
    graphs: Graphs = RecordedGraphs()
    if runner.device.type == "cuda":
        most = max(bucket.most_requests for bucket in config.prefill_buckets)
        graphs = CudaGraphs(max(CHUNK_FACTS * most, config.max_running_requests))
    return GraphSteps(runner, graphs)


def _facts(chunks: list[Chunk]) -> list[int]:
    """What `Runner.prefill` reads of each, one after the other."""
    return [fact for c in chunks for fact in (c.sequence.slot, c.start, c.rows, int(c.is_last))]


def _by_requests(captured: list[Captured[Result]], most: int) -> list[Captured[Result]]:
    """[n] for n of 0..most: the smallest of `captured`, which ascend, that has room for n requests."""
    return [next(one for one in captured if one.size >= n) for n in range(most + 1)]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a result, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))
    elif isinstance(value, dict | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)

"""Fills with garbage what a step may find but must not read: a run of an engine then shows whether it does.

Why runs that are repeated do not show it by themselves: a request gets the lowest free blocks, so the second run of the
same request finds in every cell of the cache what it is going to write there. A cell that is read too early, or is not
written at all, has the right bits from the second run on; only the first run goes astray.
"""

import ctypes
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from slipstream.engine.engine import Engine
from slipstream.engine.round_graph import CudaGraphs, GraphSteps, _tensors

# Of cells: large, so that a score made of it shows, and finite, for a masked cell is multiplied by a weight of 0.
CELL = 3e4
BYTE = 0xFF  # of memory that a step must write before it reads it: NaN as a float, -1 as an index


def poison(engine: Engine) -> None:
    """What an engine keeps between requests, of a started engine without requests.

    Cells of both caches, features, tokens and sampling parameters of free rows, an oracle's drafts, records that are
    read, partial sums of attention. What must be as it is between requests stays: lengths, limits and blocks of free
    rows, the dummy row, counters.
    """
    assert not engine.has_work
    runner = engine.runner
    table, vocab, free = runner.table, engine.target.config.vocab_size, slice(0, runner.table.dummy_slot)
    with engine.steps.context(), torch.inference_mode():  # attention's workspace may be of any mode
        for cells in _cells(engine):
            cells.fill_(CELL)
            cells.view(-1)[1::3] = -CELL
        table.features[free] = CELL
        table.tokens[free] = vocab - 1
        for parameter, value in ((table.temperature, 7.0), (table.top_k, 2), (table.top_p, 0.1), (table.seed, 12345)):
            parameter[free] = value
        table.choice[free] = 3
        proposer: Any = runner.proposer
        drafts = getattr(proposer, "drafts", None)
        if drafts is not None:
            drafts.fill_(vocab - 1)
        if runner.device.type == "cuda":
            from slipstream.kernels.gpu.attention_split import workspace_of

            workspace_of(runner.device).partials.fill_(torch.nan)
    runner.ring.records.fill_(-7)
    runner.ring.stamps.fill_(-7)


def graphs_filler(steps: GraphSteps) -> Callable[[], None]:
    """What fills all that captured steps write on their way, results among it: a replay writes it before it reads it.

    On a card that is the graphs' whole memory, in the order of the replays; nothing is waited for.
    """
    graphs = steps.graphs
    if isinstance(graphs, CudaGraphs):
        return partial(_fill, memory_of(graphs), graphs.stream)
    captured: list[Any] = [one for of_k in steps.rounds.values() for one in of_k]
    captured += [one for of_rows in steps.chunks.values() for one in of_rows]

    def fill() -> None:
        with torch.inference_mode():
            for one in captured:
                for tensor in _tensors(one.result):
                    tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

    return fill


def memory_of(graphs: CudaGraphs) -> list[tuple[int, int]]:
    """(address, bytes) of every piece of memory that graphs were captured into."""
    own = [(s["address"], s["total_size"]) for s in _segments() if tuple(s["segment_pool_id"]) == tuple(graphs.pool)]
    assert own, "captured steps have memory"
    return own


def poison_free_memory() -> int:
    """On a card: what torch holds and nobody has, outside of graphs. Returns how many bytes that was.

    A captured step that points to a tensor which nobody keeps alive reads this then.
    """
    gc.collect()
    torch.cuda.synchronize()
    free = [
        (block["address"], block["size"])
        for segment in _segments()
        if tuple(segment["segment_pool_id"]) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    _fill(free, torch.cuda.current_stream())
    torch.cuda.synchronize()
    return sum(size for _, size in free)


def _segments() -> Any:
    return torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]


def _fill(pieces: list[tuple[int, int]], stream: torch.cuda.Stream) -> None:
    """Pieces of a card's memory (address, bytes) with BYTE, in the order of `stream`."""
    from slipstream.kernels.driver import call

    for address, size in pieces:
        where = ctypes.c_void_p(stream.cuda_stream)
        call("cuMemsetD8Async", ctypes.c_uint64(address), ctypes.c_ubyte(BYTE), ctypes.c_size_t(size), where)


def poison_every_launch(engine: Engine) -> None:
    """From now on the graphs' memory is filled in front of every launch of a started engine with graphs."""
    assert isinstance(engine.steps, GraphSteps)
    launch_round, launch_chunks, fill = engine.steps.round, engine.steps.prefill, graphs_filler(engine.steps)

    def round_(slots: list[int], num_steps: int) -> Any:
        fill()
        return launch_round(slots, num_steps)

    def prefill(chunks: Any) -> Any:
        fill()
        return launch_chunks(chunks)

    engine.steps.round, engine.steps.prefill = round_, prefill  # type: ignore[method-assign]


def _cells(engine: Engine) -> list[torch.Tensor]:
    """Of target and draft, all layers."""
    proposer: Any = engine.runner.proposer
    caches, found = [engine.runner.cache], []
    for one in (proposer, getattr(proposer, "inner", None)):
        cache = getattr(one, "cache", None)
        caches += [] if cache is None else [cache]
    for cache in caches:
        found += cache.layers
    return found

"""One rank of a part of tp8.py: python tp8_rank.py RANK SIZE STORE PART SECONDS SCRATCH ARGUMENTS

Rank 0 tells its parent in lines that begin with @. SECONDS: after so many it says where it hangs.
"""

import argparse
import faulthandler
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tp8 import EXIT_PEER_LOST, ROWS, row

REPLAYS = 10_000
CALLS = 40  # exchanges of a timed graph
GOAL_US = 8.0


@dataclass(frozen=True)
class Run:
    """What a part knows. parallel: the ranks; args: of tp8.py; scratch: a directory that parts share."""

    parallel: Any
    args: argparse.Namespace
    scratch: Path
    began: float

    @property
    def device(self) -> str:
        return "cpu" if self.args.rehearse == "cpu" else "cuda"

    @property
    def tell(self) -> bool:
        return bool(self.parallel.rank == 0)

    def row(self, case: str, value: float, unit: str, goal: float | None = None, **more: Any) -> None:
        """A row of the table, from rank 0."""
        self.send(rows=[row(case, value, unit, goal, tp=self.parallel.size, **more)])

    def send(self, **message: Any) -> None:
        """A line to the parent, who reads those of rank 0."""
        if self.tell:
            print("@" + json.dumps(message), flush=True)

    def progress(self, what: str) -> None:
        if self.tell:
            print(f"[{self.parallel.size} ranks, {time.monotonic() - self.began:.0f} s] {what}", flush=True)


def main(rank: int, size: int, store: int, part: str, seconds: float, scratch: str, arguments: str) -> None:
    faulthandler.dump_traceback_later(seconds)
    began, code = time.monotonic(), 0
    import torch

    from slipstream.engine.card_group import carrier_name
    from slipstream.engine.rank_group import be_patient, connect
    from slipstream.engine.serving.engine_process import die_with
    from slipstream.kernels.all_gather import PeerLost

    die_with(os.getppid())
    args = argparse.Namespace(**json.loads(arguments))
    run = None
    try:
        parallel = connect(rank, size, store, peer_seconds=seconds)
        run = Run(joined(parallel, args.rehearse), args, Path(scratch), began)
        be_patient(parallel, seconds)
        run.progress(f"{part}: {carrier_name(run.parallel)}")
        with torch.no_grad():
            part_named(part)(run)
    except PeerLost as error:
        if run:
            run.send(state="lost", words=str(error))
        code = EXIT_PEER_LOST
    except Exception:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def part_named(part: str) -> Callable[[Run], None]:
    if part == "exchange":
        return exchange_part
    if part == "small":
        from tp8_small import small_part

        return small_part
    if part == "same":
        from tp8_same import same_part

        return same_part
    import tp8_models

    found: Callable[[Run], None] = {"kimi": tp8_models.kimi_part, "llama": tp8_models.llama_part}[part]
    return found


def joined(parallel: Any, rehearse: str) -> Any:
    """The ranks with a card each; rehearsed: with none, or all on the first one."""
    import torch

    from slipstream.engine import card_group

    if rehearse == "cpu" or parallel.size == 1:
        return parallel
    if not rehearse:
        return card_group.join_cards(parallel)
    torch.zeros(1, device="cuda")
    card = card_group._peer_exchange(parallel)
    if isinstance(card, str):
        raise RuntimeError(card)
    card.be_patient(60.0)
    return replace(parallel, card=card)


def parts_of(rows: int, width: int, ranks: int = 2, device: str = "cuda") -> tuple[list[Any], Any]:
    """Parts of all ranks, the same on each, and a residual."""
    import torch

    generator = torch.Generator(device).manual_seed(rows * width)
    made = [torch.randn(rows, width, generator=generator, device=device).bfloat16() for _ in range(ranks + 1)]
    return made[:ranks], made[ranks]


def summed(parts: list[Any], residual: Any) -> Any:
    """Residual + the sum in the order of the ranks, as the torch twin makes it."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return residual + total.bfloat16()


def time_graph(call: Callable[[], object], stream: Any, calls: int = CALLS, turns: int = 20) -> float:
    """Microseconds a call, in a graph of many; the median of the replays. All ranks do the same meanwhile."""
    import torch

    torch.cuda.synchronize()  # what it reads was made in another stream
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    times = []
    with torch.cuda.stream(stream):
        for _ in range(turns + 3):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()  # the ranks meet in it: the next one begins at the same time on all
            began.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended) * 1e3 / calls)
    return statistics.median(times[3:])


def time_calls(call: Callable[[], object], calls: int = 5) -> float:
    """The same without a card."""
    call()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) * 1e6 / calls


def time_exchanges(run: Run, width: int) -> None:
    """All-reduce + add + the sums of squares of the next norm: bits, then microseconds."""
    import torch

    from slipstream.engine.tensor_parallel import AllReduce
    from slipstream.kernels.stream import Stream

    reduce, rank, ranks = AllReduce(run.parallel), run.parallel.rank, run.parallel.size
    stream = torch.cuda.Stream() if run.device == "cuda" else None
    for rows in ROWS:
        parts, residual = parts_of(rows, width, ranks, run.device)
        own = parts[rank]
        found = reduce.add_to(Stream(residual), own).rows
        assert torch.equal(found, summed(parts, residual)), f"{rows} x {width}: other bits than the twin's"
        call = lambda own=own, r=residual: reduce.add_to(Stream(r), own)  # noqa: E731
        us = time_graph(call, stream) if stream else time_calls(call)
        case = "allreduce-norm" + ("" if width == 4096 else f", width {width}")
        run.row(case, us, "us in a graph" if stream else "us", GOAL_US if stream else None, batch=rows)


def exchange_part(run: Run) -> None:
    import torch

    for width in (7168, 4096):
        time_exchanges(run, width)
    if run.device == "cpu":
        return
    stream, peers, ranks = torch.cuda.Stream(), run.parallel.card, run.parallel.size
    replays = 20 if run.args.rehearse else REPLAYS
    if peers.in_kernels:
        wrong = replay(peers, run.parallel.rank, *parts_of(16, 4096, ranks), stream, replays)
        run.row(f"{replays} replays of 6 exchanges", wrong, "numbers that differ from the twin's", 0.0)
    if not run.args.rehearse:  # NCCL wants a card for each rank
        time_nccl(run, stream)


def time_nccl(run: Run, stream: Any) -> None:
    """NCCL's own all-reduce, without add and norm; and our fallback's bits."""
    import torch

    from slipstream.engine import card_group
    from slipstream.kernels.stream import Stream

    exchange = card_group._nccl_exchange(run.parallel)
    for rows in ROWS:
        parts, residual = parts_of(rows, 7168, run.parallel.size)
        own = parts[run.parallel.rank]
        found = exchange.all_reduce_add(own, Stream(residual))
        assert torch.equal(found.rows, summed(parts, residual)), f"NCCL, {rows} rows: other bits than the twin's"
        buffer = own.clone()
        alone = time_graph(lambda b=buffer: exchange.group.allreduce([b]).wait(), stream)
        run.row("NCCL all-reduce alone, width 7168", alone, "us in a graph", batch=rows)
    ours = time_graph(lambda own=own, r=residual: exchange.all_reduce_add(own, Stream(r)), stream)
    run.row("fallback: all-gather + sum + add, width 7168", ours, "us in a graph", batch=ROWS[-1])


def replay(peers: Any, rank: int, parts: list[Any], residual: Any, stream: Any, replays: int) -> float:
    """Replays a graph whose exchanges carry other numbers each time and check themselves: how many were wrong."""
    import torch

    from slipstream.kernels.stream import Stream

    step = torch.zeros((), device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def exchanges() -> None:
        step.add_(1)
        for i, rows in enumerate((16, 1, 16, 4, 2, 8)):
            now = [(part[:rows].float() * (step % 61 + i)).bfloat16() for part in parts]
            found = peers.all_reduce_add(now[rank], Stream(residual[:rows]))
            wrong.add_((found.rows != summed(now, residual[:rows])).sum())

    torch.cuda.synchronize()  # the zeros were made in another stream
    with torch.cuda.stream(stream):
        exchanges()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        exchanges()
    with torch.cuda.stream(stream):
        for i in range(replays):
            graph.replay()
            if i % 200 == 199:
                stream.synchronize()
    torch.cuda.synchronize()
    assert peers.lost() is None
    assert float(step) == replays + 1
    return float(wrong)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]), *sys.argv[6:8])

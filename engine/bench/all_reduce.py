"""The sums of a verify step over ranks, timed on this machine: our own way, the library's, and that with other values.

    python -P -m slipstream.engine.bench.all_reduce --ranks 2 --rows 1,2,4 --hidden 4096 --nccl '{"NCCL_ALGO": "Ring"}'

prints one JSON object (`Timed`). Ranks are processes, on cards one each; without cards gloo stands in, and `library`
says so. NCCL reads its variables once in a process: each set of values has processes of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from slipstream.engine.errors import SlipstreamError

CALLS = 40  # of a timed graph: a launch by itself takes longer than a sum
TURNS = 20
CPU_CALLS = 10
RANK_SECONDS = 90.0
MARK = "@times "


@dataclass(frozen=True)
class Timed:
    """Microseconds of a sum over the ranks, by its rows.

    Args:
        ranks: how many.
        card: name of the first rank's card; "" without one.
        library: nccl, or gloo where it stands in for it.
        carrier: what our own way runs on: peer memory, NCCL, gloo.
        rows: of a sum: a round of K = 3 has 4.
        hidden: width of a row, bf16 on a card, fp32 without.
        own_us: our own sum, in rank order, by number of rows.
        default_us: the library's, with no value set.
        configured_us: the library's with `nccl`; None where nothing is set.
        nccl: the variables of it.
    """

    ranks: int
    card: str
    library: str
    carrier: str
    rows: tuple[int, ...]
    hidden: int
    own_us: tuple[float, ...]
    default_us: tuple[float, ...]
    configured_us: tuple[float, ...] | None
    nccl: Mapping[str, str]


def time_all_reduce(
    ranks: int, rows: Sequence[int], hidden: int, nccl: Mapping[str, str], *, device: str = "auto"
) -> Timed:
    """Times sums of [rows, hidden] over ranks of this machine.

    Args:
        ranks: processes, 2 or more; on cards one each.
        rows: numbers of rows to time.
        hidden: width of a row.
        nccl: variables of NCCL that are tried beside none.
        device: auto, cuda or cpu.

    Raises SlipstreamError when a rank ends badly or does not end.
    """
    plain = {name: value for name, value in os.environ.items() if name not in nccl}
    first = _run(ranks, rows, hidden, device, plain, own=True)
    again = _run(ranks, rows, hidden, device, {**plain, **nccl}, own=False) if nccl else None
    configured = None if again is None else tuple(again["library_us"])
    return Timed(
        ranks, first["card"], first["library"], first["carrier"], tuple(rows), hidden, tuple(first["own_us"]),
        tuple(first["library_us"]), configured, dict(nccl),
    )  # fmt: skip


def _run(ranks: int, rows: Sequence[int], hidden: int, device: str, env: Mapping[str, str], *, own: bool) -> Any:
    """The times that rank 0 tells. Ranks die with us; a rank that ends badly ends the others."""
    from slipstream.engine.rank_group import make_store

    store = make_store()
    words = [sys.executable, "-P", "-m", __spec__.name, "--store", str(store), "--ranks", str(ranks)]
    words += ["--rows", ",".join(map(str, rows)), "--hidden", str(hidden), "--device", device, *["--own"] * own]
    processes = [
        subprocess.Popen(
            [*words, "--rank", str(rank), "--parent", str(os.getpid())],
            env=env, pass_fds=[store], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    os.close(store)
    deadline = time.monotonic() + RANK_SECONDS
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or any(process.poll() for process in processes):
                break
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
    said = [process.communicate()[0] for process in processes]
    codes = [process.returncode for process in processes]
    if any(codes):
        worst = next(rank for rank in sorted(range(ranks), key=lambda rank: codes[rank] < 0) if codes[rank])
        raise SlipstreamError(
            f"ranks of the timed all-reduce ended with {codes}; the last lines of rank {worst}:\n{said[worst][-1500:]}",
            expected=f"{ranks} ranks that sum within {RANK_SECONDS:.0f} s, on cards each on one of its own",
            do="fewer ranks, or look at the cards with `slipstream doctor`",
        )
    return json.loads(next(line for line in said[0].splitlines() if line.startswith(MARK)).removeprefix(MARK))


def _rank(told: argparse.Namespace, rows: Sequence[int]) -> None:
    """One rank: joins the others, times, and rank 0 tells."""
    import torch

    from slipstream.engine.card_group import _nccl_exchange, carrier_name, join_cards
    from slipstream.engine.rank_group import connect
    from slipstream.engine.serving.engine_process import die_with
    from slipstream.kernels.all_reduce import all_reduce

    die_with(told.parent)
    parallel = connect(told.rank, told.ranks, told.store)
    cards = told.device != "cpu" and (torch.cuda.is_available() or told.device == "cuda")
    if cards:
        parallel = join_cards(parallel) if told.own else parallel
        torch.cuda.set_device(told.rank)
    exchange: Any = _nccl_exchange(parallel) if cards else None
    library: Any = exchange.group if cards else parallel.group
    device, dtype = ("cuda", torch.bfloat16) if cards else ("cpu", torch.float32)
    carry: Any = parallel.card or parallel.group
    timed = time_graph if cards else time_calls
    times: dict[str, list[float]] = {"own_us": [], "library_us": []}
    with torch.inference_mode():
        for count in rows:
            x = torch.full((count, told.hidden), 1.0 + told.rank, dtype=dtype, device=device)  # [rows, hidden]
            buffer = torch.zeros_like(x)  # summed over and over: it has to stay finite
            if told.own:
                total = all_reduce(x, carry)
                assert bool((total == told.ranks * (told.ranks + 1) / 2).all()), "a sum came out wrong"
                times["own_us"].append(timed(partial(all_reduce, x, carry)))
            times["library_us"].append(timed(partial(_library_sum, library, buffer)))
    if told.rank == 0:
        name = torch.cuda.get_device_name() if cards else ""
        told_by = "nccl" if cards else "gloo"
        print(
            MARK + json.dumps({"card": name, "library": told_by, "carrier": carrier_name(parallel), **times}),
            flush=True,
        )
    if cards:
        torch.cuda.synchronize()
    sys.stdout.flush()
    os._exit(0)  # NCCL's own end waits for peers


def _library_sum(group: Any, buffer: Any) -> None:
    group.allreduce([buffer]).wait()


def time_graph(call: Callable[[], object]) -> float:
    """Microseconds a call, in a CUDA graph of many; the median of its replays. All ranks do the same meanwhile."""
    import torch

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # what it reads was made in another stream
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    with torch.cuda.stream(stream):
        for _ in range(TURNS):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()  # the ranks meet in it: the next one begins at the same time on all
            began.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended) * 1e3 / CALLS)
    return round(statistics.median(times[3:]), 2)


def time_calls(call: Callable[[], object]) -> float:
    """Microseconds a call on the CPU, the median of some turns."""
    call()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(CPU_CALLS):
            call()
        times.append((time.perf_counter() - began) * 1e6 / CPU_CALLS)
    return round(statistics.median(times), 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the measurement, and of each of its ranks (`--rank`)."""
    parser = argparse.ArgumentParser(prog="slipstream-all-reduce")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--nccl", type=json.loads, default={})
    for name in ("rank", "store", "parent"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--own", action="store_true")
    told = parser.parse_args(arguments)
    rows = tuple(map(int, told.rows.split(",")))
    if told.rank is not None:
        _rank(told, rows)
        return
    try:
        print(json.dumps(asdict(time_all_reduce(told.ranks, rows, told.hidden, told.nccl, device=told.device))))
    except SlipstreamError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

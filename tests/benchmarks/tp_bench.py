"""Tensor parallelism on two cards of one host, in one command: python -P tp_bench.py [PART ..]

exchange  all-reduce + add + the next norm's sums against NCCL, microseconds in a graph; 10,000 replays with checks
engine    Llama-3.1-8B sizes, random weights: milliseconds a step and a round; fault F5 in a trace; a killed rank

TP_BENCH_REHEARSE=1 runs the engine part on the CPU, tiny: whether the script itself works.

Each part is two processes of this file. Prints one table; with OUT in the environment also OUT/tp_bench.json, a list of
{case, batch, K, tp, value, unit, goal}. A part that fails says so in the table, and the others go on.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZE = 2
PARTS = {"exchange": 75.0, "engine": 160.0}  # seconds that each may take
ROWS = (1, 2, 4, 8, 16)
WIDTHS = (4096, 7168)
GOAL_US = 8.0
STEP_GOAL_MS = 2.4
DEAD_GOAL_SECONDS = 5.0
REPLAYS = 10_000
CALLS = 40  # exchanges of a timed graph
KILL_ME = "waiting to be killed"
REHEARSE = os.environ.get("TP_BENCH_REHEARSE") == "1"
DEVICE = "cpu" if REHEARSE else "cuda"

Row = dict[str, Any]


def row(case: str, value: float, unit: str, goal: float | None = None, *, batch: int = 1, k: int = 0) -> Row:
    return {"case": case, "batch": batch, "K": k, "tp": SIZE, "value": value, "unit": unit, "goal": goal}


def say(**message: Any) -> None:
    """A line to the parent, who reads those of rank 0."""
    print("@" + json.dumps(message), flush=True)


# ---- the parent ------------------------------------------------------------------------------------------------------


def run_part(name: str, seconds: float) -> list[Row]:
    """Runs a part on two processes; its rows."""
    from slipstream.engine.rank_group import make_store

    store, began, rows = make_store(), time.monotonic(), []
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", __file__, "--rank", str(rank), str(store), name],
            stdout=subprocess.PIPE if rank == 0 else None,
            pass_fds=[store],
            text=True,
        )
        for rank in range(SIZE)
    ]
    os.close(store)

    def too_long(*_: object) -> None:
        for process in processes:
            process.kill()

    alarm = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    killed_at = 0.0
    assert processes[0].stdout is not None
    for line in processes[0].stdout:
        if not line.startswith("@"):
            print(line, end="", flush=True)
            continue
        message = json.loads(line[1:])
        rows += message.get("rows", [])
        if message.get("state") == KILL_ME:
            time.sleep(0.5)
            killed_at = time.monotonic()
            processes[1].kill()
        if message.get("state") == "lost":
            print(f"rank 0 says: {message['words']}", flush=True)
    codes = [process.wait() for process in processes]
    ended = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, alarm)
    if killed_at:
        rows.append(row("killed-rank", ended - killed_at, "s until the other is gone", DEAD_GOAL_SECONDS))
        rows.append(row("killed-rank-memory", memory_in_use(), "MiB in use on both cards after it", 2048.0))
        if codes[0] != 4:
            rows.append(row(f"killed-rank: exit code {codes[0]} of rank 0", float("nan"), "failed"))
    elif any(codes):
        rows.append(row(f"{name}: exit codes {codes} after {ended - began:.0f} s", float("nan"), "failed"))
    rows.append(row(f"{name}-seconds", ended - began, "s for this part", seconds))
    return rows


def memory_in_use() -> float:
    """MiB on all cards, a second after the processes have gone."""
    time.sleep(1.0)
    if REHEARSE:
        return 0.0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return float(sum(int(one) for one in found[:SIZE])) if found else float("nan")


def main(parts: list[str]) -> None:
    rows: list[Row] = []
    for name in ["engine"] if REHEARSE else parts or list(PARTS):
        rows += run_part(name, PARTS[name])
    print("| case | batch | K | tp | value | unit | goal | |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in rows:
        goal, value = one["goal"], one["value"]
        verdict = "failed" if value != value else "" if goal is None else "met" if value <= goal else "missed"
        print(
            f"| {one['case']} | {one['batch']} | {one['K']} | {one['tp']} | {value:.3f} | {one['unit']} | "
            f"{'' if goal is None else goal} | {verdict} |"
        )
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "tp_bench.json").write_text(json.dumps(rows, indent=1))


# ---- a rank ----------------------------------------------------------------------------------------------------------


def rank_main(rank: int, store: int, part: str) -> None:
    from slipstream.engine.card_group import carrier_name, join_cards
    from slipstream.engine.rank_group import connect
    from slipstream.kernels.all_gather import PeerLost

    code = 0
    try:
        parallel = connect(rank, SIZE, store)
        parallel = parallel if REHEARSE else join_cards(parallel)
        print(f"rank {rank} of {SIZE}: {carrier_name(parallel)}", flush=True)
        {"exchange": exchange_part, "engine": engine_part}[part](parallel)
    except PeerLost as error:
        say(state="lost", words=str(error))
        code = 4
    except Exception:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def time_graph(call: Callable[[], object], stream: Any, calls: int = CALLS) -> float:
    """Microseconds a call, in a graph of many; the median of 20 replays. Both ranks do the same meanwhile."""
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
        for _ in range(23):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()  # the ranks meet in it: the next one begins at the same time on both
            began.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended) * 1e3 / calls)
    return statistics.median(times[3:])


def exchange_part(parallel: Any) -> None:
    import torch

    from slipstream.engine import card_group
    from slipstream.kernels.gpu import all_reduce
    from slipstream.kernels.stream import Stream

    peers, stream, tell = parallel.card, torch.cuda.Stream(), parallel.rank == 0
    carriers: dict[str, Any] = {"ours": peers}
    try:
        carriers["NCCL"] = card_group._nccl_exchange(parallel)
    except RuntimeError as error:
        print(f"no NCCL to compare with: {error}", flush=True)

    def tensors(rows: int, width: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Parts of both ranks, the same on both, and a residual."""
        generator = torch.Generator("cuda").manual_seed(rows * width)
        made = [torch.randn(rows, width, generator=generator, device="cuda").bfloat16() for _ in range(SIZE + 1)]
        return made[:SIZE], made[SIZE]

    def timed_reduce(rows: int, own: torch.Tensor, residual: torch.Tensor) -> list[Row]:
        found, width, wide = [], own.shape[1], rows in (1, 16)
        for warps in (1, 2, 4) if wide else (4,):
            all_reduce._WARPS = warps
            us = time_graph(lambda: peers.all_reduce_add(own, Stream(residual)), stream)
            words, goal = ("", GOAL_US) if warps == 4 else (f", {warps} warps", None)
            found.append(row(f"allreduce-norm {rows} x {width}{words}", us, "us in a graph", goal, batch=rows))
        if wide and "NCCL" in carriers:
            buffer, group = own.clone(), carriers["NCCL"].group
            us = time_graph(lambda: group.allreduce([buffer]).wait(), stream)
            found.append(row(f"NCCL all-reduce alone {rows} x {width}", us, "us in a graph", batch=rows))
        return found

    def timed_gather(rows: int) -> Row:
        logits, widths = torch.randn(rows, 128256 // SIZE, device="cuda").bfloat16(), [128256 // SIZE] * SIZE
        us = time_graph(lambda: peers.all_gather(logits, widths), stream, 20)
        return row(f"logits gathered {rows} x 128256", us, "us in a graph", batch=rows)

    for width in WIDTHS:
        for rows in ROWS:
            parts, residual = tensors(rows, width)
            expected = residual + (parts[0].float() + parts[1].float()).bfloat16()
            for name, exchange in carriers.items():
                found = exchange.all_reduce_add(parts[parallel.rank], Stream(residual))
                assert torch.equal(found.rows, expected), f"{name}: other bits than the twin's"
            measured = timed_reduce(rows, parts[parallel.rank], residual)
            if tell:
                say(rows=measured)
    gathered = [timed_gather(rows) for rows in (1, 4, 16)]
    if tell:
        say(rows=gathered)
    wrong = replay(peers, parallel.rank, *tensors(16, 4096), stream)
    if tell:
        say(rows=[row(f"{REPLAYS} replays of 6 exchanges", float(wrong), "numbers that differ from the twin's", 0.0)])


def replay(peers: Any, rank: int, parts: list[Any], residual: Any, stream: Any) -> int:
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
            expected = residual[:rows] + (now[0].float() + now[1].float()).bfloat16()
            wrong.add_((found.rows != expected).sum())

    torch.cuda.synchronize()  # the zeros were made in another stream
    with torch.cuda.stream(stream):
        exchanges()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        exchanges()
    with torch.cuda.stream(stream):
        for i in range(REPLAYS):
            graph.replay()
            if i % 200 == 199:
                stream.synchronize()
    torch.cuda.synchronize()
    assert peers.lost() is None
    assert float(step) == REPLAYS + 1
    return int(wrong)


def engine_part(parallel: Any) -> None:
    import torch

    from slipstream.engine.agreement import RankAgreement
    from slipstream.engine.bench.generate import prompts_of, time_generate
    from slipstream.engine.bench.sizes import LLAMA_8B, Size, _fill
    from slipstream.engine.card_group import check_peers
    from slipstream.engine.config import EngineConfig
    from slipstream.engine.drafts.eagle3.network import Eagle3Network
    from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
    from slipstream.engine.engine import Engine
    from slipstream.engine.inject import inject
    from slipstream.engine.injection import parse_injections
    from slipstream.engine.models.dense import DenseModel
    from slipstream.engine.packed_weights import pack_for_device
    from slipstream.engine.rank_group import CARD_SECONDS
    from slipstream.engine.sampling_params import SamplingParams

    tiny = Size("tiny", 199, 64, 96, 8, 4, 2, 16, False, 1e4, 66, 96)
    size, tell, began = tiny if REHEARSE else LLAMA_8B, parallel.rank == 0, time.monotonic()

    def ready(model: Any, seed: int) -> Any:
        _fill(model, seed + parallel.rank)
        pack_for_device(model, DEVICE)
        return model.requires_grad_(False).eval()

    def progress(what: str) -> None:
        print(f"rank {parallel.rank}, {time.monotonic() - began:.0f} s: {what}", flush=True)

    def engine_of(num_steps: int, proposer: Any = None, capture: tuple[int, ...] = (), faults: Any = ()) -> Any:
        config = EngineConfig(
            num_steps=num_steps,
            max_running_requests=1,
            max_context_tokens=512,
            prefill_chunk_tokens=128,
            device=DEVICE,
        )
        engine = Engine(target, config, proposer, capture, RankAgreement(parallel))
        inject(engine, parse_injections(faults))
        engine.start()
        return engine

    with torch.device(DEVICE):
        target = DenseModel(size.target_config(), torch.bfloat16, parallel)
    target = ready(target, 0)
    progress("weights made")
    engine = engine_of(0)
    progress("K = 0 captured")
    timing = time_generate(engine, 1, new_tokens=256, repeats=3)
    if tell:
        host = f"rest {timing.parts.rest:.3f} ms, host {timing.parts.host:.3f} ms, spread {timing.spread:.1%}"
        print(f"step: {timing.ms:.3f} ms, on the device {timing.parts.verify:.3f} ms, {host}", flush=True)
        say(rows=[row("llama8b-step", timing.ms, "ms a step, wall", STEP_GOAL_MS)])
        say(rows=[row("llama8b-step on the device", timing.parts.verify, "ms a step")])
    del engine

    with torch.device(DEVICE):
        network = Eagle3Network(size.draft_config(), torch.bfloat16, parallel)
    ids = torch.arange(size.draft_vocab_size, device=DEVICE)
    network.d2t.copy_(ids * size.vocab_size // size.draft_vocab_size - ids)
    engine = engine_of(3, Eagle3Proposer(ready(network, 10), 3))
    progress("K = 3 captured")
    timing = time_generate(engine, 1, new_tokens=128, repeats=3)
    if tell:
        parts = timing.parts
        print(f"round: {timing.ms:.3f} ms, draft {parts.draft:.3f}, verify {parts.verify:.3f}, rest {parts.rest:.3f}")
        say(rows=[row("llama8b-round", timing.ms, "ms a round, wall", k=3)])
    del engine

    params = SamplingParams(max_tokens=16, ignore_eos=True)
    answers = {}
    for name, faults in (("right", ()), ("F5", ("F5:slot=2",))):  # the last engine of this target: it stays bent
        engine = engine_of(0, None, (2, 3), faults)
        (answers[name],) = engine.generate(prompts_of(engine, 1, 40), params, trace=True)
        progress(f"traced: {name}")
    right, bent = answers["right"], answers["F5"]
    differs = {name: not torch.equal(state, bent.trace.states[name]) for name, state in right.trace.states.items()}
    tokens = sum(a != b for a, b in zip(right.token_ids, bent.token_ids, strict=True))
    found = {
        "tokens that differ": tokens,
        "slot 2 is right": not differs["slot_2"],
        "slot 3 differs": differs["slot_3"],
    }
    if tell:
        say(rows=[row(f"F5 in slot 2: {name}", float(value), "count", 0.0) for name, value in found.items()])

    engine = engine_of(0)
    if parallel.card is not None:
        with engine.steps.context():
            parallel.card.be_patient(CARD_SECONDS)
    if tell:
        say(state=KILL_ME)
    while True:  # until a rank is killed
        engine.generate(prompts_of(engine, 1, 40), SamplingParams(max_tokens=400, ignore_eos=True))
        check_peers(parallel)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main(sys.argv[1:])

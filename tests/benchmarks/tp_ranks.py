"""One rank of a part of tp_bench.py: python -P tp_ranks.py RANK SIZE STORE PART SECONDS

Rank 0 tells its parent in lines that begin with @. SECONDS: after so many it says where it hangs.
"""

import faulthandler
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

ROWS = (1, 2, 4, 8, 16)
GOAL_US = 8.0
STEP_GOAL_MS = 2.4
REPLAYS = 10_000
CALLS = 40  # exchanges of a timed graph
KILL_ME = "waiting to be killed"
EXIT_PEER_LOST = 4
REHEARSE = os.environ.get("TP_BENCH_REHEARSE", "")
DEVICE = "cpu" if REHEARSE == "cpu" else "cuda"

Row = dict[str, Any]


def row(case: str, value: float, unit: str, goal: float | None = None, *, batch: int = 1, k: int = 0) -> Row:
    return {"case": case, "batch": batch, "K": k, "tp": 2, "value": value, "unit": unit, "goal": goal}


def say(**message: Any) -> None:
    """A line to the parent, who reads those of rank 0."""
    print("@" + json.dumps(message), flush=True)


def main(rank: int, size: int, store: int, part: str, seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds)
    from slipstream.engine.card_group import carrier_name
    from slipstream.engine.rank_group import connect
    from slipstream.engine.serving.engine_process import die_with
    from slipstream.kernels.all_gather import PeerLost

    die_with(os.getppid())
    code, began = 0, time.monotonic()
    try:
        parallel = joined(connect(rank, size, store))
        print(f"rank {rank} of {size}: {carrier_name(parallel)}, {time.monotonic() - began:.1f} s", flush=True)
        {"exchange": exchange_part, "nccl": nccl_part, "engine": engine_part}[part](parallel)
    except PeerLost as error:
        say(state="lost", words=str(error))
        code = EXIT_PEER_LOST
    except Exception:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def joined(parallel: Any) -> Any:
    """The ranks with a card each; rehearsed: with none, or all on the first one."""
    import torch

    from slipstream.engine import card_group

    if REHEARSE == "cpu":
        return parallel
    if REHEARSE != "card":
        return card_group.join_cards(parallel)
    torch.zeros(1, device="cuda")
    card = card_group._peer_exchange(parallel)
    if isinstance(card, str):
        raise RuntimeError(card)
    card.be_patient(60.0)
    return replace(parallel, card=card)


def parts_of(rows: int, width: int) -> tuple[list[Any], Any]:
    """Parts of both ranks, the same on both, and a residual."""
    import torch

    generator = torch.Generator("cuda").manual_seed(rows * width)
    made = [torch.randn(rows, width, generator=generator, device="cuda").bfloat16() for _ in range(3)]
    return made[:2], made[2]


def time_graph(call: Callable[[], object], stream: Any, calls: int = CALLS) -> float:
    """Microseconds a call, in a graph of many; the median of 20 replays. Both ranks do the same meanwhile."""
    import torch

    calls, turns = (2, 1) if REHEARSE else (calls, 20)
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
            graph.replay()  # the ranks meet in it: the next one begins at the same time on both
            began.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended) * 1e3 / calls)
    return statistics.median(times[3:])


def exchange_part(parallel: Any) -> None:
    import torch

    from slipstream.engine.sampling_params import SamplingParams
    from slipstream.kernels.gpu import all_reduce
    from slipstream.kernels.sampling import SamplingBatch, sample
    from slipstream.kernels.stream import Stream
    from slipstream.kernels.vocabulary_part import VocabularyPart

    peers, stream, tell = parallel.card, torch.cuda.Stream(), parallel.rank == 0
    default = all_reduce._WARPS
    for width in (4096, 7168):
        for rows in ROWS:
            parts, residual = parts_of(rows, width)
            own, expected = parts[parallel.rank], residual + (parts[0].float() + parts[1].float()).bfloat16()
            for warps in (2, 4, 8) if rows in (1, 16) and width == 4096 else (default,):
                all_reduce._WARPS = warps
                found = peers.all_reduce_add(own, Stream(residual))
                assert torch.equal(found.rows, expected), f"{rows} x {width}, {warps} warps: other bits than the twin's"
                us = time_graph(lambda own=own, r=residual: peers.all_reduce_add(own, Stream(r)), stream)
                case = "allreduce-norm" if warps == default else f"allreduce-norm, {warps} warps"
                case += "" if width == 4096 else f", width {width}"
                if tell:
                    say(
                        rows=[row(case, us, "us in a graph", GOAL_US if case == "allreduce-norm" else None, batch=rows)]
                    )
            all_reduce._WARPS = default
    for rows in (1, 4, 16):
        logits, widths = torch.randn(rows, 128256 // 2, device="cuda").bfloat16(), [128256 // 2] * 2
        gathered = time_graph(lambda x=logits, w=widths: peers.all_gather(x, w), stream, 20)
        part, positions = VocabularyPart(parallel.rank, widths, peers), torch.zeros(rows, 1, dtype=torch.int64).cuda()
        batch = SamplingBatch.from_params([SamplingParams(temperature=0.0)] * rows, device="cuda")
        greedy = lambda x=logits[:, None], b=batch, at=positions, p=part: sample(x, b, at, part=p)  # noqa: E731
        with torch.inference_mode():
            chosen = time_graph(greedy, stream, 20)
        if tell:
            say(rows=[row(f"logits gathered, {rows} x 128256", gathered, "us in a graph", batch=rows)])
            say(rows=[row(f"greedy tokens by (score, id), {rows} x 128256", chosen, "us in a graph", batch=rows)])
    replays = 20 if REHEARSE else REPLAYS
    wrong = replay(peers, parallel.rank, *parts_of(16, 4096), stream, replays)
    if tell:
        say(rows=[row(f"{replays} replays of 6 exchanges", float(wrong), "numbers that differ from the twin's", 0.0)])


def nccl_part(parallel: Any) -> None:
    """The fallback: its bits, and what NCCL's own all-reduce takes."""
    import torch

    from slipstream.engine import card_group
    from slipstream.kernels.stream import Stream

    if REHEARSE:
        return  # NCCL wants a card for each rank
    exchange, stream = card_group._nccl_exchange(parallel), torch.cuda.Stream()
    for rows in (1, 16):
        parts, residual = parts_of(rows, 4096)
        own, expected = parts[parallel.rank], residual + (parts[0].float() + parts[1].float()).bfloat16()
        found = exchange.all_reduce_add(own, Stream(residual))
        assert torch.equal(found.rows, expected), f"NCCL, {rows} rows: other bits than the twin's"
        ours = time_graph(lambda own=own, r=residual: exchange.all_reduce_add(own, Stream(r)), stream)
        buffer = own.clone()
        alone = time_graph(lambda b=buffer: exchange.group.allreduce([b]).wait(), stream)
        if parallel.rank == 0:
            say(rows=[row(f"NCCL all-reduce alone, {rows} x 4096", alone, "us in a graph", batch=rows)])
            say(rows=[row(f"fallback: all-gather + sum + add, {rows} x 4096", ours, "us in a graph", batch=rows)])


def replay(peers: Any, rank: int, parts: list[Any], residual: Any, stream: Any, replays: int) -> int:
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
        for i in range(replays):
            graph.replay()
            if i % 200 == 199:
                stream.synchronize()
    torch.cuda.synchronize()
    assert peers.lost() is None
    assert float(step) == replays + 1
    return int(wrong)


class Engines:
    """Engines of 8B sizes on this rank. Args: parallel: the ranks."""

    def __init__(self, parallel: Any) -> None:
        import torch

        from slipstream.engine.bench.sizes import LLAMA_8B, Size
        from slipstream.engine.models.dense import DenseModel

        small = Size("small", 512, 256, 512, 8, 4, 2, 64, False, 1e4, 128, 512)
        self.parallel, self.began = parallel, time.monotonic()
        self.size = small if REHEARSE else LLAMA_8B
        with torch.device(DEVICE):
            target = DenseModel(self.size.target_config(), torch.bfloat16, parallel)
        self.target = self._ready(target, 0)
        self.progress("weights made")

    def progress(self, what: str) -> None:
        if self.parallel.rank == 0:
            print(f"{time.monotonic() - self.began:.0f} s: {what}", flush=True)

    def draft(self, num_steps: int) -> Any:
        import torch

        from slipstream.engine.drafts.eagle3.network import Eagle3Network
        from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer

        with torch.device(DEVICE):
            network = Eagle3Network(self.size.draft_config(), torch.bfloat16, self.parallel)
        ids = torch.arange(self.size.draft_vocab_size, device=DEVICE)
        network.d2t.copy_(ids * self.size.vocab_size // self.size.draft_vocab_size - ids)
        return Eagle3Proposer(self._ready(network, 10), num_steps)

    def engine(self, num_steps: int, proposer: Any = None, capture: tuple[int, ...] = (), faults: Any = ()) -> Any:
        """A started engine of one request at a time."""
        from slipstream.engine.agreement import RankAgreement
        from slipstream.engine.config import EngineConfig
        from slipstream.engine.engine import Engine
        from slipstream.engine.inject import inject
        from slipstream.engine.injection import parse_injections

        config = EngineConfig(
            num_steps=num_steps,
            max_running_requests=1,
            max_context_tokens=512,
            prefill_chunk_tokens=128,
            device=DEVICE,
        )
        engine = Engine(self.target, config, proposer, capture, RankAgreement(self.parallel))
        inject(engine, parse_injections(faults))
        engine.start()
        self.progress(f"K = {num_steps} ready: {engine.steps.describe()}")
        return engine

    def _ready(self, model: Any, seed: int) -> Any:
        from slipstream.engine.bench.sizes import _fill
        from slipstream.engine.packed_weights import pack_for_device

        _fill(model, seed + self.parallel.rank)
        pack_for_device(model, DEVICE)
        return model.requires_grad_(False).eval()


def engine_part(parallel: Any) -> None:
    from slipstream.engine.bench.generate import time_generate

    engines, tell = Engines(parallel), parallel.rank == 0
    for num_steps, new_tokens in ((0, 256), (3, 128)):
        engine = engines.engine(num_steps, engines.draft(num_steps) if num_steps else None)
        timing = time_generate(engine, 1, new_tokens=16 if REHEARSE else new_tokens, repeats=1 if REHEARSE else 3)
        parts = timing.parts
        if tell:
            where = f"draft {parts.draft:.3f}, verify {parts.verify:.3f}, rest {parts.rest:.3f}, host {parts.host:.3f}"
            print(f"K = {num_steps}: {timing.ms:.3f} ms, spread {timing.spread:.1%}: {where}", flush=True)
            if num_steps:
                say(rows=[row("llama8b-round", timing.ms, "ms a round, wall", k=num_steps)])
            else:
                say(rows=[row("llama8b-step", timing.ms, "ms a step, wall", STEP_GOAL_MS)])
                say(rows=[row("llama8b-step on the device", parts.verify, "ms a step")])
        del engine
    killed(engines, bent(engines))


def bent(engines: Engines) -> Any:
    """F5 and F6 in a slot: tokens stay, the slot does not. Hands out an engine; the target stays bent by F5's hook."""
    import torch

    from slipstream.engine.bench.generate import prompts_of
    from slipstream.engine.sampling_params import SamplingParams

    params, answers, engine = SamplingParams(max_tokens=12, ignore_eos=True), {}, None
    forward = engines.target.forward
    for name, faults in (("right", ()), ("F6", ("F6:slot=2",)), ("F5", ("F5:slot=2",))):
        engine = engines.engine(0, None, (2, 3), faults)
        (answers[name],) = engine.generate(prompts_of(engine, 1, 40), params, trace=True)
        engines.target.forward = forward
    right = answers["right"]
    for name in ("F5", "F6"):
        states = answers[name].trace.states
        differs = {slot: not torch.equal(state, states[slot]) for slot, state in right.trace.states.items()}
        tokens = sum(a != b for a, b in zip(right.token_ids, answers[name].token_ids, strict=True))
        if engines.parallel.rank == 0:
            unseen = float(not differs["slot_2"])
            say(rows=[row(f"{name} in slot 2: tokens that differ", float(tokens), "count", 0.0)])
            say(rows=[row(f"{name} in slot 2: slot 2 is as it was", unseen, "count", 0.0)])
            say(rows=[row(f"{name} in slot 2: slot 3 differs", float(differs["slot_3"]), "count", 0.0)])
    return engine


def killed(engines: Engines, engine: Any) -> None:
    """Generates until a rank is killed."""
    from slipstream.engine.bench.generate import prompts_of
    from slipstream.engine.card_group import check_peers
    from slipstream.engine.rank_group import CARD_SECONDS
    from slipstream.engine.sampling_params import SamplingParams

    if engines.parallel.card is not None:
        with engine.steps.context():
            engines.parallel.card.be_patient(CARD_SECONDS)
    if engines.parallel.rank == 0:
        say(state=KILL_ME)
    while True:
        engine.generate(prompts_of(engine, 1, 40), SamplingParams(max_tokens=400, ignore_eos=True))
        check_peers(engines.parallel)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))

"""Time of sampling and of the round ops on a GPU, as a CUDA graph of many calls in a row: python sampling_bench.py

One row a case: microseconds a call (median of 20 replays, and their spread), and bytes of logits read a second. The
logits lie in the L2 cache, as they do behind the language model's head that has just written them.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from slipstream.kernels.round_ops import commit_round, draft_rows, verify_rows
from slipstream.kernels.round_ring import RoundRing
from slipstream.kernels.sampling import SamplingBatch, propose_tokens, sample

_CALLS = 50  # a graph


def time_graph(call: Callable[[], object]) -> tuple[float, float]:
    """(microseconds a call, spread of the replays) of a graph of many calls."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(20):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1000 / _CALLS)
    return statistics.median(times), max(times) - min(times)


def parameters(batch: int, temperature: float, top_k: int, top_p: float) -> SamplingBatch:
    with torch.device("cuda"):
        return SamplingBatch(
            temperature=torch.full((batch,), temperature),
            top_k=torch.full((batch,), top_k),
            top_p=torch.full((batch,), top_p, dtype=torch.float64),
            seed=torch.arange(batch),
            choice=torch.zeros(batch, dtype=torch.int64),
            slots=torch.arange(batch),
        )


def logits_of(batch: int, per_request: int, vocab: int) -> torch.Tensor:
    """Rows as a language model gives them: a broad bulk, and a few hundred tokens far above it."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows = torch.randn(batch, per_request, vocab, generator=generator, device="cuda") * 2.5
    rows[..., :400] += 8 - 0.04 * torch.arange(400, device="cuda")
    return rows.bfloat16()


def report(case: str, made: tuple[float, float], num_bytes: int = 0, **facts: object) -> None:
    row = {"case": case, **facts, "us": round(made[0], 2), "spread_us": round(made[1], 2)}
    if num_bytes:
        row["gb_per_s"] = round(num_bytes / made[0] / 1000)
    print(json.dumps(row), flush=True)


def samplers() -> None:
    for vocab, batch, per_request in (
        (49152, 1, 1), (49152, 1, 4), (49152, 16, 1), (49152, 16, 4), (128256, 1, 1), (128256, 1, 4), (128256, 16, 4),
    ):  # fmt: skip
        logits = logits_of(batch, per_request, vocab)
        positions = torch.arange(batch * per_request, device="cuda").view(batch, per_request)
        for name, temperature, top_k, top_p in (
            ("greedy", 0.0, 0, 1.0),
            ("T 0.8", 0.8, 0, 1.0),
            ("T 0.8 top-p 0.9", 0.8, 0, 0.9),
            ("T 0.8 top-k 50", 0.8, 50, 1.0),
        ):
            call = partial(sample, logits, parameters(batch, temperature, top_k, top_p), positions, 1)
            facts = {"vocab": vocab, "batch": batch, "rows": per_request, "sampling": name}
            report("sample", time_graph(call), logits.numel() * 2, **facts)


def proposers() -> None:
    for vocab, batch in ((32000, 1), (32000, 16), (49152, 1)):
        logits = logits_of(batch, 1, vocab)[:, 0]
        positions, target_ids = torch.arange(batch, device="cuda"), torch.arange(vocab, device="cuda")
        drafts = torch.zeros(batch, 3, dtype=torch.int64, device="cuda")
        for name, temperature in (("greedy", 0.0), ("T 0.8", 0.8)):
            batch_of = parameters(batch, temperature, 0, 1.0)
            call = partial(propose_tokens, logits, batch_of, positions, target_ids, 1, drafts[:, 1])
            facts = {"vocab": vocab, "batch": batch, "sampling": name}
            report("propose", time_graph(call), logits.numel() * 2, **facts)


class Table:
    def __init__(self, batch: int) -> None:
        with torch.device("cuda"):
            self.tokens = torch.zeros(batch + 1, 4096, dtype=torch.int64)
            self.lengths, self.num_fresh = torch.full((batch + 1,), 9), torch.ones(batch + 1, dtype=torch.int64)
            self.limits = torch.full((batch + 1,), 4000)


def rounds() -> None:
    """One table that fills up: a request without room costs the same."""
    for batch in (1, 16, 64):
        table, slots, ring = Table(batch), torch.arange(batch, device="cuda"), RoundRing.allocate(64, batch, 3, "cuda")
        drafts = torch.ones(batch, 3, dtype=torch.int64, device="cuda")
        chosen = torch.ones(batch, 4, dtype=torch.int64, device="cuda")
        rows = verify_rows(table, slots, drafts, 3)
        cases: dict[str, Callable[[], object]] = {
            "draft_rows": partial(draft_rows, table, slots, 3, ring.clock),
            "verify_rows": partial(verify_rows, table, slots, drafts, 3, ring.clock),
            "commit_round": partial(commit_round, table, slots, rows, chosen, ring),
            "commit_round without a ring": partial(commit_round, table, slots, rows, chosen),
        }
        for name, call in cases.items():
            report(name, time_graph(call), batch=batch)


@torch.inference_mode()
def main() -> None:
    began = time.perf_counter()
    samplers()
    proposers()
    rounds()
    print(f"{time.perf_counter() - began:.1f} s in all")


if __name__ == "__main__":
    main()

"""Which tile is fastest for which weight: times the matrix products inside a CUDA graph, weights cold, PDL as served.

    python tests/benchmarks/kernel_sweep.py [smollm2|llama8b] [--seconds 90]

A graph holds a chain of calls of one kernel, each with weights of its own, together more than the L2 cache holds; what
is printed is time a call, so a ramp that hides behind the call before costs nothing. `kernels/gpu/tiles.py` takes the
winners.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from slipstream.kernels.gpu import launch, linear_add, norm_gate_up, norm_linear, norm_qkv
from slipstream.kernels.gpu.tiles import Tile
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Norm, Stream

ROW_COUNTS = (1, 8, 16)
_COLD_BYTES = 256 * 2**20  # weights of one graph: several times the L2 cache


@dataclass(frozen=True)
class Case:
    """One weight of a model: op, its shape [n, k], and heads where the op wants them."""

    model: str
    op: str
    n: int
    k: int
    heads: Heads = field(default_factory=lambda: Heads(0, 0, 0))

    @property
    def paired(self) -> bool:
        return self.op in ("qkv", "gate_up")

    @property
    def num_bytes(self) -> int:
        return 2 * self.n * self.k


CASES = [
    Case("smollm2", "qkv", 960, 576, Heads(9, 3, 64)),
    Case("smollm2", "add", 576, 576),
    Case("smollm2", "gate_up", 3072, 576),
    Case("smollm2", "add", 576, 1536),
    Case("smollm2", "linear", 49152, 576),
    Case("llama8b", "qkv", 6144, 4096, Heads(32, 8, 128)),
    Case("llama8b", "add", 4096, 4096),
    Case("llama8b", "gate_up", 28672, 4096),
    Case("llama8b", "add", 4096, 14336),
    Case("llama8b", "linear", 128256, 4096),
]


def candidates(case: Case) -> list[Tile]:
    """At most 12 tiles that may suit the case."""
    if case.model == "smollm2":
        tiles = [(16, 4), (16, 8), (16, 2), (32, 4), (32, 8)]
        if case.op == "linear":
            tiles += [(64, 4), (64, 8)]
        resident = [Tile(block_n=n, warps=w, split=w) for n, w in tiles]
        resident += [Tile(block_n=n, split=0) for n in (4, 8)]
        if case.op == "linear":
            resident += [Tile(block_n=n, block_k=64, stages=s, prefetch=512) for n, s in ((32, 8), (64, 6))]
        return resident
    if case.paired:
        cuts = [(16, 128, 6), (16, 256, 4), (16, 256, 6), (16, 512, 4), (32, 128, 5), (32, 128, 8), (32, 256, 4)]
    else:
        cuts = [(16, 256, 5), (16, 512, 5), (32, 128, 6), (32, 256, 4), (32, 256, 6), (32, 512, 4), (64, 128, 6)]
    tiles = [Tile(n, k, stages=s, prefetch=512, max_block_m=64, norm_apart_from=32) for n, k, s in cuts]
    n, k, s = cuts[2]
    return [*tiles, *(Tile(n, k, stages=s, prefetch=p, max_block_m=64, norm_apart_from=32) for p in (0, 1024, 2048))]


def call_of(case: Case, m: int, device: str, weight_of: Callable[[int], torch.Tensor]) -> Callable[[int], None]:
    """A function that launches the case's kernel with m rows on the weight number i."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    parts = empty(m, 128, dtype=torch.float32) if case.k > 2048 else None
    stream = Stream(empty(m, case.k), parts)
    norm = Norm(empty(case.k), 1e-5)
    heads = case.heads
    sink = KVSink(empty(64, 16, 2, max(1, heads.kv), max(1, heads.dim)), empty(m, dtype=torch.int64))
    angles = empty(m, heads.dim)
    residual = Stream(empty(m, case.n if case.op == "add" else 1))
    ops: dict[str, Callable[[int], Any]] = {
        "qkv": lambda i: norm_qkv.norm_qkv(stream, norm, weight_of(i), heads, angles, angles, None, None, sink),
        "add": lambda i: linear_add.linear_add(stream.rows, weight_of(i), residual),
        "gate_up": lambda i: norm_gate_up.norm_gate_up(stream, norm, weight_of(i)),
        "linear": lambda i: norm_linear.norm_linear(stream, norm, weight_of(i)),
    }
    return ops[case.op]


def use(tile: Tile) -> None:
    """All products take this tile."""
    for module in (norm_qkv, norm_gate_up, norm_linear, linear_add):
        module.tile_for = lambda *shape, paired=False: tile  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Warmed:
    """A kernel whose launches only compile it."""

    kernel: Any

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.kernel.warmup, grid=grid)


def compile_one(case: Case, tile: Tile, m: int) -> None:
    """In a process of its own: put the compiled kernel into Triton's cache on disk."""
    launch._run = lambda kernel, *rest: launch._launch_now(Warmed(kernel), *rest)
    use(tile)
    with torch.no_grad():
        call_of(case, m, "meta", lambda i: torch.empty(case.n, case.k, dtype=torch.bfloat16, device="meta"))(0)


def compile_all(jobs: list[tuple[Case, Tile, int]], workers: int) -> None:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(compile_one, *job): job for job in jobs}
        for done in as_completed(waiting):
            if done.exception() is not None:
                case, tile, m = waiting[done]
                reason = str(done.exception()).splitlines()[-1:]
                print(f"does not compile: {case.op} {case.n} x {case.k}, {m} rows, {short(tile)}: {reason}", flush=True)


def short(tile: Tile) -> str:
    text = f"n={tile.block_n} warps={tile.warps}" if tile.split else f"n={tile.block_n} row by row"
    return text if not tile.block_k else f"{text} k={tile.block_k} stages={tile.stages} prefetch={tile.prefetch}"


def time_call(call: Callable[[int], None], num_calls: int, repeats: int = 5) -> float:
    """Microseconds of one call within a graph of `num_calls`: the median of `repeats`."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_calls):
            call(i)
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / num_calls)
    return sorted(times)[repeats // 2]


def sweep(model: str | None = None, seconds: float = 90, workers: int | None = None) -> None:
    """Print microseconds and TB/s of every case, tile and row count, then the best tile of each case.

    Args:
        model: smollm2, llama8b; None: both.
        seconds: no further case is begun after that.
        workers: processes that compile; None: one a core.
    """
    begun = time.monotonic()
    cases = [case for case in CASES if model in (None, case.model)]
    jobs = [(case, tile, m) for case in cases for tile in candidates(case) for m in (8, 16)]
    compile_all(jobs, workers or min(16, os.cpu_count() or 1))
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - begun:.0f} s", flush=True)
    longest = max(max(2 * case.num_bytes, _COLD_BYTES) for case in cases)
    buffer = torch.empty(longest // 2, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
    for case in cases:
        if time.monotonic() - begun > seconds:
            print(f"time is up: {case.model} {case.op} {case.n} x {case.k} and all behind it are left", flush=True)
            return
        best = min(timings(case, buffer), default=None, key=lambda row: sum(row[1]))
        if best is not None:
            print(f"  best: {short(best[0])}", flush=True)


def timings(case: Case, buffer: torch.Tensor) -> Iterator[tuple[Tile, list[float]]]:
    """(tile, microseconds by row count) of the case's tiles that run; each is printed."""
    print(f"{case.model} {case.op} {case.n} x {case.k}: us and TB/s at {ROW_COUNTS} rows")
    size = case.n * case.k
    num_weights = buffer.numel() // size
    num_calls = max(4, min(num_weights, 64))

    def weight_of(i: int) -> torch.Tensor:
        start = i % num_weights * size
        return buffer[start : start + size].view(case.n, case.k)  # -> [n, k]

    for tile in candidates(case):
        use(tile)
        try:
            with torch.no_grad():
                times = [time_call(call_of(case, m, "cuda", weight_of), num_calls) for m in ROW_COUNTS]
        except Exception as error:
            print(f"  {short(tile)}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
            continue
        shown = "  ".join(f"{t:7.2f} us {case.num_bytes / t / 1e6:5.2f}" for t in times)
        print(f"  {short(tile):42} {shown}", flush=True)
        yield tile, times


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", choices=["smollm2", "llama8b"])
    parser.add_argument("--seconds", type=float, default=90)
    arguments = parser.parse_args()
    sweep(arguments.model, arguments.seconds)

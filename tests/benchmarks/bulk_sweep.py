"""How kernels of bulk copies hand the memory over: every number of it tried on one GPU, then whole engines.

    python -P tests/benchmarks/bulk_sweep.py [--seconds 55]

Llama-3.1-8B sizes in one CUDA graph, the products alone and with attention over a table of 2048 tokens, 300 of them
held. Every setting's bits are compared with those of the kernels without bulk copies.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from cold_graphs import seconds_per_replay
from skinny_gemm_bench import Chain

from slipstream.engine.bench.generate import time_generate
from slipstream.engine.bench.sizes import SIZES, random_draft, random_target
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.kernels.cuda import launch, skinny_gemm
from slipstream.kernels.cuda.launch import Epilogue, Flow, Params
from slipstream.kernels.gpu import paged_attention as attention
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Stream

HELD, TABLE, BLOCK = 300, 2048, 16
LAYERS, HIDDEN, HEADS, INNER, VOCABULARY = 32, 4096, Heads(32, 8, 128), 14336, 128256
began = time.monotonic()


@dataclass(frozen=True)
class Setting:
    """Flow's numbers, and KB of the two rings (0: all as the small one).

    out_ahead, out_ahead_behind: of the product behind attention. out_next: what queries, keys and values bring of it.
    """

    left: int = 128
    fixed: int = 2
    read_together: bool = True
    large: int = 140
    small: int = 80
    ahead: int = 0
    ahead_behind: int = 0
    out_ahead: int = 64
    out_ahead_behind: int = 0
    next: int = 0
    out_next: int = 0

    def flow(self, epilogue: Epilogue, params: Params) -> Flow:
        out = launch.behind_attention(epilogue, params)
        return Flow(
            left=self.left,
            ahead=self.out_ahead if out else self.ahead,
            ahead_behind=self.out_ahead_behind if out else self.ahead_behind,
            fixed=self.fixed,
            next=self.out_next if epilogue is Epilogue.QKV else self.next,
            read_together=self.read_together,
        )

    def __str__(self) -> str:
        default = Setting()
        return " ".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)) or "default"


BEFORE = Setting(left=64, fixed=1000, read_together=False, large=0)  # but for 132 CTAs where 128 did
NO_BULK = Setting(small=0, large=0)


@contextlib.contextmanager
def using(setting: Setting) -> Iterator[None]:
    """Launches go as `setting` says."""
    flow, device = launch.flow, launch._device
    card = dataclasses.replace(device(0), bulk_bytes=setting.small << 10, large_bytes=setting.large << 10)
    launch.flow, launch._device = setting.flow, lambda _: card  # type: ignore[assignment]
    try:
        yield
    finally:
        launch.flow, launch._device = flow, device


class Decoder(Chain):
    """The chain of products, and with attention between."""

    def __init__(self) -> None:
        super().__init__(LAYERS, HIDDEN, HEADS, INNER, VOCABULARY)
        self.weights = [weight for layer in self.packed for weight in layer]
        for weight, after in itertools.pairwise([*self.weights, self.weights[0]]):
            weight.next = after
        del self.plain
        blocks = TABLE // BLOCK
        shape = (blocks + 1, BLOCK, 2, HEADS.kv, HEADS.dim)
        self.caches = [torch.randn(shape, device="cuda").bfloat16() for _ in self.packed[:-1]]
        self.table = 1 + torch.randperm(blocks, device="cuda")[None]  # [1, blocks]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """x: rows of one request, [M, hidden] -> logits, [M, vocab]."""
        rows = x.shape[0]
        at = HELD + torch.arange(rows, device="cuda")
        cells = self.table[0, at // BLOCK] * BLOCK + at % BLOCK
        cos, sin = self.cos[:rows], self.sin[:rows]
        stream = Stream(x, x.float().square().unflatten(-1, (-1, 16)).sum(-1))  # [M, hidden] -> [M, hidden / 16]
        *layers, (head,) = self.packed
        for (qkv, out, gate_up, down), cache in zip(layers, self.caches, strict=True):
            q, _, _ = skinny_gemm.norm_qkv(stream, self.norm, qkv, self.heads, cos, sin, sink=KVSink(cache, cells))
            mixed = attention.paged_attention(q[None], cache, self.table, at[None], HEADS.dim**-0.5)[0]
            stream = skinny_gemm.linear_add(mixed.flatten(1), out, stream)  # [M, q, d] -> [M, q d]
            inner = skinny_gemm.norm_gate_up(stream, self.norm, gate_up)
            stream = skinny_gemm.linear_add(inner, down, stream)
        return skinny_gemm.norm_linear(stream, self.norm, head)


class Search:
    """Times settings and checks their bits."""

    def __init__(self, name: str, run: Callable[[], torch.Tensor], counters: Callable[[], int]) -> None:
        self.name, self.run, self.counters = name, run, counters
        self.times: dict[Setting, float] = {}
        with using(NO_BULK):
            self.expected = run()

    def ms(self, setting: Setting, again: bool = False) -> float:
        if again or setting not in self.times:
            with using(setting):
                same = self.run().equal(self.expected)
                ms = seconds_per_replay(self.run, 9) * 1e3
            wrong = ("" if same else " OTHER BITS") + (" COUNTERS" if self.counters() else "")
            self.times[setting] = min(ms, self.times.get(setting, ms))
            print(f"{self.name} {ms:.4f} {setting}{' again' if again else ''}{wrong}", flush=True)
        return self.times[setting]

    def best(self) -> Setting:
        return min(self.times, key=self.times.__getitem__)

    def all(self, attend: bool) -> Setting:
        """One change at a time to the best so far."""
        self.ms(Setting())
        self.ms(BEFORE)
        groups: list[tuple[dict[str, Any], ...]] = [
            ({"read_together": False},),
            *([tuple({"out_next": kb, "out_ahead": a} for kb in (64, 128, 256) for a in (64, 0))] if attend else []),
            tuple({"next": kb} for kb in (32, 64, 96, 128, 192)),
            tuple({"ahead_behind": kb, "out_ahead_behind": kb} for kb in (32, 64, 128, 192)),
            ({"out_ahead": 0}, {"out_ahead": 0, "out_ahead_behind": 64}, {"out_ahead": 0, "out_ahead_behind": 128}),
            tuple({"left": kb} for kb in (64, 96, 192, 256)),
            ({"fixed": 1}, {"fixed": 3}),
            ({"large": 80, "small": 140}, {"large": 132, "small": 90}, {"large": 140, "small": 64}, {"large": 116}),
            tuple({"next": kb} for kb in (0, 48, 96, 160)),
            *([tuple({"out_next": kb} for kb in (0, 96, 192))] if attend else []),
        ]
        for group in groups:
            best = self.best()
            for change in group:
                self.ms(replace(best, **change))
        best = self.best()
        for setting in (Setting(), best, BEFORE):
            self.ms(setting, again=True)
        for setting in sorted(self.times, key=self.times.__getitem__)[:3]:
            print(f"{self.name} best {self.times[setting]:.4f} {setting}", flush=True)
        return best


def engines(settings: list[tuple[str, Setting]], seconds: float) -> None:
    """Whole steps and rounds of one request."""
    for name, steps in (("llama8b", (0, 3, 5)), ("smollm2", (0, 3))):
        target, draft = random_target(SIZES[name], "cuda"), random_draft(SIZES[name], "cuda")
        for num_steps in steps:
            for words, setting in settings:
                if time.monotonic() - began > seconds:
                    print("no time left", flush=True)
                    return
                with using(setting):
                    config = EngineConfig(
                        num_steps=num_steps, max_running_requests=1, max_context_tokens=512, device="cuda"
                    )
                    engine = Engine(target, config, Eagle3Proposer(draft, num_steps) if num_steps else None)
                    engine.start()
                    timing = time_generate(engine, 1, 128, 128, 2)
                p = timing.parts
                print(
                    f"{name} K={num_steps} {timing.ms:.3f} ms ({p.draft:.3f} draft {p.verify:.3f} verify {p.rest:.3f}"
                    f" rest) {words}, after {time.monotonic() - began:.0f} s",
                    flush=True,
                )
                del engine
        del target, draft
        gc.collect()
        torch.cuda.empty_cache()


def products() -> dict[bool, Setting]:
    """The best setting of steps with attention and of the products alone."""
    decoder = Decoder()
    print(f"{torch.cuda.get_device_name()}: loaded after {time.monotonic() - began:.1f} s", flush=True)

    def counters() -> int:
        return int(torch.cat([weight.counter for weight in decoder.weights]).abs().sum())

    def step(x: torch.Tensor) -> torch.Tensor:
        return decoder.step(x)

    def alone(x: torch.Tensor) -> torch.Tensor:
        return decoder.forward(x, skinny_gemm)

    best: dict[bool, Setting] = {}
    for attend, run in ((True, step), (False, alone)):
        x = torch.randn(1, HIDDEN, device="cuda").bfloat16()
        search = Search(f"{'step' if attend else 'products'} M=1", functools.partial(run, x), counters)
        best[attend] = search.all(attend)
        print(f"{search.name} done after {time.monotonic() - began:.1f} s", flush=True)
    for rows in (4, 8):
        x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        search = Search(f"step M={rows}", functools.partial(step, x), counters)
        for setting in dict.fromkeys((Setting(), best[True], best[False], BEFORE)):
            search.ms(setting)
        search.ms(replace(best[True], read_together=not best[True].read_together))
        search.ms(Setting(), again=True)
    return best


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=55)
    seconds = parser.parse_args().seconds
    launch.load(torch.cuda.current_device())
    best = products()
    gc.collect()
    torch.cuda.empty_cache()
    engines([("default", Setting()), ("best", best[True]), ("before", BEFORE)], seconds)
    print(f"done after {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()

"""Searches for how kernels of a decoder step should hand the memory over from one to the next, on one GPU:

    python tests/benchmarks/seam_bench.py [--seconds 105]

Llama-3.1-8B sizes in one CUDA graph, first the products alone, then with attention over a table of 2048 tokens, 300 of
them held. Every setting gives the same bits, which is checked. Then steps of the whole engine, as it is and with
the best setting. One line a setting; times are the median of graph replays.
"""

import argparse
import gc
import itertools
import time
from dataclasses import dataclass, replace

import torch
from skinny_gemm_bench import Chain, seconds_per_replay

from slipstream.engine.bench.generate import time_generate
from slipstream.engine.bench.sizes import SIZES, random_draft, random_target
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.kernels.cuda import launch, skinny_gemm
from slipstream.kernels.cuda.launch import Epilogue, Flow
from slipstream.kernels.gpu import attention_split as split
from slipstream.kernels.gpu import paged_attention as attention
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Stream

HELD, TABLE, BLOCK = 300, 2048, 16
LONGEST_RING = 113 << 10
_DEVICE, _CUT, _TILE = launch._device, attention.usual_cut, split._TILES[128]


@dataclass(frozen=True)
class Setting:
    """left, ahead, keep: of all products (launch.Flow); qkv_left and out_ahead: of those next to attention instead.

    ring: KB of a CTA. registers: of an attention thread, at most. start: when attention lets the next kernel start:
    "first", when its "keys" are asked for, or after its "wait".
    """

    left: int | None = None
    ahead: int = 0
    keep: bool = False
    ring: int = 80
    qkv_left: int | None = None
    out_ahead: int = 0
    registers: int | None = None
    start: str = "first"

    def apply(self) -> None:
        """Until the next setting, every launch is one of this."""

        def flow(epilogue: Epilogue, width: int) -> Flow:
            left = self.qkv_left if epilogue is Epilogue.QKV else self.left
            ahead = self.out_ahead if epilogue is Epilogue.ADD and width == 4096 else self.ahead
            return Flow(left, ahead, self.keep)

        launch.flow = flow
        launch.MIN_SLOTS = 2  # short rings, too
        launch._device = lambda device: replace(_DEVICE(device), bulk_bytes=self.ring << 10)
        split._TILES[128] = replace(_TILE, registers=self.registers)
        attention.usual_cut = lambda batch: replace(
            _CUT(batch), settles=self.start == "wait", keys_first=self.start == "keys"
        )

    def __str__(self) -> str:
        default = Setting()
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        return " ".join(f"{k}={v}" for k, v in changed.items()) or "as it was"


class Decoder(Chain):
    """The chain of products, and with attention between."""

    def __init__(self) -> None:
        super().__init__(32, 4096, Heads(32, 8, 128), 14336, 128256)
        blocks = TABLE // BLOCK
        self.caches = [torch.randn(blocks + 1, BLOCK, 2, 8, 128, device="cuda").bfloat16() for _ in self.packed[:-1]]
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
            mixed = attention.paged_attention(q[None], cache, self.table, at[None], 128**-0.5)[0]
            stream = skinny_gemm.linear_add(mixed.flatten(1), out, stream)  # [M, q, d] -> [M, q d]
            inner = skinny_gemm.norm_gate_up(stream, self.norm, gate_up)
            stream = skinny_gemm.linear_add(inner, down, stream)
        return skinny_gemm.norm_linear(stream, self.norm, head)


class Search:
    """Times settings and compares their bits with those of the first one."""

    def __init__(self, decoder: Decoder, rows: int, attend: bool) -> None:
        x = torch.randn(rows, 4096, device="cuda").bfloat16()
        self.work = lambda: decoder.step(x) if attend else decoder.forward(x, skinny_gemm)
        self.name = f"{'step' if attend else 'products'} M={rows}"
        self.times: dict[Setting, float] = {}
        Setting().apply()
        self.expected = self.work()

    def ms(self, setting: Setting, tell: bool = True) -> float:
        if setting not in self.times:
            setting.apply()
            same = self.work().equal(self.expected)
            self.times[setting] = seconds_per_replay(self.work, 9) * 1e3
            if tell or not same:
                print(f"{self.name} {self.times[setting]:.4f} {setting}{'' if same else ' OTHER BITS'}", flush=True)
        return self.times[setting]

    def best(self) -> Setting:
        return min(self.times, key=self.times.__getitem__)


def products(decoder: Decoder) -> Setting:
    """The best of the products alone, one parameter after the other."""
    search = Search(decoder, 1, attend=False)

    def lefts(setting: Setting) -> None:
        for left in (None, 128, 64, 32, 16, 0):
            search.ms(replace(setting, left=left, qkv_left=left))

    lefts(Setting())
    best = search.best()
    for ahead, keep in itertools.product((32, 64, 128, 256), (False, True)):
        search.ms(replace(best, ahead=ahead, out_ahead=ahead, keep=keep))
    search.ms(Setting(ahead=64, out_ahead=64))  # the next kernel at once, as before
    best = search.best()
    for ring in (48, 64, 104, 113):
        search.ms(replace(best, ring=ring))
    lefts(search.best())
    return search.best()


def step(decoder: Decoder, best: Setting) -> Setting:
    """The best with attention, given that of the products: all combinations of what stands beside it."""
    search = Search(decoder, 1, attend=True)
    search.ms(Setting())
    search.ms(best)
    search.ms(replace(best, qkv_left=None))
    tried: dict[str, tuple[object, ...]] = {
        "registers": (None, 224),
        "qkv_left": (None, 64, 16),
        "start": ("first", "keys", "wait"),
        "out_ahead": (0, 64, 128, 192),
    }
    for values in itertools.product(*tried.values()):
        search.ms(replace(best, **dict(zip(tried, values, strict=True))), tell=False)
    for name, values in tried.items():
        least = {v: min(ms for s, ms in search.times.items() if getattr(s, name) == v) for v in values}
        print(f"{search.name} least by {name}: " + ", ".join(f"{v} {ms:.4f}" for v, ms in least.items()), flush=True)
    best = search.best()
    for changed in (
        {"registers": 192},
        {"left": None},
        {"left": 0},
        {"left": 32},
        {"left": 64},
        {"ahead": 0},
        {"ahead": 64},
        {"ring": 80},
        {"keep": not best.keep},
    ):
        search.ms(replace(best, **changed))  # type: ignore[arg-type]
    for setting in sorted(search.times, key=search.times.__getitem__)[:4]:
        print(f"{search.name} best: {search.times[setting]:.4f} {setting}", flush=True)
    best = search.best()
    for rows in (4, 8):
        other = Search(decoder, rows, attend=True)
        for setting in (Setting(), best):
            other.ms(setting)
    return best


def engines(best: Setting, began: float, seconds: float) -> None:
    models: dict[str, object] = {}
    for name, num_steps, setting in (
        ("llama8b", 0, best),
        ("llama8b", 3, best),
        ("llama8b", 0, Setting()),
        ("llama8b", 3, Setting()),
        ("smollm2", 0, best),
        ("smollm2", 3, best),
        ("smollm2", 0, Setting()),
    ):
        if time.monotonic() - began > seconds - (12 if name == "llama8b" else 6):
            print(f"engine {name} K={num_steps} {setting}: no time left", flush=True)
            continue
        if name not in models:
            models.clear()
            gc.collect()
            torch.cuda.empty_cache()
            models[name] = (random_target(SIZES[name]), random_draft(SIZES[name]))
        target, draft = models[name]  # type: ignore[misc]
        setting.apply()
        config = EngineConfig(num_steps=num_steps, max_running_requests=1, max_context_tokens=TABLE, device="cuda")
        engine = Engine(target, config, Eagle3Proposer(draft, num_steps) if num_steps else None)
        engine.start()
        timing = time_generate(engine, 1, repeats=2)
        spent = time.monotonic() - began
        print(
            f"engine {name} K={num_steps} {timing.ms:.4f} ms, spread {timing.spread:.1%}, {setting} [{spent:.0f} s]",
            flush=True,
        )
        del engine
        gc.collect()
        torch.cuda.empty_cache()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=105)
    seconds = parser.parse_args().seconds
    began = time.monotonic()
    launch._device = lambda device: replace(_DEVICE(device), bulk_bytes=LONGEST_RING)
    launch.load(torch.cuda.current_device())  # room for every ring
    print(f"{torch.cuda.get_device_name()}: loaded in {time.monotonic() - began:.1f} s", flush=True)
    decoder = Decoder()
    print(f"weights after {time.monotonic() - began:.1f} s", flush=True)
    best = products(decoder)
    print(f"products done after {time.monotonic() - began:.1f} s", flush=True)
    best = step(decoder, best)
    print(f"step done after {time.monotonic() - began:.1f} s", flush=True)
    del decoder
    gc.collect()
    torch.cuda.empty_cache()
    engines(best, began, seconds)


if __name__ == "__main__":
    main()

"""Times the CUDA C++ products of prompts by wgmma beside the other kernels. By hand, on a GPU:

    python tests/benchmarks/prompt_bench.py [--engine]

First bits: every way of sharing, against the kernels for few rows. Then each product of 8B sizes with TFLOP/s, layers
of 8B and SmolLM2 sizes, and the engine's prefill of 16 prompts of 128 tokens. w2: two CTAs share the weights.
"""

import argparse
import contextlib
import functools
import gc
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import many_rows_bench as small
import skinny_gemm_bench as bench
import torch
import wide_gemm_bench as wide
from torch.autograd import DeviceType

from slipstream.engine.bench.generate import prompts_of
from slipstream.engine.bench.sizes import LLAMA_8B, random_target
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.cuda import build, launch, prompt_launch
from slipstream.kernels.cuda.launch import Epilogue, Override
from slipstream.kernels.cuda.prompt_launch import Sharing
from slipstream.kernels.norm_qkv import Heads

LAYER = (("qkv", 6144, 4096), ("add", 4096, 4096), ("gate_up", 28672, 4096), ("add", 4096, 14336))
SMALL = (("qkv", 960, 576), ("add", 576, 576), ("gate_up", 3072, 576), ("add", 576, 1536), ("store", 960, 576))
ODD = (("add", 1048, 2336), ("gate_up", 720, 2080), ("store", 1000, 96))  # parts of unequal length
SHARINGS = (Sharing(), Sharing(weights=2))
SKINNY, OLD = Override(wide=False, prompt=False), Override(prompt=False)
began = time.monotonic()
usual = prompt_launch.choose
_doing: list[tuple[float, str]] = []


def watch() -> None:
    """Ends the process if a kernel does not come back."""
    while True:
        time.sleep(0.5)
        since, what = _doing[-1] if _doing else (0.0, "")
        if what and time.monotonic() - since > 8:
            print(f"STUCK in {what}", flush=True)
            os._exit(3)


def said(words: str) -> None:
    print(f"[{time.monotonic() - began:4.1f} s] {words}", flush=True)


def name(sharing: Sharing) -> str:
    return f"w{sharing.weights}"


@contextlib.contextmanager
def chosen(choose: Callable[..., Sharing | None]) -> Iterator[None]:
    """Products by this rule."""
    prompt_launch.choose = choose
    try:
        yield
    finally:
        prompt_launch.choose = usual


def check(product: wide.Product) -> int:
    """Bits of every way of sharing; how many differ."""
    compared, wrong = 0, []
    for rows in (29, 130, 257, 1000, 2048):
        expected = product.run(rows, SKINNY)
        for i, sharing in enumerate(SHARINGS):
            _doing[:] = [(time.monotonic(), f"{product.op} {product.n} x {product.k}, {rows} rows, {name(sharing)}")]
            for again in range(2):
                found = product.run(rows, Override(prompt=sharing, pdl=(i + again) % 2 == 0))
                torch.cuda.synchronize()
                compared += 1
                if not all(a.equal(b) for a, b in zip(found, expected, strict=True)):
                    wrong.append(f"{rows} {name(sharing)}")
    _doing.clear()
    words = f"OTHER BITS {len(wrong)}: {list(dict.fromkeys(wrong))}" if wrong else "all bits equal"
    said(f"{product.op} {product.n} x {product.k}: {compared} compared, {words}")
    return len(wrong)


def shapes(product: wide.Product, rows: int, *, plain: bool) -> None:
    flop = 2 * rows * product.n * product.k

    def tell(override: Override) -> str:
        us = bench.seconds_per_replay(lambda: product.run(rows, override), 3) * 1e6
        return f"{us:.1f} ({flop / us / 1e6:.0f})"

    line = [f"old {tell(OLD)}"] + [f"{name(s)} {tell(Override(prompt=s))}" for s in SHARINGS]
    if plain:
        weight = torch.empty(product.n, product.k, dtype=torch.bfloat16, device="cuda").normal_()
        x, out = product.x[:rows], torch.empty(rows, product.n, dtype=torch.bfloat16, device="cuda")
        us = bench.seconds_per_replay(lambda: torch.mm(x, weight.T, out=out), 3) * 1e6
        line.append(f"cuBLAS {us:.1f} ({flop / us / 1e6:.0f})")
    said(f"{product.op:7} {product.n:5}x{product.k:<5} M={rows:<4} us (TFLOP/s): " + " | ".join(line))


RULES: dict[str, Callable[..., Sharing | None]] = {
    "old": lambda *_: None,
    "in force": usual,
    "w1": lambda *_: Sharing(),
    "w2": lambda *_: Sharing(weights=2),
}


def by_rule(run: Callable[[], Any]) -> dict[str, float]:
    """Seconds by each rule."""
    times = {}
    for words, rule in RULES.items():
        with chosen(rule):
            times[words] = bench.seconds_per_replay(run, 3)
    return times


def layers(products: list[wide.Product]) -> None:
    """A prompt of a model without attention and head: a layer's products, 32 times."""
    for rows in (128, 256, 512, 1024, 2048):
        run = [functools.partial(product.run, rows, Override()) for product in products]
        times = by_rule(lambda run=run: [one() for one in run])
        said(f"8B, 32 layers of {rows} rows, ms: " + " | ".join(f"{n} {s * 32e3:.2f}" for n, s in times.items()))


def small_layers() -> None:
    chain = small.ManyRows(2048)
    inner = torch.randn(2048, small.INNER, device="cuda").bfloat16()
    for rows in (2048, 1024, 512, 256):
        expected = chain.layers(rows, SKINNY)
        for rule in RULES.values():
            with chosen(rule):
                assert chain.layers(rows).equal(expected)
        works = {"layer": lambda rows=rows: chain.layers(rows)}
        for product in small.PRODUCTS.values():
            works[product] = functools.partial(small.one_product, chain, product, rows, inner, Override())
        line = []
        for words, work in works.items():
            us = [f"{seconds / small.LAYERS * 1e6:.1f}" for seconds in by_rule(work).values()]
            line.append(f"{words} {' / '.join(us)}")
        said(f"SmolLM2, {rows} rows, us, {' / '.join(RULES)}: " + " | ".join(line))


def engine() -> None:
    """The public call with one token each: the prefill of 16 prompts of 128 tokens, whole and by kernel."""
    target, answers = random_target(LLAMA_8B, "cuda"), []
    for words in ("in force", "old"):
        with chosen(RULES[words]):
            config = EngineConfig(num_steps=0, max_running_requests=16, max_context_tokens=512, device="cuda")
            made = Engine(target, config, None)
            made.start()
            prompts, times = prompts_of(made, 16, 128), []
            for tokens in (1, 1, 1, 1, 24):
                start = time.perf_counter()
                params = SamplingParams(max_tokens=tokens, ignore_eos=True)
                answers.append([answer.token_ids for answer in made.generate(prompts, params)])
                times.append(f"{(time.perf_counter() - start) * 1e3:.1f}")
            same = "equal" if answers[-1] == answers[4] else "DIFFER"
            said(f"engine, 16 x 128 tokens in, 1 out, ms, {words}: {' '.join(times[:4])}; 24 tokens {same}")
            parts(made, prompts)
            del made
            gc.collect()


def parts(made: Engine, prompts: list[list[int]]) -> None:
    """Kernels of one call, us from the end of the one before, and what of the call's time has none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        made.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
        torch.cuda.synchronize()
        whole = (time.perf_counter() - start) * 1e3
    spans = sorted((e.time_range.end, e.time_range.start, e.name) for e in profiler.events() if on_card(e))
    times: dict[str, list[float]] = defaultdict(list)
    for before, (end, start_us, kernel) in zip([spans[0][1], *(end for end, *_ in spans)], spans, strict=False):
        times[kernel].append(min(end - before, 2 * (end - start_us)))  # without the host's gaps
    line = [
        f"{n[:26]} {len(us)} x {sum(us) / len(us):.1f}" for n, us in sorted(times.items(), key=lambda x: -sum(x[1]))
    ]
    device = (spans[-1][0] - spans[0][1]) / 1e3
    said(f"profiled: call {whole:.1f} ms, first kernel to last {device:.1f} ms, us: " + " | ".join(line))


def on_card(event: Any) -> bool:
    return event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", action="store_true", help="only its prefill")
    args = parser.parse_args()
    threading.Thread(target=watch, daemon=True).start()
    every = (build._skinny, build.wide, build.prompt)
    build.compiled(launch.capability(), [of(int(e)) for of in every for e in Epilogue])  # all at once
    launch.load(torch.cuda.current_device())
    device = prompt_launch._device(torch.cuda.current_device())
    said("loaded; clusters " + ", ".join(f"{n}: {device.clusters(n)}" for n in (1, 2)))
    if args.engine:
        engine()
        return
    wide.ROWS, wide.COLD_BYTES = (2048,), 0  # rows of x; one weight each
    wide.HEADS = Heads(9, 3, 64)
    wrong = sum(check(wide.Product(*case)) for case in (*SMALL, *ODD))
    wide.HEADS = Heads(32, 8, 128)
    products = [wide.Product(*case) for case in LAYER]
    wrong += sum(check(product) for product in products)
    said(f"{wrong} of all with other bits")
    for rows in (2048, 512):
        for product in products:
            shapes(product, rows, plain=rows == 2048)
    layers(products)
    del products
    gc.collect()
    torch.cuda.empty_cache()
    small_layers()
    said("done")


if __name__ == "__main__":
    main()

"""A small model's steps at many rows: products of 16 to 128 rows, of prompts, attention of 64 requests, the engine.

    python tests/benchmarks/many_rows_bench.py [--only bits products attention prompts engine]

SmolLM2-135M's sizes. Bits first. Products are timed in a chain of 30 layers, each reading what the one before wrote:
one product's kernel is changed at a time and the fastest kept. Names of kernels: as in skinny_gemm_bench.py. The engine
runs by the rules in force, then by those before them.
"""

import argparse
import functools
import gc
import itertools
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from cold_graphs import seconds_per_replay
from skinny_gemm_bench import Chain, label
from small_model_bench import Bench
from torch.autograd import DeviceType

from slipstream.engine.bench.generate import prompts_of
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.cuda import build, launch, prompt_launch, skinny_gemm
from slipstream.kernels.cuda.launch import Epilogue, Override, Variant
from slipstream.kernels.cuda.prompt_launch import Sharing
from slipstream.kernels.gpu import attention_split as split
from slipstream.kernels.gpu import paged_attention as gpu
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.paged_attention import plan_rows
from slipstream.kernels.stream import Stream

LAYERS, HIDDEN, INNER, VOCAB, HEADS = 30, 576, 1536, 49152, Heads(9, 3, 64)
PRODUCTS = {(60, 576): "qkv", (36, 576): "o", (192, 576): "gate_up", (36, 1536): "down"}
CUT_BEFORE = split.Cut()
CUTS = {"before": CUT_BEFORE, "in force": None}
OLD_PROMPTS, NEW_PROMPTS = Override(wide=False, prompt=False), Override(prompt=Sharing(weights=2))
BATCH, BLOCK, BLOCKS = 64, 16, 32
began = time.monotonic()
usual_choice, usual_cut, usual_prompt = launch.choose, gpu.usual_cut, prompt_launch.choose


class Choice:
    """Takes the place of launch.choose: kernels by product, the usual ones where none is named."""

    def __init__(self, kernels: dict[str, Variant]) -> None:
        self.kernels = kernels

    def __call__(self, rows: int, tiles: int, width: int, parts: int, per_part: int, device: launch.Device) -> Variant:
        found = self.kernels.get(PRODUCTS.get((tiles, width), ""))
        return found or usual_choice(rows, tiles, width, parts, per_part, device)


def choose_before(rows: int, tiles: int, width: int, parts: int, per_part: int, device: launch.Device) -> Variant:
    """As launch.choose was: the fewest rows of x in a CTA that fill the SMs once, and ROWS_64 for the rest."""
    if tiles * 32 * width > launch.IN_L2 or per_part > 4:
        return usual_choice(rows, tiles, width, parts, per_part, device)
    for variant in (launch.SHORT_K_PAIRS, launch.SHORT_K_16, launch.ROWS_32):
        high = 8 * variant.row_tiles
        if -(-tiles // 2) * -(-rows // high) <= device.sms or rows <= high:
            return variant
    return launch.ROWS_32 if parts > launch.ROWS_64.max_warps else launch.ROWS_64


def rules(*, before: bool) -> None:
    """The choices of kernels, for whoever captures next."""
    launch.choose = choose_before if before else usual_choice
    gpu.usual_cut = (lambda batch, *_: replace(CUT_BEFORE, stages=3 if batch <= 4 else 5)) if before else usual_cut
    prompt_launch.choose = (lambda *_: None) if before else usual_prompt


def candidates(product: str, rows: int) -> list[Variant]:
    """Kernels whose registers hold the product's parts, with few columns to spare and not too many groups."""
    width = INNER if product == "down" else HIDDEN
    parts, _ = launch.split_k(width, product in ("qkv", "gate_up"))
    return [
        v
        for v in launch.VARIANTS
        if not v.bulk and parts <= v.max_warps and rows <= 8 * 8 * v.row_tiles and rows > 4 * v.row_tiles
    ]


class ManyRows(Chain):
    """The products for more rows than the other bench's."""

    def __init__(self, rows: int) -> None:
        super().__init__(LAYERS, HIDDEN, HEADS, INNER, VOCAB)
        angles = 6 * torch.rand(rows, HEADS.dim // 2, device="cuda").repeat(1, 2)  # -> [rows, dim]
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.cells = torch.arange(rows, device="cuda")
        self.cache = torch.zeros(-(-rows // 16), 16, 2, HEADS.kv, HEADS.dim, dtype=torch.bfloat16, device="cuda")
        self.rows = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        self.sums = self.rows.float().square().unflatten(-1, (-1, 16)).sum(-1)  # [M, hidden] -> [M, hidden / 16]

    def layers(self, rows: int, override: Override = Override()) -> torch.Tensor:
        """Without the head: the stream behind the last layer, and the last layer's keys and values beside it."""
        x, cos, sin = self.rows[:rows], self.cos[:rows], self.sin[:rows]
        sink = KVSink(self.cache, self.cells[:rows])
        stream = Stream(x, self.sums[:rows])
        for qkv, out, gate_up, down in self.packed[:-1]:
            q, _, _ = skinny_gemm.norm_qkv(stream, self.norm, qkv, HEADS, cos, sin, sink=sink, override=override)
            stream = skinny_gemm.linear_add(q.flatten(1), out, stream, override=override)  # [M, q, d] -> [M, q d]
            inner = skinny_gemm.norm_gate_up(stream, self.norm, gate_up, override=override)
            stream = skinny_gemm.linear_add(inner, down, stream, override=override)
        return torch.cat((stream.rows.flatten(), self.cache.flatten()))


def said(words: str) -> None:
    print(f"[{time.monotonic() - began:4.1f} s] {words}", flush=True)


def bits(chain: ManyRows) -> None:
    """The layers' outputs by every kernel against the usual ones'."""
    wrong, compared = [], 0
    for rows in (64, 29):
        expected = chain.layers(rows)
        for product in PRODUCTS.values():
            for variant in candidates(product, rows):
                launch.choose = Choice({product: variant})
                compared += 1
                if not chain.layers(rows).equal(expected):
                    wrong.append(f"{rows} rows {product} {label(variant)}")
        launch.choose = usual_choice
    for rows in (2048, 1024, 300, 64):
        expected = chain.layers(rows)
        for override in (OLD_PROMPTS, NEW_PROMPTS):
            compared += 1
            if not chain.layers(rows, override).equal(expected):
                wrong.append(f"{rows} rows {override}")
    said(f"bits of {compared} chains: " + (f"OTHER BITS {wrong}" if wrong else "all equal"))


def layer_us(chain: ManyRows, rows: int, override: Override = Override()) -> float:
    return seconds_per_replay(lambda: chain.layers(rows, override), 5) / LAYERS * 1e6


def products(chain: ManyRows) -> None:
    """By rows the fastest kernels, one product after the other."""
    for rows in (64, 16, 32, 128):
        usual, kept = layer_us(chain, rows), {}
        fastest = usual
        for product in ("gate_up", "down", "o", "qkv"):
            times = []
            for variant in candidates(product, rows):
                launch.choose = Choice({**kept, product: variant})
                times.append((layer_us(chain, rows), label(variant), variant))
            times.sort(key=lambda one: one[0])
            shown = " | ".join(f"{name} {us:.2f}" for us, name, _ in times)
            said(f"us a layer, {rows} rows, {product} changed (before {fastest:.2f}): {shown}")
            if times and times[0][0] < fastest:
                fastest, kept[product] = times[0][0], times[0][2]
        launch.choose = usual_choice
        chosen = ", ".join(f"{product} {label(v)}" for product, v in kept.items())
        said(f"{rows} rows: {usual:.2f} -> {fastest:.2f} us a layer with {chosen}")


def prompts(chain: ManyRows) -> None:
    """Products of prompts: a chain, then each alone."""
    inner = torch.randn(2048, INNER, device="cuda").bfloat16()
    for rows in (2048, 1024, 512, 256):
        rules(before=True)
        times = {"before": layer_us(chain, rows)}
        rules(before=False)
        times["in force"] = layer_us(chain, rows)
        said(f"us a layer, {rows} rows: " + " | ".join(f"{name} {us:.1f}" for name, us in times.items()))
        line = []
        for product in PRODUCTS.values():
            each = []
            for override in (OLD_PROMPTS, NEW_PROMPTS):
                work = functools.partial(one_product, chain, product, rows, inner, override)
                each.append(f"{seconds_per_replay(work, 3) / LAYERS * 1e6:.1f}")
            line.append(f"{product} {' / '.join(each)}")
        said(f"us, {rows} rows, skinny / prompt: " + " | ".join(line))


def one_product(chain: ManyRows, product: str, rows: int, inner: torch.Tensor, override: Override) -> list[Any]:
    """Of every layer, over the same rows."""
    stream, norm, made = Stream(chain.rows[:rows], chain.sums[:rows]), chain.norm, []
    cos, sin = chain.cos[:rows], chain.sin[:rows]
    for qkv, out, gate_up, down in chain.packed[:-1]:
        if product == "qkv":
            made.append(skinny_gemm.norm_qkv(stream, norm, qkv, HEADS, cos, sin, override=override))
        elif product == "gate_up":
            made.append(skinny_gemm.norm_gate_up(stream, norm, gate_up, override=override))
        else:
            x, weight = (stream.rows, out) if product == "o" else (inner[:rows], down)
            made.append(skinny_gemm.linear_add(x, weight, stream, override=override))
    return made[-1:]


def caches(layers: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each layer's cells, and the requests' block table."""
    shape = (1 + BATCH * BLOCKS, BLOCK, 2, HEADS.kv, HEADS.dim)
    made = [torch.randn(shape, device="cuda").bfloat16() for _ in range(layers)]
    return made, 1 + torch.randperm(BATCH * BLOCKS, device="cuda").view(BATCH, BLOCKS)


def warm(num_steps: int) -> None:
    """Compiles what the engines need, for the cache on disk: in a process of its own beside others."""
    bench = Bench(rehearse=False)
    for before in (False, True):
        rules(before=before)
        bench.engine(num_steps, 64, 8 if before else 16)


def attend(
    chain: ManyRows, made: list[torch.Tensor], table: torch.Tensor, positions: torch.Tensor, cut: split.Cut | None
) -> torch.Tensor:
    """QKV and attention of every layer, each reading what the one before wrote."""
    rows, stream = plan_rows(table, positions, BLOCK), Stream(chain.rows[:BATCH], None)
    cos, sin = chain.cos[:BATCH], chain.sin[:BATCH]
    for (qkv, *_), cache in zip(chain.packed[:-1], made, strict=True):
        sink = KVSink(cache, rows.write_index)
        q, _, _ = skinny_gemm.norm_qkv(stream, chain.norm, qkv, HEADS, cos, sin, sink=sink)
        out = gpu.paged_attention(q[:, None], cache, table, positions, 0.125, None, cut)  # [B, 9, d] -> [B, 1, 9, d]
        stream = Stream(out.view(BATCH, HIDDEN))  # [B, 1, heads, d] -> [B, heads d]
    return stream.rows


def attention(chain: ManyRows) -> None:
    """64 requests of equal length."""
    made, table = caches(LAYERS)
    for context in (384, 256, 129):
        positions = torch.full((BATCH, 1), context - 1, device="cuda")
        line, expected = [], attend(chain, made, table, positions, CUT_BEFORE)
        for name, cut in CUTS.items():
            work = functools.partial(attend, chain, made, table, positions, cut)
            same = "" if work().equal(expected) else " OTHER BITS"
            line.append(f"{name} {seconds_per_replay(work, 5) / LAYERS * 1e6:.2f}{same}")
        said(f"us of qkv and attention, {context} tokens: " + " | ".join(line))


def engines() -> None:
    """The public call by the rules in force, then by those before."""
    bench, answers = Bench(rehearse=False), []
    for num_steps, before in itertools.product((0, 3), (False, True)):
        rules(before=before)
        engine = bench.engine(num_steps, 64, 8 if before else 16)
        said(f"K = {num_steps}, " + ("before" if before else "in force"))
        if not num_steps:
            bench.prefill(engine, 64)
            answers.append(tokens_of(bench, engine, 16)[0])
            if answers[0] != answers[-1]:
                print("    OTHER TOKENS")
        for batch in (64, 16, 4, 1):
            bench.steps(engine, batch, 2 if num_steps else 3)
        if not num_steps and not before:
            print_ends("a round of 64", engine, bench, 40)
            print_ends("a launch of 16 prompts", engine, bench, 1)
        del engine
        gc.collect()
    rules(before=False)


def tokens_of(bench: Bench, engine: Any, most: int) -> tuple[Any, int]:
    """Tokens of the answers, and rounds."""
    params, before = SamplingParams(max_tokens=most, ignore_eos=True), engine.stats.rounds
    answers = engine.generate(prompts_of(engine, 64, bench.prompt), params)
    return [answer.token_ids for answer in answers], engine.stats.rounds - before


def print_ends(title: str, engine: Any, bench: Bench, most: int) -> None:
    """By kernel, from the end of the kernel before to its own: what a kernel that starts early adds to the time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        tokens_of(bench, engine, most)
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.end, event.time_range.start, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    )
    if most > 1:
        spans = spans[len(spans) // 2 :]  # the prefill comes first
    times: dict[str, list[float]] = defaultdict(list)
    for (before, *_), (end, start, name) in itertools.pairwise(spans):
        times[name].append(min(end - before, 2 * (end - start)))  # without the host's gaps
    turns = len(times.get("_commit_kernel", ())) if most > 1 else 4
    total = sum(map(sum, times.values())) / max(1, turns)
    print(f"{title}: {total:.0f} us on the device; us, calls x us, kernel, from the end of the one before:")
    for name, all_us in sorted(times.items(), key=lambda one: -sum(one[1]))[:11]:
        us, calls = sum(all_us) / max(1, turns), len(all_us) / max(1, turns)
        print(f"    {us:8.1f} {calls:6.1f} x {statistics.median(all_us):6.2f}  {name[:60]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("bits", "attention", "products", "prompts", "engine")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--compile", help="only fill the caches on disk: 'nvcc', then the K of an engine")
    arguments = parser.parse_args()
    only = arguments.only
    units = [of(int(e)) for of in (build._skinny, build.wide, build.prompt) for e in Epilogue]
    build.compiled(launch.capability(), units)  # all at once
    if arguments.compile:
        return None if arguments.compile == "nvcc" else warm(int(arguments.compile))
    launch.load(torch.cuda.current_device())
    said("compiled and loaded")
    chain = ManyRows(2048)
    if "bits" in only:
        bits(chain)
    if "attention" in only:
        attention(chain)
    if "products" in only:
        products(chain)
    if "prompts" in only:
        prompts(chain)
    del chain
    torch.cuda.empty_cache()
    if "engine" in only:
        engines()
    said("done")
    return None


if __name__ == "__main__":
    with torch.inference_mode():
        main()

"""One rank's share of Kimi-K2.5 at TP=8, all 61 layers, on one GPU: a step's time and where it goes. By hand:

    python -P tests/benchmarks/kimi_rank.py [--seconds 90] [--batches 1,2,4,8,16] [--layers 61] [--rehearse]

8 heads, experts of width 256, 20,480 of the vocabulary, INT4 experts with random weights (76 GB, made on the card). It
is a model of its own: **collectives are replaced by their local part**, nothing is exchanged. The engine runs it as any
other: latent cache, prompts of 128 tokens, 256 answered greedily, one CUDA graph a step. Rows differ and so do their
experts: how many distinct ones a layer had is counted in the very steps that were timed last.

With OUT in the environment rows go to OUT/kimi_rank.json, to be merged into h200.json. `--rehearse` tries the script on
a CPU with tiny sizes.
"""

import argparse
import gc
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.bench.cases import CASES, Case, Outcome, step_bytes, write_rows
from slipstream.engine.bench.ceiling import read_ceiling
from slipstream.engine.bench.generate import prompts_of, time_generate
from slipstream.engine.bench.sizes import KIMI_RANK, LatentSize, random_target
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.layers.experts import Router
from slipstream.engine.packed_weights import products_for
from slipstream.engine.sampling_params import SamplingParams

VLLM = {1: 6.77, 2: 7.35, 4: 7.70, 8: 7.70, 16: 8.05}  # 0.24, Marlin, the same share on the same card
PROFILED = (1, 4, 16)
Span = tuple[float, float, str]  # start, end (us), kernel
# A decoder layer's kernels in their order, as (part of the kernel's name, what it does, megabytes it reads at M rows).
LAYER = (
    ("", "q_a and kv_a", "latents"),
    ("", "q_b", "queries"),
    ("write_latent", "latent into the cache", ""),
    ("head_linear", "query into the latents", "key_up"),
    ("chunks", "attention", "cache"),
    ("combine", "attention: combine", ""),
    ("head_linear", "values of heads", "value_up"),
    ("", "o", "o"),
    ("rms_norm", "norm", ""),
    ("route", "router", "router"),
    ("", "shared: gate and up", "shared_up"),
    ("", "shared: down", "shared_down"),
    ("gate_up", "experts: gate and up", "experts_up"),
    ("down", "experts: down", "experts_down"),
    ("all_reduce", "add", ""),
)


def say(*words: object) -> None:
    print(*words, flush=True)


class Chosen:
    """Experts of every row in the last step of each batch: routers hand out the tensors that a captured step writes."""

    def __init__(self, engine: Engine) -> None:
        self.of_batch: dict[int, list[torch.Tensor]] = {}
        self._now: list[torch.Tensor] | None = None
        run = engine.runner.round

        def round_(slots: torch.Tensor, num_steps: int | None = None) -> Any:
            self._now = []
            result = run(slots, num_steps)
            self.of_batch[len(slots)], self._now = self._now, None
            return result

        engine.runner.round = round_  # type: ignore[method-assign]
        assert isinstance(engine.target, torch.nn.Module)
        for module in engine.target.modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._note)

    def _note(self, _module: Any, _inputs: Any, choice: Any) -> None:
        if self._now is not None:
            self._now.append(choice.ids)

    def distinct(self, batch: int) -> list[int]:
        """Of each layer."""
        return [len(ids.unique()) for ids in self.of_batch[batch]]


def spans_of(engine: Engine, batch: int, rounds: int) -> list[Span]:
    """Every kernel of an answer of so many rounds, in order of their starts."""
    from torch.autograd import DeviceType

    prompts = prompts_of(engine, batch, 128)
    params = SamplingParams(max_tokens=rounds, ignore_eos=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.generate(prompts, params)
        torch.cuda.synchronize()
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    )


def rounds_in(spans: Sequence[Span]) -> list[list[Span]]:
    """The kernels of whole rounds: a round ends with its commit. The first ones, among prompts, are left out."""
    rounds: list[list[Span]] = [[]]
    for span in spans:
        rounds[-1].append(span)
        if "commit" in span[2]:
            rounds.append([])
    whole = rounds[:-1][2:]
    usual = sorted(len(one) for one in whole)[len(whole) // 2] if whole else 0
    return [one for one in whole if len(one) == usual]


def moved(spans: Sequence[Span]) -> list[float]:
    """Microseconds by which each kernel puts off the end of all: kernels overlap, and these add up to the whole."""
    reached, made = spans[0][0], []
    for _start, end, _name in spans:
        made.append(max(0.0, end - reached))
        reached = max(reached, end)
    return made


def layer_table(rounds: Sequence[Sequence[Span]], layers: int) -> tuple[dict[int, float], int, dict[str, list[float]]]:
    """(place in a layer of experts -> us, kernels a layer, all others by name -> us of each), averaged over rounds."""
    of_place: dict[int, float] = defaultdict(float)
    others: dict[str, list[float]] = defaultdict(list)
    per_layer = 0
    for spans in rounds:
        times = moved(spans)
        routers = [i for i, span in enumerate(spans) if "route_rows" in span[2]]
        if len(routers) < 3:
            continue
        per_layer = routers[2] - routers[1]
        first = routers[0] - place_of_router(per_layer)
        behind = first + per_layer * len(routers)
        for i, us in enumerate(times):
            if first <= i < behind:
                of_place[(i - first) % per_layer] += us / len(rounds) / len(routers)
            else:
                others[spans[i][2]].append(us / len(rounds))
    return dict(of_place), per_layer, dict(others)


def place_of_router(per_layer: int) -> int:
    return next(i for i, one in enumerate(LAYER) if one[0] == "route") if per_layer == len(LAYER) else 0


def megabytes(size: LatentSize, batch: int, distinct: float, context: int) -> dict[str, float]:
    """What each part of a layer reads."""
    c = size.target_config()
    assert c.latent is not None
    assert c.experts is not None
    h, a, e = c.hidden_size, c.latent, c.experts
    expert = 3 * h * e.width * size.weight_bytes * distinct
    numbers = {
        "latents": 2 * h * (a.q_rank + a.cell),
        "queries": 2 * c.num_heads * a.q_rank * (a.nope_dim + a.rope_dim),
        "key_up": 2 * c.num_heads * a.kv_rank * a.nope_dim,
        "value_up": 2 * c.num_heads * a.kv_rank * a.value_dim,
        "cache": 2 * batch * context * a.cell,
        "o": 2 * c.num_heads * a.value_dim * h,
        "router": 2 * e.num * h,
        "shared_up": 4 * h * e.shared * e.width,
        "shared_down": 2 * h * e.shared * e.width,
        "experts_up": expert * 2 / 3,
        "experts_down": expert / 3,
    }
    return {name: one / 1e6 for name, one in numbers.items()}


def show_table(engine: Engine, size: LatentSize, batch: int, distinct: float, ceiling: float, rounds: int = 24) -> None:
    """Where a step's time goes: us a layer, bytes, share of the read ceiling."""
    found = rounds_in(spans_of(engine, batch, rounds))
    if not found:
        say(f"M = {batch}: the profiler saw no whole round")
        return
    tell_table(found, size, batch, distinct, ceiling, 128 + rounds // 2)


def tell_table(
    found: Sequence[Sequence[Span]], size: LatentSize, batch: int, distinct: float, ceiling: float, context: int
) -> None:
    whole = sum(sum(moved(spans)) for spans in found) / len(found)
    of_place, per_layer, others = layer_table(found, size.num_layers)
    known = per_layer == len(LAYER)
    megas = megabytes(size, batch, distinct, context)
    say(f"\nM = {batch}: {whole:.0f} us a step under the profiler, {per_layer} kernels a layer, {len(found)} rounds")
    say("| part | us a layer | MB | TB/s | of ceiling | ms a step |\n| --- | --- | --- | --- | --- | --- |")
    layers = sum("route_rows" in span[2] for span in found[0])
    for place, us in sorted(of_place.items()):
        name, mega = f"kernel {place}", 0.0
        if known:
            name, mega = LAYER[place][1], megas.get(LAYER[place][2], 0.0)
        rate = mega / max(us, 1e-9)
        shown = f"{mega:.2f} | {rate:.2f} | {rate * 1e12 / ceiling:.0%}" if mega else " | | "
        say(f"| {name} | {us:.2f} | {shown} | {us * layers / 1e3:.3f} |")
    total = sum(of_place.values())
    say(f"| a layer | {total:.1f} | {sum(megas.values()):.1f} | {sum(megas.values()) / max(total, 1e-9):.2f} | "
        f"{sum(megas.values()) / max(total, 1e-9) * 1e12 / ceiling:.0%} | {total * layers / 1e3:.3f} |")  # fmt: skip
    rest = sorted(((sum(times), len(times) // len(found), name) for name, times in others.items()), reverse=True)
    for us, calls, name in rest[:8]:
        say(f"| outside: {calls} x {name[:48]} | | | | | {us / 1e3:.3f} |")
    names = [span[2][:28] for span in found[0]]
    if not known or not all(one[0] in name for one, name in zip(LAYER, layer_names(names, per_layer), strict=False)):
        say("kernels of a layer:", layer_names(names, per_layer))


def layer_names(names: Sequence[str], per_layer: int) -> list[str]:
    """Of the second layer of experts."""
    routers = [i for i, name in enumerate(names) if "route_rows" in name]
    if len(routers) < 2 or not per_layer:
        return list(names[:40])
    first = routers[1] - place_of_router(per_layer)
    return list(names[first : first + per_layer])


def tiny() -> LatentSize:
    """For a rehearsal."""
    from dataclasses import replace

    c = KIMI_RANK.target_config(512)
    assert c.latent is not None
    assert c.experts is not None
    latent = replace(c.latent, q_rank=64, kv_rank=64)
    experts = replace(c.experts, num=16, width=64)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_heads": 2, "num_kv_heads": 2}
    return LatentSize.of("tiny", replace(c, **sizes, num_layers=4, latent=latent, experts=experts))


def rehearsed_spans() -> list[Span]:
    """Of three rounds of five layers, the first plain, kernels overlapping as with dependent launch."""
    layer = [f"{one[0] or 'skinny'}_rows" if one[0] == "route" else one[0] or "skinny" for one in LAYER]
    names = ["embed", *layer[:8], "skinny", "skinny"]
    names = [*names, *layer * 4, "skinny head", "sample", "_commit_kernel"]
    spans, at = [], 0.0
    for name in names * 5:
        spans.append((at - 1.0, at + 3.0, name))
        at += 3.0
    return spans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="no batch or table is begun behind so many")
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    began, device = time.monotonic(), "cpu" if args.rehearse else "cuda"
    batches = [int(one) for one in args.batches.split(",")]

    def at() -> str:
        return f"[{time.monotonic() - began:.0f} s]"

    say("One rank of TP=8 as a model of its own: collectives are replaced by their local part, nothing is exchanged.")
    size, ceiling = (tiny(), 1e12) if args.rehearse else (KIMI_RANK, 0.0)
    if args.layers != 61:
        from dataclasses import replace

        size = LatentSize.of(f"{args.layers} layers", replace(size.target_config(), num_layers=args.layers))
    if not args.rehearse:
        products, ceiling = products_for("cuda"), read_ceiling()
        say(f"{at()} {torch.cuda.get_device_name()}: reads {ceiling / 1e12:.2f} TB/s; {products}")
    target = random_target(size, device)
    if not args.rehearse:
        torch.cuda.synchronize()
        held, peak = torch.cuda.memory_allocated() / 1e9, torch.cuda.max_memory_allocated() / 1e9
        say(
            f"{at()} weights made, kernels of experts compiled: {held:.1f} GB on the card, {peak:.1f} at most meanwhile"
        )
    settings = EngineConfig(
        max_running_requests=max(batches),
        max_context_tokens=512,
        prefill_chunk_tokens=128,
        prefill_requests=4,
        device=device,
        graphs=True,
    )
    engine = Engine(target, settings)
    chosen = Chosen(engine)
    engine.start()
    say(f"{at()} ready: {engine.steps.describe()}")
    say("\n| M | ms a step (wall) | device ms | spread | floor at 4.3 / here | of ceiling | vLLM | goal | experts |")
    say("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    out, distinct = os.environ.get("OUT"), {}
    repeats, tokens = (1, 12) if args.rehearse else (2, 256)
    for batch in batches:
        if time.monotonic() - began > args.seconds:
            say(f"M = {batch}: no time")
            continue
        timing = time_generate(engine, batch, new_tokens=tokens, repeats=repeats)
        of_layers = chosen.distinct(batch)
        distinct[batch] = sum(of_layers) / len(of_layers)
        case = next((c for c in CASES if c.name == "kimi-rank-step" and c.batch == batch), Case("", "", batch, 0))
        outcome = Outcome(case, timing, step_bytes(size, case), ceiling)
        floor = outcome.bytes_read / 4.3e9
        say(
            f"| {batch} | {timing.ms:.3f} | {timing.parts.verify:.3f} | {timing.spread:.1%} | {floor:.2f} / "
            f"{outcome.floor_ms:.2f} | {outcome.share:.0%} | {VLLM.get(batch, 0):.2f} | {case.goal_ms or ''} | "
            f"{distinct[batch]:.1f} of {size.distinct_experts(batch):.1f}, {min(of_layers)}..{max(of_layers)} |"
        )
        if out and case.name:
            write_rows(Path(out) / "kimi_rank.json", [outcome.row(commit, "python -P tests/benchmarks/kimi_rank.py")])
    say(f"{at()} timed; {engine.compiles_after_ready} compiles and {engine.captures_after_ready} captures behind ready")
    for batch in [one for one in PROFILED if one in distinct]:
        if time.monotonic() - began > args.seconds:
            say(f"table of M = {batch}: no time")
        elif args.rehearse:
            tell_table(rounds_in(rehearsed_spans()), size, batch, distinct[batch], ceiling, 256)
        else:
            show_table(engine, size, batch, distinct[batch], ceiling)
    say(f"{at()} done")
    sys.stdout.flush()
    del engine, target
    gc.collect()


if __name__ == "__main__":
    with torch.no_grad():
        main()

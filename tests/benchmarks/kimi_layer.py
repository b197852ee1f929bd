"""Where a step of Kimi-K2.5 goes: its kernels by the profiler, found by their names, as parts of a decoder layer."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from slipstream.engine.bench.generate import params_of, prompts_of
from slipstream.engine.bench.sizes import LatentSize
from slipstream.engine.engine import Engine

Span = tuple[float, float, str]  # start, end (us), kernel
PRODUCT = re.compile(r"skinny|bulk|wide|tiled|wgmma|_product")
ATTENTION = re.compile(r"latent|chunks")  # what only attention has
CHOICE = re.compile(r"route_rows|choose_rows")  # once in a layer of experts
LAST = re.compile(r"expert|all_reduce")  # what a layer of experts ends with
# A kernel's name -> what it does, what it reads, which products follow.
NAMED = (
    ("order", "rows in the products' order", (), ""),
    ("write_latent|latent_rows", "latent into the cache", (), ""),
    ("chunks", "attention", ("cache",), "attended"),
    ("combine", "attention: combine", (), "attended"),
    ("rms_norm", "norm", (), "mixed"),
    ("gate_rows", "norm, router, shared gate and up", ("router", "shared_up"), "mixed"),
    ("choose_rows", "choice, shared down", ("shared_down",), "mixed"),
    ("route", "router", ("router",), "mixed"),
    ("experts_gate_up", "experts: gate and up", ("experts_up",), "mixed"),
    ("experts_down", "experts: down", ("experts_down",), "mixed"),
    ("experts", "experts", ("experts_up", "experts_down"), "mixed"),
    ("all_reduce", "add", (), ""),
)
PRODUCTS = {
    "latents": (("q_a and kv_a", "latents"), ("q_b", "queries")),
    "attended": (("o", "o"),),
    "mixed": (("shared: gate and up", "shared_up"), ("shared: down", "shared_down")),
}
HEADS = (("query into the latents", "key_up"), ("values of heads", "value_up"))


def spans_of(engine: Engine, batch: int, rounds: int) -> list[Span]:
    """Every kernel of answers of so many rounds, in order of their starts."""
    import torch
    from torch.autograd import DeviceType

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.generate(prompts_of(engine, batch, 128), params_of(batch, rounds, 1.0))
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


def layers_in(names: Sequence[str]) -> list[range]:
    """Places of the kernels of every layer of experts, of those that have as many as most.

    A layer begins behind the last kernel of experts, or sum over ranks, that stands before the next attention.
    """
    ends = []
    for i in [place for place, name in enumerate(names) if CHOICE.search(name)]:
        following = next((j for j in range(i, len(names)) if ATTENTION.search(names[j])), len(names))
        ends.append(max(j for j in range(i, following) if CHOICE.search(names[j]) or LAST.search(names[j])) + 1)
    if len(ends) < 2:
        return []
    usual = Counter(b - a for a, b in pairwise(ends)).most_common(1)[0][0]
    return [range(end - usual, end) for end in ends if end >= usual]


def parts_of(names: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """(what it does, what it reads) of each kernel of a layer; one of an unknown name is called by it."""
    section, products, heads, found = "latents", 0, 0, []
    for name in names:
        known = next((one for one in NAMED if re.search(one[0], name)), None)
        of_section = PRODUCTS[section]
        if known:
            found.append(known[1:3])
            if known[3] and known[3] != section:
                section, products = known[3], 0
        elif "head_linear" in name:
            what, read = HEADS[min(heads, 1)]
            found.append((what, (read,)))
            heads, section, products = heads + 1, "attended", 0
        elif PRODUCT.search(name) and products < len(of_section):
            found.append((of_section[products][0], (of_section[products][1],)))
            products += 1
        else:
            found.append((name[:40], ()))
    return found


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


def layer_table(
    rounds: Sequence[Sequence[Span]], size: LatentSize, batch: int, distinct: float, ceiling: float, context: int
) -> list[str]:
    """Lines that say where a step goes: us a layer, bytes, share of the read ceiling; all in order, then the rest.

    Args:
        rounds: of the same kernels each.
        distinct: experts a layer of experts.
        ceiling: bytes a second.
        context: tokens a request has.
    """
    names = [span[2] for span in rounds[0]]
    layers = layers_in(names)
    inside = {place: i for layer in layers for i, place in enumerate(layer)}
    us_of, others = defaultdict(float), defaultdict(list)
    for spans in rounds:
        for place, us in enumerate(moved(spans)):
            if place in inside:
                us_of[inside[place]] += us / len(rounds) / len(layers)
            else:
                others[spans[place][2]].append(us / len(rounds))
    whole = sum(sum(moved(spans)) for spans in rounds) / len(rounds)
    lines = [
        f"M = {batch}: {whole:.0f} us a step under the profiler, {len(us_of)} kernels a layer, {len(rounds)} rounds",
        "| part | us a layer | MB | TB/s | of ceiling | ms a step | kernel |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    megas, total, read = megabytes(size, batch, distinct, context), 0.0, 0.0
    of_layer = [names[place] for place in layers[0]] if layers else []
    for i, (what, reads) in enumerate(parts_of(of_layer)):
        us, mega = us_of[i], sum(megas[one] for one in reads)
        total, read = total + us, read + mega
        lines.append(_line(what, us, mega, ceiling, len(layers), of_layer[i]))
    lines.append(_line("a layer", total, read, ceiling, len(layers), ""))
    unread = sorted(megas.keys() - {one for _, reads in parts_of(of_layer) for one in reads})
    if unread:
        lines.append(f"no kernel was found that reads: {', '.join(unread)}")
    rest = sorted(((sum(times), len(times) // len(rounds), name) for name, times in others.items()), reverse=True)
    lines += [f"| outside: {calls} x {name[:48]} | | | | | {us / 1e3:.3f} | |" for us, calls, name in rest[:8]]
    return lines


def _line(what: str, us: float, mega: float, ceiling: float, layers: int, kernel: str) -> str:
    rate = mega / max(us, 1e-9)
    shown = f"{mega:.2f} | {rate:.2f} | {rate * 1e12 / ceiling:.0%}" if mega else " | | "
    return f"| {what} | {us:.2f} | {shown} | {us * layers / 1e3:.3f} | {kernel[:28]} |"


def rehearsed(layer: Sequence[str], layers: int = 4) -> list[Span]:
    """Spans of five rounds: a plain layer, `layers` of these kernels, overlapping as with dependent launch."""
    attention = list(layer[: next(i for i, name in enumerate(layer) if re.search("rms_norm|gate_rows", name))])
    names = ["_embed_kernel", *attention, "bulk_2", "skinny_1", *list(layer) * layers, "wide_3", "sample", "_commit"]
    return [(3.0 * i - 1, 3.0 * i + 3, name) for i, name in enumerate(names * 5)]


def show_table(engine: Any, size: LatentSize, batch: int, distinct: float, ceiling: float, rounds: int = 24) -> None:
    """Profiles answers of a batch and prints their table."""
    found = rounds_in(spans_of(engine, batch, rounds))
    if not found:
        print(f"M = {batch}: the profiler saw no whole round", flush=True)
        return
    print("\n" + "\n".join(layer_table(found, size, batch, distinct, ceiling, 128 + rounds // 2)), flush=True)

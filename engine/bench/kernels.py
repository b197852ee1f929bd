"""Every op of a step at the sizes of a model: time in a CUDA graph, bytes, share of the read ceiling, error.

Weights and caches of the calls in a graph differ, and are more than the L2 cache holds; inputs stay in it, as they do
behind the kernel that has just written them. The twin runs on the same device, in torch.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from slipstream.engine.bench.sizes import Size
from slipstream.engine.packed_weights import products_for, takes
from slipstream.kernels.cuda.pack import RowOrder, pack
from slipstream.kernels.draft_input import draft_input
from slipstream.kernels.embed import embed
from slipstream.kernels.linear_add import linear_add
from slipstream.kernels.norm_gate_up import norm_gate_up
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.norm_qkv import Heads, norm_qkv
from slipstream.kernels.paged_attention import paged_attention, plan_rows
from slipstream.kernels.sampling import SamplingBatch, sample
from slipstream.kernels.stream import Norm, Stream
from slipstream.kernels.weight import Weight

ROWS = (1, 4, 16, 64)
CONTEXTS = (256, 2048)
COLD_BYTES = 300e6  # several times the L2 cache
_MOST_CALLS, _FEWEST_CALLS, _BLOCK = 512, 4, 16


@dataclass(frozen=True)
class Op:
    """An op at one shape and number of rows.

    Args:
        name: with its shape.
        rows: of the input.
        num_bytes: that it must read: weights, keys and values, or logits.
        calls: the op over other weights or caches each time.
        twin: what the first call gives, by torch.
    """

    name: str
    rows: int
    num_bytes: int
    calls: Sequence[Callable[[], Any]]
    twin: Callable[[], Any]


@dataclass(frozen=True)
class Measured:
    """An op, timed.

    Args:
        share: of the read ceiling.
        error: norm of the difference to the twin / norm of the twin; of sampled ids, the share that differ.
    """

    name: str
    rows: int
    us: float
    num_bytes: int
    share: float
    error: float


def measure_kernels(
    size: Size, ceiling: float, device: str = "cuda", rows: tuple[int, ...] = ROWS
) -> Iterator[Measured]:
    """Every op of the size. ceiling: bytes a second."""
    for op in ops_of(size, device, rows):
        with torch.enable_grad():  # as training runs them: the twins
            expected = _tensors(op.twin())
        with torch.no_grad():
            found = _tensors(op.calls[0]())
            seconds = _seconds(op.calls, device)
        yield Measured(
            op.name, op.rows, seconds * 1e6, op.num_bytes, op.num_bytes / seconds / ceiling, _error(found, expected)
        )


def ops_of(size: Size, device: str, rows: tuple[int, ...] = ROWS) -> Iterator[Op]:
    """The ops of a target's layer and head, the draft's input, attention and sampling."""
    for products in (_qkv, _attention_out, _gate_up, _down, _head):
        yield from products(size, device, rows)
    yield from _draft_input(size, device, rows)
    yield from _attention(size, device)
    yield from _sampling(size, device, rows)


def _qkv(size: Size, device: str, rows: tuple[int, ...]) -> Iterator[Op]:
    heads = Heads(size.num_heads, size.num_kv_heads, size.head_dim)
    n, k, norm = (heads.q + 2 * heads.kv) * heads.dim, size.hidden_size, _norm(size, device)
    weights, plain = _weights(n, k, device, RowOrder.HEADS, heads.dim)
    for m in rows:
        angles = _random(m, heads.dim // 2, device=device).float().repeat(1, 2)  # -> [M, d]
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        run = partial(lambda x, cos, sin, w: norm_qkv(x, norm, w, heads, cos, sin), _stream(m, k, device), cos, sin)
        yield _op("norm_qkv", m, n, k, run, weights, plain)


def _attention_out(size: Size, device: str, rows: tuple[int, ...]) -> Iterator[Op]:
    return _add("linear_add", size.hidden_size, size.num_heads * size.head_dim, device, rows)


def _down(size: Size, device: str, rows: tuple[int, ...]) -> Iterator[Op]:
    return _add("linear_add", size.hidden_size, size.intermediate_size, device, rows)


def _add(name: str, n: int, k: int, device: str, rows: tuple[int, ...]) -> Iterator[Op]:
    weights, plain = _weights(n, k, device, RowOrder.ROWS)
    for m in rows:
        run = partial(lambda x, r, w: linear_add(x, w, r), _random(m, k, device=device), _stream(m, n, device))
        yield _op(name, m, n, k, run, weights, plain)


def _gate_up(size: Size, device: str, rows: tuple[int, ...]) -> Iterator[Op]:
    n, k, norm = 2 * size.intermediate_size, size.hidden_size, _norm(size, device)
    weights, plain = _weights(n, k, device, RowOrder.GATE_UP)
    for m in rows:
        run = partial(lambda x, w: norm_gate_up(x, norm, w), _stream(m, k, device))
        yield _op("norm_gate_up", m, n, k, run, weights, plain)


def _head(size: Size, device: str, rows: tuple[int, ...]) -> Iterator[Op]:
    n, k, norm = size.vocab_size, size.hidden_size, _norm(size, device)
    weights, plain = _weights(n, k, device, RowOrder.ROWS)
    for m in rows:
        run = partial(lambda x, w: norm_linear(x, norm, w), _stream(m, k, device))
        yield _op("norm_linear", m, n, k, run, weights, plain)


def _draft_input(size: Size, device: str, rows: tuple[int, ...]) -> Iterator[Op]:
    h, norm = size.hidden_size, _norm(size, device)
    table = _random(size.vocab_size, h, device=device)
    for m in rows:
        ids, g = torch.arange(m, device=device) * 7 % size.vocab_size, _random(m, h, device=device)
        run = partial(draft_input, ids, table, g, norm, norm, False)
        yield Op(f"draft_input {2 * h}", m, 4 * m * h, [run] * 32, run)
        look = partial(embed, ids, table)
        yield Op(f"embed {h}", m, 2 * m * h, [look] * 32, look)


def _attention(size: Size, device: str) -> Iterator[Op]:
    heads, kv_heads, dim = size.num_heads, size.num_kv_heads, size.head_dim
    for batch in (1, 16):
        for context in CONTEXTS:
            num_bytes = batch * context * 4 * kv_heads * dim
            blocks = batch * context // _BLOCK
            shape = (1 + blocks, _BLOCK, 2, kv_heads, dim)
            caches = [_random(*shape, device=device) for _ in range(_calls(num_bytes, most=size.num_layers))]
            table = 1 + torch.randperm(blocks, device=device).view(batch, -1)  # [B, blocks of a request]
            for per_request in (1, 4):
                at = context - per_request + torch.arange(per_request, device=device)
                plan = plan_rows(table, at.expand(batch, -1).contiguous(), _BLOCK)
                q = _random(batch, per_request, heads, dim, device=device)
                calls = [partial(paged_attention, q, cache, plan, dim**-0.5) for cache in caches]
                yield Op(f"paged_attention {context} tokens", batch * per_request, num_bytes, calls, calls[0])


def _sampling(size: Size, device: str, rows: tuple[int, ...]) -> Iterator[Op]:
    for m in rows:
        logits = _random(m, 1, size.vocab_size, device=device)
        zeros = torch.zeros(m, dtype=torch.int64, device=device)
        for name, temperature in (("greedy", 0.0), ("T 0.8", 0.8)):
            temperatures, slots = torch.full((m,), temperature, device=device), torch.arange(m, device=device)
            off = torch.ones(m, dtype=torch.float64, device=device)  # top-p
            sampling = SamplingBatch(temperatures, zeros, off, zeros, zeros, slots=slots)
            run = partial(sample, logits, sampling, zeros[:, None])
            yield Op(f"sample {name}", m, 2 * m * size.vocab_size, [run] * 32, run)


def _op(
    name: str, rows: int, n: int, k: int, run: Callable[[Weight], Any], weights: list[Weight], plain: torch.Tensor
) -> Op:
    calls = [partial(run, weight) for weight in weights]
    return Op(f"{name} {n} x {k}", rows, 2 * n * k, calls, partial(run, plain))


def _weights(n: int, k: int, device: str, order: RowOrder, head_dim: int = 0) -> tuple[list[Weight], torch.Tensor]:
    """(weights in the form that the device's products read, the first of them as a plain tensor)."""
    plain = _random(n, k, device=device, scale=k**-0.5)
    packs = products_for(device).kernels == "cuda" and takes(plain, order, head_dim)
    made: list[Weight] = []
    for i in range(_calls(2 * n * k)):
        weight = _random(n, k, device=device, scale=k**-0.5) if i else plain
        made.append(pack(weight, order, head_dim) if packs else weight)
    return made, plain


def _calls(num_bytes: int, most: int = _MOST_CALLS) -> int:
    """How many different weights or caches leave nothing in the L2."""
    return max(2, min(most, int(COLD_BYTES // max(1, num_bytes)) + 1))


def _random(*shape: int, device: str, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=scale)


def _stream(rows: int, width: int, device: str) -> Stream:
    return Stream(_random(rows, width, device=device))


def _norm(size: Size, device: str) -> Norm:
    return Norm(torch.ones(size.hidden_size, dtype=torch.bfloat16, device=device), 1e-5)


def _seconds(calls: Sequence[Callable[[], Any]], device: str, replays: int = 7) -> float:
    """Median seconds a call, all in one graph; on the CPU one after the other."""
    calls = (list(calls) * (_FEWEST_CALLS // len(calls) + 1))[: max(_FEWEST_CALLS, len(calls))]
    if device != "cuda":
        began = time.perf_counter()
        for call in calls[:_FEWEST_CALLS]:
            call()
        return (time.perf_counter() - began) / _FEWEST_CALLS
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        for call in calls:
            kept = call()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / len(calls))
    del kept
    return statistics.median(times[1:])


def _tensors(made: Any) -> list[torch.Tensor]:
    """What an op gives; of a stream the rows."""
    if isinstance(made, torch.Tensor):
        return [made.detach().clone()]
    if isinstance(made, Stream):
        return [made.rows.detach().clone()]
    return [tensor for one in made if one is not None for tensor in _tensors(one)]


def _error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    if not found[0].is_floating_point():
        return float((found[0] != expected[0]).float().mean())
    pairs = list(zip(found, expected, strict=True))
    difference = sum(float((a.float() - b.float()).square().sum()) for a, b in pairs)
    return float((difference / sum(float(b.float().square().sum()) for _, b in pairs)) ** 0.5)

"""Paged attention of decode and verify rows on one GPU: a graph of dependent calls over caches that the L2 has lost.

`python tests/benchmarks/attention_bench.py`; prints microseconds a call, bytes of keys and values, and the share of the
measured read ceiling. With --prefill, also prompts of 128 to 2048 tokens. With --sweep, only the ways to cut the work.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch

from slipstream.kernels.gpu import attention_split as split
from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu import paged_attention as gpu
from slipstream.kernels.paged_attention import AttentionRows, paged_attention, plan_rows

READ_CEILING = 4.55e12  # bytes a second, measured (a Triton reduction)
SHAPES = {"SmolLM2-135M": (9, 3, 64, 30), "Llama-3.1-8B": (32, 8, 128, 32)}  # heads, kv_heads, head_dim, layers
BATCHES, CONTEXTS, ROWS = (1, 4, 16), (256, 2048, 8192, 32768), (1, 4)
BLOCK, MAX_CONTEXT = 16, 8192
COLD_BYTES = 600e6  # caches of a chain together, so that a call finds nothing of its own in the 50 MB of L2
MOST_BYTES = 24e9


def graph_us(chain: Callable[[], object], calls: int, replays: int) -> float:
    """Microseconds a call of `chain`, captured once and replayed."""
    chain()  # compiles, reserves
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / (replays * calls)


def caches_of(tokens: int, kv_heads: int, head_dim: int, layers: int) -> list[torch.Tensor]:
    """Layers of a cache of `tokens` cells: as many as the model has, but for very large ones."""
    num_blocks = 1 + tokens // BLOCK
    size = num_blocks * BLOCK * 2 * kv_heads * head_dim * 2
    count = max(2, min(layers, int(MOST_BYTES // size), int(COLD_BYTES // size) + 1))
    shape = (num_blocks, BLOCK, 2, kv_heads, head_dim)
    return [torch.zeros(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(count)]


def chain_of(
    q: torch.Tensor, caches: list[torch.Tensor], rows: AttentionRows, layers: int
) -> Callable[[], torch.Tensor]:
    """`layers` calls, each with the last one's output as its queries."""

    def chain() -> torch.Tensor:
        x = q
        for layer in range(layers):
            x = paged_attention(x, caches[layer % len(caches)], rows, q.shape[-1] ** -0.5)
        return x

    return chain


def decode() -> None:
    print(f"{'model':14} {'batch':>5} {'context':>7} {'rows':>4} {'us':>8} {'MB':>8} {'GB/s':>7} {'of ceiling':>10}")
    for model, (heads, kv_heads, head_dim, layers) in SHAPES.items():
        for batch in BATCHES:
            for context in CONTEXTS:
                tokens = batch * context
                caches = caches_of(tokens, kv_heads, head_dim, layers)
                order = torch.randperm(tokens // BLOCK, device="cuda")
                table = 1 + order.view(batch, -1)
                width = max(MAX_CONTEXT, context) // BLOCK  # a request's table has room for more than it holds
                table = torch.nn.functional.pad(table, (0, width - table.shape[1]))
                for num_rows in ROWS:
                    at = context - num_rows + torch.arange(num_rows, device="cuda")
                    positions = at.expand(batch, -1).contiguous()
                    q = torch.randn(batch, num_rows, heads, head_dim, device="cuda").bfloat16()
                    rows = plan_rows(table, positions, BLOCK)
                    bytes_read = tokens * 2 * kv_heads * head_dim * 2
                    us = graph_us(chain_of(q, caches, rows, layers), layers, 20 if bytes_read < 50e6 else 3)
                    rate = bytes_read / us * 1e6
                    print(
                        f"{model:14} {batch:5} {context:7} {num_rows:4} {us:8.2f} {bytes_read / 1e6:8.2f}"
                        f" {rate / 1e9:7.0f} {rate / READ_CEILING:10.1%}",
                        flush=True,
                    )
                del caches


def prefill() -> None:
    print(f"\n{'model':14} {'rows':>5} {'before':>7} {'us':>8} {'TFLOP/s':>8}")
    for model, (heads, kv_heads, head_dim, layers) in SHAPES.items():
        for num_rows, before in ((128, 0), (512, 0), (2048, 0), (2048, 6144)):
            caches = caches_of(8192, kv_heads, head_dim, layers)
            table = 1 + torch.randperm(8192 // BLOCK, device="cuda")[None]
            positions = (before + torch.arange(num_rows, device="cuda"))[None]
            q = torch.randn(1, num_rows, heads, head_dim, device="cuda").bfloat16()
            rows = plan_rows(table, positions, BLOCK, prefill=True)
            us = graph_us(chain_of(q, caches, rows, layers), layers, 10)
            pairs = num_rows * before + num_rows * (num_rows + 1) / 2  # (row, key) that are seen
            print(f"{model:14} {num_rows:5} {before:7} {us:8.1f} {4 * pairs * heads * head_dim / us / 1e6:8.1f}")


# Tiles (keys, warps) to try, whose sums differ in rounding, and how many fit into registers early. Then cuts, which
# change no bits.
TILES = {64: ((256, 8, 2), (128, 4, 2), (256, 4, 1)), 128: ((128, 4, 1), (128, 8, 2), (64, 4, 2))}
CUTS = {
    "as it is": {},
    "not early": {"settles": False},
    "early 1": {"early": 1},
    "whole 1": {"whole": 1},
    "whole 4": {"whole": 4},
    "wide 8": {"wide": 8},
    "programs 264": {"programs": 264},
    "stages 3": {"stages": 3},
}
SWEPT = ((1, 1, 128), (1, 1, 256), (1, 4, 256), (1, 1, 384), (1, 1, 1024), (1, 1, 8192), (16, 1, 256), (16, 1, 8192))


CALLS = 128  # of a chain


def cut_us(
    q: torch.Tensor,
    caches: list[torch.Tensor],
    order: torch.Tensor,
    context: int,
    scratch: torch.Tensor,
    cut: split.Cut,
) -> float:
    """Microseconds a call in a chain over cells that differ from call to call and that the L2 has lost.

    A call's kernel lets its successor start when all before it is done (`cut.settles`), as the kernel before attention
    does in a layer. Begin and end of the graph cost a few microseconds, over all calls.
    """
    batch, num_rows = q.shape[:2]
    at = context - num_rows + torch.arange(num_rows, device="cuda")
    positions = at.expand(batch, -1).contiguous()
    turns = range(-(-CALLS // len(caches)))
    tables = [order.roll((i, i * (context // BLOCK)), (0, 1))[:batch].contiguous() for i in turns]

    def chain() -> torch.Tensor:
        x = q
        for call in range(CALLS):
            table, cache = tables[call // len(caches)], caches[call % len(caches)]
            x = gpu.paged_attention(x, cache, table, positions, q.shape[-1] ** -0.5, None, cut)
        return x

    launch.launched(cut.settles)  # the first call, too, so that it needs no kernel of its own
    chain()
    graph = torch.cuda.CUDAGraph()
    launch.launched(cut.settles)
    with torch.cuda.graph(graph):
        chain()
    times = []
    for _ in range(3):
        scratch.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / CALLS)
    return min(times)


def sweep() -> None:
    """A column for each of SWEPT as batch/rows/context, a line for each tile and cut."""
    scratch = torch.empty(100_000_000, dtype=torch.uint8, device="cuda")  # twice the L2
    print(" " * 39 + "".join(f"{f'{b}/{r}/{c}':>10}" for b, r, c in SWEPT))
    for model, (heads, kv_heads, head_dim, _) in SHAPES.items():
        caches = caches_of(16 * 8192, kv_heads, head_dim, 8)
        order = 1 + torch.randperm(16 * 8192 // BLOCK, device="cuda").view(16, -1)
        usual = split.tile_of(head_dim, torch.bfloat16)
        for keys, warps, early in TILES[head_dim]:
            split._TILES[head_dim] = split.Tile(keys, usual.rows, warps, early)
            for name, change in CUTS.items():
                if (keys, warps, early) != TILES[head_dim][0] and name not in ("as it is", "whole 4"):
                    continue
                cut = replace(split.usual_cut(16, 16 * kv_heads, usual), **{"settles": True, "early": early, **change})
                line = []
                for batch, num_rows, context in SWEPT:
                    q = torch.randn(batch, num_rows, heads, head_dim, device="cuda").bfloat16()
                    line.append(cut_us(q, caches, order, context, scratch, cut))
                print(f"{model:14} {keys:4} x{warps} {name:>16} " + "".join(f"{us:10.2f}" for us in line), flush=True)
        split._TILES[head_dim] = usual
        del caches


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", action="store_true", help="also time prompts")
    parser.add_argument("--sweep", action="store_true", help="time ways to cut the work instead")
    arguments = parser.parse_args()
    with torch.inference_mode():
        if arguments.sweep:
            sweep()
        else:
            decode()
        if arguments.prefill:
            prefill()

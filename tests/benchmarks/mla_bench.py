"""Latent attention of one rank of Kimi-K2.5 at TP = 8 (8 heads) on one GPU: decode and verify rows, cold caches.

`python tests/benchmarks/mla_bench.py`; prints microseconds a layer, bytes of the cells read and the share of the
measured read ceiling, for the attention alone (two launches) and with the small steps around it (five: new cells,
queries absorbed, attention, values of every head). With --sweep, only the ways to cut the work; --prefill: prompts.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from slipstream.kernels.gpu import mla_attention as gpu
from slipstream.kernels.gpu.mla_split import COMBINE, Combine, Tile, decode_tile, prefill_tile
from slipstream.kernels.head_linear import head_linear
from slipstream.kernels.latent_rows import absorb_query, write_latent
from slipstream.kernels.paged_attention import AttentionRows, plan_rows
from slipstream.kernels.stream import Norm

READ_CEILING = 4.55e12  # bytes a second, measured (a Triton reduction)
HEADS, RANK, NOPE, ROPE, VALUE, LAYERS, SCALE = 8, 512, 128, 64, 128, 61, 0.14468
BLOCK, TOKENS = 16, 600_000  # of the whole cache: 690 MB
CASES = tuple((1, rows, context) for context in (256, 2048, 8192) for rows in (1, 2, 4, 8, 16))
CASES += ((4, 1, 2048), (4, 4, 2048), (16, 1, 2048), (16, 4, 2048), (16, 4, 8192))
Layer = Callable[[AttentionRows], object]


class Bench:
    def __init__(self) -> None:
        blocks = TOKENS // BLOCK
        shape = (1 + blocks, BLOCK, RANK + ROPE)
        self.cache = torch.zeros(shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.order = 1 + torch.randperm(blocks, device="cuda")
        self.scratch = torch.empty(100_000_000, dtype=torch.uint8, device="cuda")  # twice the L2

    def rows(self, batch: int, num_rows: int, context: int, layer: int, prefill: bool = False) -> AttentionRows:
        """Other blocks for each layer."""
        need = batch * context // BLOCK
        table = self.order.roll(-layer * need)[:need].view(batch, -1)
        table = torch.nn.functional.pad(table, (0, max(0, 8192 // BLOCK - table.shape[1])))
        positions = (context - num_rows + torch.arange(num_rows, device="cuda")).repeat(batch, 1)
        return plan_rows(table.contiguous(), positions, BLOCK, prefill)

    def us(self, layer: Layer, plans: list[AttentionRows]) -> float:
        """Microseconds a layer: the best of three replays of a graph of all, each with cold caches."""
        layer(plans[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for plan in plans:
                layer(plan)
        times = []
        for _ in range(3):
            self.scratch.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / len(plans))
        return min(times)

    def attention(self, batch: int, num_rows: int, **how: object) -> Layer:
        q = torch.randn(batch, num_rows, HEADS, RANK + ROPE, device="cuda").bfloat16()
        return lambda plan: gpu.mla_attention(q, self.cache, plan, SCALE, RANK, **how)  # type: ignore[arg-type]

    def whole(self, batch: int, num_rows: int) -> Layer:
        """With weights of a few layers in turn: 2 MB each, so that they come from memory only as often as they do."""
        count = batch * num_rows

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda").bfloat16()

        q, kv, angles = randn(count, HEADS, NOPE + ROPE), randn(count, RANK + ROPE), randn(2, count, ROPE)
        keys, values = randn(LAYERS, HEADS, RANK, NOPE), randn(LAYERS, HEADS, VALUE, RANK)
        norm, turn = Norm(randn(RANK), 1e-5), iter(range(10**9))

        def layer(plan: AttentionRows) -> object:
            at = next(turn) % LAYERS
            write_latent(kv, norm, *angles, self.cache, plan.write_index)
            made = absorb_query(q, keys[at], *angles).view(batch, num_rows, HEADS, -1)
            mixed = gpu.mla_attention(made, self.cache, plan, SCALE, RANK)
            return head_linear(mixed.flatten(0, 1), values[at])

        return layer


def table(bench: Bench, cases: tuple[tuple[int, int, int], ...] = CASES) -> None:
    print(f"{'batch':>5} {'rows':>4} {'context':>7} {'us':>7} {'MB':>7} {'of ceiling':>10} {'us with steps':>13}")
    for batch, num_rows, context in cases:
        plans = [bench.rows(batch, num_rows, context, layer) for layer in range(LAYERS)]
        us = bench.us(bench.attention(batch, num_rows), plans)
        whole = bench.us(bench.whole(batch, num_rows), plans)
        size = batch * context * (RANK + ROPE) * 2
        share = size / us * 1e6 / READ_CEILING
        print(f"{batch:5} {num_rows:4} {context:7} {us:7.2f} {size / 1e6:7.2f} {share:10.1%} {whole:13.2f}", flush=True)


SWEPT = ((1, 1, 256), (1, 4, 256), (1, 1, 2048), (1, 4, 2048), (1, 16, 2048), (1, 4, 8192), (16, 4, 2048))


def settings() -> dict[str, tuple[Tile, int, Combine]]:
    """Name: (tile, programs, how partials are put together). Tiles and `Combine` differ in rounding."""
    usual, programs = decode_tile(torch.bfloat16), gpu.PROGRAMS
    wide = replace(usual, keys=64, warps=8, stages=2, chunks=32)
    tiles = {
        "as it is": usual,
        "8 warps": replace(usual, warps=8),
        "8 warps, chunks 32": replace(usual, warps=8, chunks=32),
        "chunks 32": replace(usual, chunks=32),
        "keys 64, 8 warps": wide,
        "keys 64, 8 warps, chunks 64": replace(wide, chunks=64),
        "rows 32, keys 64, 8 warps": replace(wide, rows=32),
        "8 warps, stages 2": replace(usual, warps=8, stages=2),
        "keys 16": replace(usual, keys=16),
        "keys 16, 8 warps": replace(usual, keys=16, warps=8),
    }
    made = {}
    for name, tile in tiles.items():
        made[name] = (tile, programs, COMBINE)
        if len(made) == 2:  # these are quick to compile: before the rest of the tiles
            for columns, chunks, warps in ((128, 16, 4), (64, 16, 1), (32, 16, 1), (32, 32, 2), (128, 16, 2)):
                made[f"combine {columns} x {chunks} x {warps}"] = (usual, programs, Combine(columns, chunks, warps))
    return made


def sweep(bench: Bench, seconds: float) -> None:
    """A column for each of SWEPT as batch/rows/context, a line a setting, until the time is over."""
    stop = time.monotonic() + seconds
    plans = {case: [bench.rows(*case, layer) for layer in range(LAYERS)] for case in SWEPT}
    print(" " * 27 + "".join(f"{f'{b}/{r}/{c}':>10}" for b, r, c in SWEPT))
    for name, (tile, programs, combine) in settings().items():
        line = []
        for case in SWEPT:
            if time.monotonic() > stop:
                print("time is over")
                return
            try:
                layer = bench.attention(*case[:2], tile=tile, programs=programs, combine=combine)
                line.append(f"{bench.us(layer, plans[case]):10.2f}")
            except Exception as error:  # a tile that does not fit: the others still go on
                line.append(f"{type(error).__name__:>10}")
        print(f"{name:27}" + "".join(line), flush=True)


def prefill(bench: Bench) -> None:
    print(f"{'rows':>5} {'before':>7} {'us':>9} {'TFLOP/s':>8}")
    usual = prefill_tile(torch.bfloat16)
    for tile in (usual, replace(usual, rows=32, keys=32), replace(usual, keys=32)):
        for num_rows, before in ((512, 0), (2048, 0), (2048, 6144)):
            plans = [bench.rows(1, num_rows, before + num_rows, layer, prefill=True) for layer in range(4)]
            q = torch.randn(1, num_rows, HEADS, RANK + ROPE, device="cuda").bfloat16()

            def layer(plan: AttentionRows, q: torch.Tensor = q, tile: Tile = tile) -> object:
                return gpu.mla_prefill(q, bench.cache, plan, SCALE, RANK, tile=tile)

            us = bench.us(layer, plans)
            pairs = num_rows * before + num_rows * (num_rows + 1) / 2  # (row, key) that are seen
            rate = 2 * pairs * HEADS * (2 * RANK + ROPE) / us / 1e6
            print(f"{num_rows:5} {before:7} {us:9.1f} {rate:8.1f}  {tile.rows} x {tile.keys}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time ways to cut the work instead")
    parser.add_argument("--prefill", action="store_true", help="also time prompts")
    parser.add_argument("--seconds", type=float, default=600, help="of a sweep, at most")
    parser.add_argument("--short", action="store_true", help="a few cases of the table")
    arguments = parser.parse_args()
    with torch.inference_mode():
        made = Bench()
        if arguments.sweep:
            sweep(made, arguments.seconds)
        else:
            table(made, ((1, 1, 256), (1, 4, 2048), (16, 4, 8192)) if arguments.short else CASES)
        if arguments.prefill:
            prefill(made)

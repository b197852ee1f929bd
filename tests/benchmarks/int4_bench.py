"""Times matrix products over INT4 weights inside CUDA graphs, weights cold. By hand, on a GPU; ends within a minute:

    python tests/benchmarks/int4_bench.py [--only chains|shapes|triton] [--ceiling 4.55]

Shapes are those of an 8B Llama. `plan` is the kernel that serving takes; the others are the same sum cut otherwise (row
tiles . depth . staged . warps). A chain is the products of 32 layers, and the bf16 head, in one graph; no attention.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from slipstream.kernels import linear_add, norm_gate_up, norm_linear, norm_qkv
from slipstream.kernels.cuda import int4_launch, skinny_gemm
from slipstream.kernels.cuda.int4_launch import Variant
from slipstream.kernels.cuda.launch import Epilogue, Override
from slipstream.kernels.cuda.pack import pack
from slipstream.kernels.int4 import Int4Weight, dequantise, disarrange
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Norm, Stream

HEADS, HIDDEN, INNER, VOCABULARY, LAYERS = Heads(32, 8, 128), 4096, 14336, 128256, 32
ROWS = (1, 4, 16)
COLD_BYTES = 300e6  # weights rotate through so many: five times the L2
OPS = {
    "qkv": (6144, 4096, 64),
    "add o": (4096, 4096, 16),
    "gate_up": (28672, 4096, 14336),
    "add down": (4096, 14336, 16),
}
EPILOGUES = {"qkv": Epilogue.QKV, "add o": Epilogue.ADD, "gate_up": Epilogue.GATE_UP, "add down": Epilogue.ADD}


def random_weight(n: int, k: int, group: int, half: int) -> Int4Weight:
    words = torch.randint(-(2**31), 2**31, (n // 32, k // 32, 8, 16), dtype=torch.int32, device="cuda")
    scales = ((0.5 + torch.rand(n // 32, k // group, 8, 4, device="cuda")) * k**-0.5 / 4.6).bfloat16()
    return Int4Weight(words, scales, n, half)


class Inputs:
    """What the products of a layer read beside weights, for `rows` rows."""

    def __init__(self, rows: int) -> None:
        self.norm = Norm(torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda"), 1e-5)
        self.hidden = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        self.inner = torch.randn(rows, INNER, device="cuda").bfloat16()
        sums = self.hidden.float().square().unflatten(-1, (-1, 16)).sum(-1)  # [M, h] -> [M, h / 16]
        self.stream = Stream(self.hidden, sums)
        angles = 6 * torch.rand(rows, HEADS.dim // 2, device="cuda").repeat(1, 2)  # -> [M, dim]
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        cache = torch.zeros(8, 16, 2, HEADS.kv, HEADS.dim, dtype=torch.bfloat16, device="cuda")
        self.sink = KVSink(cache, torch.arange(rows, device="cuda"))

    def run(self, op: str, weight: Int4Weight, ops: Any = skinny_gemm, **more: Any) -> torch.Tensor:
        if op == "qkv":
            arguments = (self.stream, self.norm, weight, HEADS, self.cos, self.sin)
            return ops.norm_qkv(*arguments, sink=self.sink, **more)[0]
        if op == "gate_up":
            return ops.norm_gate_up(self.stream, self.norm, weight, **more)
        x = self.hidden if op == "add o" else self.inner
        return ops.linear_add(x, weight, self.stream, **more).rows


class Twins:
    """The ops as torch runs them: gradients are on, so that no kernel is taken."""

    norm_qkv = staticmethod(norm_qkv.norm_qkv)
    linear_add = staticmethod(linear_add.linear_add)
    norm_gate_up = staticmethod(norm_gate_up.norm_gate_up)
    norm_linear = staticmethod(norm_linear.norm_linear)


def seconds_per_replay(work: Callable[[], object], replays: int = 7) -> float:
    """Median time of one replay of the graph that `work` becomes."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    times = []
    for i in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    del kept
    return statistics.median(times)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def shapes(ceiling: float) -> list[dict[str, object]]:
    """One product alone, its launches in a row; each reads other weights."""
    results: list[dict[str, object]] = []
    for group in (128, 32):
        for op, (n, k, half) in OPS.items():
            copies = max(2, round(COLD_BYTES / (n * k / 2)))
            weights = [random_weight(n, k, group, half) for _ in range(copies)]
            for rows in ROWS:
                inputs = Inputs(rows)
                with torch.enable_grad():
                    expected = inputs.run(op, weights[-1], Twins)

                def work(
                    override: Override, op: str = op, inputs: Inputs = inputs, weights: list[Int4Weight] = weights
                ) -> torch.Tensor:
                    for weight in weights:
                        out = inputs.run(op, weight, override=override)
                    return out

                times: dict[str, float] = {}
                cuts = {"plan": Override(), "plan, no PDL": Override(pdl=False)}
                if group == 128 or rows == 1:
                    cuts |= {label(v): Override(variant=v) for v in others(op, rows)}  # type: ignore[arg-type]
                for name, override in cuts.items():
                    error = relative_error(work(override), expected)
                    assert error < 5e-3, f"{op}, group {group}, {rows} rows, {name}: relative error {error}"
                    times[name] = seconds_per_replay(lambda o=override: work(o)) / copies * 1e6
                rate = weights[0].nbytes / times["plan"] / 1e6
                rest = "  ".join(f"{name} {us:.2f}" for name, us in times.items() if name != "plan")
                plan = f"plan {times['plan']:6.2f} us {rate:5.2f} TB/s {rate / ceiling:4.0%}"
                print(f"g{group:<3} {op:8} {n:5} x {k:5} M={rows:<2} {plan} | {rest}", flush=True)
                results.append({"op": op, "n": n, "k": k, "group": group, "rows": rows, "us": times, "tbs": rate})
    return results


def others(op: str, rows: int) -> list[Variant]:
    """Cuts to compare with the plan."""
    n, k, _ = OPS[op]
    parts, _ = int4_launch.split_k(n, k)
    limit = int4_launch.shared_limit(90)
    plan = int4_launch.choose(EPILOGUES[op], rows, k, parts, limit)
    return [
        v
        for v in int4_launch.VARIANTS
        if v != plan
        and parts <= v.max_warps
        and 8 * v.row_tiles >= rows > 4 * v.row_tiles - 4
        and v.staged_bytes(rows, k) + v.sums_bytes(parts) <= limit
    ]


def label(variant: Variant) -> str:
    return f"{variant.row_tiles}.{variant.depth}.{int(variant.staged)}.{variant.max_warps}"


class Chain:
    """The matrix products of a whole decoder, attention left out (o_proj reads the queries)."""

    def __init__(self, group: int, layers: int = LAYERS) -> None:
        self.layers = [
            {op: random_weight(n, k, group, half) for op, (n, k, half) in OPS.items()} for _ in range(layers)
        ]
        self.int4_bytes = sum(w.nbytes for layer in self.layers for w in layer.values())

    def forward(self, inputs: Inputs, ops: Any = skinny_gemm, **more: Any) -> Stream:
        stream = inputs.stream
        for layer in self.layers:
            arguments = (stream, inputs.norm, layer["qkv"], HEADS, inputs.cos, inputs.sin)
            q, _, _ = ops.norm_qkv(*arguments, sink=inputs.sink, **more)
            stream = ops.linear_add(q.flatten(1), layer["add o"], stream, **more)  # [M, q, d] -> [M, q d]
            inner = ops.norm_gate_up(stream, inputs.norm, layer["gate_up"], **more)
            stream = ops.linear_add(inner, layer["add down"], stream, **more)
        return stream


def check(group: int) -> None:
    """Two layers against the torch twins, with dependent launch against without, and a row alone against four."""
    chain, inputs = Chain(group, 2), Inputs(4)
    with torch.enable_grad():
        expected = chain.forward(inputs, Twins).rows
    found = chain.forward(inputs, override=Override(pdl=True)).rows
    same = found.equal(chain.forward(inputs, override=Override(pdl=False)).rows)
    alone = Inputs(1)
    alone.stream = Stream(inputs.hidden[:1], inputs.stream.sumsq[:1])  # type: ignore[index]
    alone.cos, alone.sin = inputs.cos[:1], inputs.sin[:1]
    one = found[:1].equal(chain.forward(alone).rows)
    print(f"g{group}: two layers, relative error to the twins {relative_error(found, expected):.5f}, ", end="")
    print(f"same bits without PDL: {same}, alone: {one}", flush=True)
    assert same
    assert one


def chains(ceiling: float) -> list[dict[str, object]]:
    """32 layers and the head in one graph."""
    results: list[dict[str, object]] = []
    head = pack(torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device="cuda").normal_(std=HIDDEN**-0.5))
    for group in (128, 32):
        check(group)
        chain = Chain(group)
        for rows in ROWS:
            inputs = Inputs(rows)
            head_bytes = 2 * VOCABULARY * HIDDEN
            for name, with_head, override in (
                ("layers", False, Override()),
                ("layers, no PDL", False, Override(pdl=False)),
                ("layers, no evict_first", False, Override(evict_first=False)),
                ("layers + head", True, Override()),
            ):

                def work(
                    chain: Chain = chain, inputs: Inputs = inputs, with_head: bool = with_head, o: Override = override
                ) -> object:
                    stream = chain.forward(inputs, override=o)
                    return skinny_gemm.norm_linear(stream, inputs.norm, head) if with_head else stream

                seconds = seconds_per_replay(work)
                rate = (chain.int4_bytes + with_head * head_bytes) / seconds / 1e12
                words = f"{seconds * 1e3:6.3f} ms {rate:5.2f} TB/s {rate / ceiling:4.0%}"
                print(f"g{group:<3} M={rows:<2} {name:22} {words}", flush=True)
                results.append({"chain": name, "group": group, "rows": rows, "ms": seconds * 1e3, "tbs": rate})
        del chain
        torch.cuda.empty_cache()
    return results


def triton(ceiling: float) -> list[dict[str, object]]:
    """The portable kernel on the same shapes, one row."""
    from slipstream.kernels.gpu.int4_linear import linear_int4

    results: list[dict[str, object]] = []
    for group in (128, 32):
        for op, (n, k, _) in OPS.items():
            copies = max(2, round(COLD_BYTES / (n * k / 2)))
            weights = [random_weight(n, k, group, 16) for _ in range(copies)]
            x = torch.randn(1, k, device="cuda").bfloat16()
            error = relative_error(linear_int4(x, weights[0]), x.float() @ dequantise(*disarrange(weights[0])).T)
            assert error < 5e-3, f"Triton, {op}, group {group}: relative error {error}"
            us = seconds_per_replay(lambda x=x, weights=weights: [linear_int4(x, w) for w in weights]) / copies * 1e6
            rate = weights[0].nbytes / us / 1e6
            print(
                f"Triton g{group:<3} {n:5} x {k:5} M=1 {us:6.2f} us {rate:5.2f} TB/s {rate / ceiling:4.0%}", flush=True
            )
            results.append({"triton": op, "n": n, "k": k, "group": group, "us": us, "tbs": rate})
    return results


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("chains", "shapes", "triton"))
    parser.add_argument("--ceiling", type=float, default=4.55, help="TB/s of a pure read")
    args = parser.parse_args()
    began = time.monotonic()
    int4_launch.load(torch.cuda.current_device())
    print(
        f"{torch.cuda.get_device_name()}: kernels compiled and loaded in {time.monotonic() - began:.1f} s", flush=True
    )
    results: list[dict[str, object]] = []
    for name, part in (("chains", chains), ("shapes", shapes), ("triton", triton)):
        if args.only in (None, name):
            results += part(args.ceiling)
            print(f"[{name}: {time.monotonic() - began:.1f} s since the start]", flush=True)
            torch.cuda.empty_cache()
    if out := os.environ.get("OUT"):
        with open(os.path.join(out, "int4.json"), "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()

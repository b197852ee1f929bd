"""Times matrix products over INT4 weights inside CUDA graphs, weights cold. By hand, on a GPU; ends within a minute:

    python tests/benchmarks/int4_bench.py [--only check|chains|shapes|triton] [--ceiling 4.55]

Shapes are those of an 8B Llama. `plan` is the kernel that serving takes; the others are the same sum cut otherwise (row
tiles . depth . staged . warps). A chain is the products of 32 layers, and the bf16 head, in one graph; no attention.
"""

import argparse
import copy
import json
import os
import time
from typing import Any

import torch
from cold_graphs import TWINS, copies_of, relative_error, seconds_per_replay

from slipstream.kernels.cuda import int4_launch, skinny_gemm
from slipstream.kernels.cuda.int4_launch import Variant
from slipstream.kernels.cuda.launch import Epilogue, Override
from slipstream.kernels.cuda.pack import pack
from slipstream.kernels.int4 import Int4Weight, dequantise, disarrange
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Norm, Stream

HEADS, HIDDEN, INNER, VOCABULARY, LAYERS = Heads(32, 8, 128), 4096, 14336, 128256, 32
ROWS = (1, 4, 8, 16)
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

    def first(self, rows: int) -> "Inputs":
        """The same for the first rows alone."""
        made = copy.copy(self)
        made.hidden, made.inner, made.cos, made.sin = (
            one[:rows] for one in (self.hidden, self.inner, self.cos, self.sin)
        )
        assert self.stream.sumsq is not None
        made.stream = Stream(made.hidden, self.stream.sumsq[:rows])
        made.sink = KVSink(self.sink.cache, self.sink.write_index[:rows])
        return made

    def run(self, op: str, weight: Int4Weight, ops: Any = skinny_gemm, **more: Any) -> torch.Tensor:
        if op == "qkv":
            arguments = (self.stream, self.norm, weight, HEADS, self.cos, self.sin)
            return ops.norm_qkv(*arguments, sink=self.sink, **more)[0]
        if op == "gate_up":
            return ops.norm_gate_up(self.stream, self.norm, weight, **more)
        x = self.hidden if op == "add o" else self.inner
        return ops.linear_add(x, weight, self.stream, **more).rows


def shapes(ceiling: float) -> list[dict[str, object]]:
    """One product alone, its launches in a row; each reads other weights."""
    results: list[dict[str, object]] = []
    for group in (128, 32):
        for op, (n, k, half) in OPS.items():
            copies = copies_of(n * k / 2)
            weights = [random_weight(n, k, group, half) for _ in range(copies)]
            for rows in ROWS:
                inputs = Inputs(rows)
                with torch.enable_grad():
                    expected = inputs.run(op, weights[-1], TWINS)

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
    """Two layers of sixteen rows against the torch twins; their bits in fewer rows and without PDL."""
    chain, inputs = Chain(group, 2), Inputs(16)
    with torch.enable_grad():
        expected = chain.forward(inputs, TWINS).rows
    found = chain.forward(inputs).rows
    error = relative_error(found, expected)
    same = {}
    for rows in (1, 3, 8, 16):
        few = inputs.first(rows)
        for pdl in (False, True):
            same[f"{rows} rows, PDL {pdl}"] = found[:rows].equal(chain.forward(few, override=Override(pdl=pdl)).rows)
    other = [name for name, equal in same.items() if not equal]
    words = f"relative error to the twins {error:.5f}; {len(same)} runs, other bits: {other or 'none'}"
    print(f"g{group}: two layers, {words}", flush=True)
    assert error < 1e-2
    assert not other


def checks(_: float) -> list[dict[str, object]]:
    for group in (128, 32):
        check(group)
    return []


def chains(ceiling: float) -> list[dict[str, object]]:
    """32 layers and the head in one graph."""
    results: list[dict[str, object]] = []
    head = pack(torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device="cuda").normal_(std=HIDDEN**-0.5))
    for group in (128, 32):
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
            copies = copies_of(n * k / 2)
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


PARTS = {"check": checks, "chains": chains, "shapes": shapes, "triton": triton}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=tuple(PARTS))
    parser.add_argument("--ceiling", type=float, default=4.55, help="TB/s of a pure read")
    args = parser.parse_args()
    began = time.monotonic()
    int4_launch.load(torch.cuda.current_device())
    print(
        f"{torch.cuda.get_device_name()}: kernels compiled and loaded in {time.monotonic() - began:.1f} s", flush=True
    )
    results: list[dict[str, object]] = []
    for name, part in PARTS.items():
        if args.only in (None, name):
            results += part(args.ceiling)
            print(f"[{name}: {time.monotonic() - began:.1f} s since the start]", flush=True)
            torch.cuda.empty_cache()
    if out := os.environ.get("OUT"):
        with open(os.path.join(out, "int4.json"), "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()

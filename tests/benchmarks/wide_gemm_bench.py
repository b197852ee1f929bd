"""Times the CUDA C++ products of 9 and more rows beside the kernels for few rows, weights cold. By hand, on a GPU:

    python -P tests/benchmarks/wide_gemm_bench.py

First every cut's bits are compared with the other kernels'. Names of cuts: rows a CTA takes x weight rows of a unit;
`KB` at the end: shared memory that a CTA may take, where it is another than what serving takes.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slipstream.kernels.cuda import launch, skinny_gemm, wide_launch
from slipstream.kernels.cuda.launch import Override
from slipstream.kernels.cuda.pack import RowOrder, pack
from slipstream.kernels.cuda.wide_launch import Cut
from slipstream.kernels.norm_qkv import Heads
from slipstream.kernels.stream import Norm, Stream

ROWS = (9, 16, 32, 64, 128, 256)
CASES = (  # op, N, K
    ("qkv", 6144, 4096),
    ("add", 4096, 4096),
    ("gate_up", 28672, 4096),
    ("add", 4096, 14336),
    ("store", 128256, 4096),
    ("store", 49152, 576),
)
HEADS = Heads(32, 8, 128)
COLD_BYTES = 300e6
OLD = Override(wide=False)
began = time.monotonic()


class Product:
    """One op on random inputs; its weights rotate through more bytes than the L2 has."""

    def __init__(self, op: str, n: int, k: int) -> None:
        self.op, self.n, self.k, self.bytes = op, n, k, 2 * n * k
        order = {"qkv": RowOrder.HEADS, "gate_up": RowOrder.GATE_UP}.get(op, RowOrder.ROWS)
        plain = torch.empty(n, k, dtype=torch.bfloat16, device="cuda").normal_(std=k**-0.5)
        self.weights = [pack(plain, order, HEADS.dim if op == "qkv" else 0)]
        self.weights += [
            dataclasses.replace(self.weights[0], data=self.weights[0].data.clone())
            for _ in range(max(1, round(COLD_BYTES / self.bytes) - 1))
        ]
        self.norm = Norm(1 + 0.1 * torch.randn(k, device="cuda").bfloat16(), 1e-5)
        self.x = torch.randn(max(ROWS), k, device="cuda").bfloat16()
        self.sums = self.x.float().square().unflatten(-1, (-1, 16)).sum(-1)  # [M, K] -> [M, K / 16]
        self.residual = torch.randn(max(ROWS), n, device="cuda").bfloat16()
        angles = 6 * torch.rand(max(ROWS), HEADS.dim // 2, device="cuda").repeat(1, 2)  # -> [M, dim]
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def run(self, rows: int, override: Override, weight: int = 0) -> list[torch.Tensor]:
        w, x = self.weights[weight], self.x[:rows]
        stream = Stream(x, self.sums[:rows])
        if self.op == "add":
            made = skinny_gemm.linear_add(x, w, Stream(self.residual[:rows]), override=override)
            return [made.rows, made.sumsq]
        if self.op == "gate_up":
            return [skinny_gemm.norm_gate_up(stream, self.norm, w, override=override)]
        if self.op == "store":
            return [skinny_gemm.norm_linear(stream, self.norm, w, override=override)]
        cos, sin = self.cos[:rows], self.sin[:rows]
        return list(skinny_gemm.norm_qkv(stream, self.norm, w, HEADS, cos, sin, override=override))

    def all_weights(self, rows: int, override: Override) -> list[torch.Tensor]:
        for i in range(len(self.weights)):
            made = self.run(rows, override, i)
        return made


def name(cut: Cut) -> str:
    return f"{cut.variant.columns}x{16 * cut.unit_tiles}"


def cuts(rows: int) -> list[Cut]:
    """Not the lowest units: they read x most often."""
    found = wide_launch.cuts(rows, wide_launch._device(torch.cuda.current_device()))
    return [cut for cut in found if cut.unit_tiles >= 4]


@contextlib.contextmanager
def shared_bytes_of(shared: tuple[int, int] | None) -> Iterator[None]:
    """A card on which a CTA may take so much shared memory: alone on a multiprocessor, beside another."""
    kept = wide_launch._device
    if shared is not None:
        card = dataclasses.replace(kept(torch.cuda.current_device()), shared_bytes=shared)
        wide_launch._device = lambda device: card
    try:
        yield
    finally:
        wide_launch._device = kept


def check(product: Product) -> None:
    compared, wrong = 0, []
    for rows in (9, 16, 23, 32, 61, 64, 100, 128, 250):
        expected = product.run(rows, OLD)
        for cut in cuts(rows):
            for pdl in (False, True):
                found = product.run(rows, Override(wide=cut, pdl=pdl))
                torch.cuda.synchronize()
                compared += 1
                if not all(a.equal(b) for a, b in zip(found, expected, strict=True)):
                    wrong.append(f"{rows} rows {name(cut)} pdl={pdl}")
    words = f"OTHER BITS {len(wrong)}: {wrong[:6]}" if wrong else "all bits equal"
    print(f"{product.op} {product.n} x {product.k}: {compared} compared, {words}", flush=True)


def shapes(product: Product, bench: Any) -> None:
    device = wide_launch._device(torch.cuda.current_device())
    for rows in ROWS:
        cases = [("old", OLD, None), *((name(cut), Override(wide=cut), None) for cut in cuts(rows))]
        if rows == 16:
            alone, _ = device.shared_bytes
            best = cuts(rows)[0]
            cases.append((f"{name(best)} 80KB", Override(wide=best), (alone, 80 << 10)))
            cases.append((f"{name(best)} {alone >> 10}KB", Override(wide=best), (alone, alone)))
            cases.append((f"{name(best)} no PDL", Override(wide=best, pdl=False), None))
        line = f"{product.op:7} {product.n:6}x{product.k:<5} M={rows:<3}"
        for words, override, shared in cases:
            with shared_bytes_of(shared):
                work = functools.partial(product.all_weights, rows, override)
                us = bench.seconds_per_replay(work, 5) / len(product.weights) * 1e6
            line += f" | {words} {us:.1f} ({product.bytes / us / 1e6:.2f})"
        tiles = -(-product.n // 16)
        parts = launch.split_k(product.k, product.op != "add")[0]
        chosen = min(cuts(rows), key=lambda cut: wide_launch.cost(cut, rows, tiles, parts, device))
        print(f"{line} | model: {name(chosen)}", flush=True)


def clusters() -> None:
    """How many clusters the card holds, by their size."""
    index = torch.cuda.current_device()
    device = wide_launch._device(index)
    for variant in wide_launch.VARIANTS:
        cut = Cut(variant, variant.max_tiles)
        function = wide_launch._module(launch.Epilogue.ADD, index).functions[variant.name(launch.Epilogue.ADD, False)]
        threads = 32 * (variant.max_warps + variant.x_warps + 1)
        shared = wide_launch.shared_bytes(cut, device)
        found = []
        for size in (1, 2, 3, 4, 5, 6, 8):
            try:
                found.append(f"{size}: {function.most_clusters(size, threads, shared)}")
            except RuntimeError as error:
                found.append(f"{size}: {error}")
        words = f"{threads} threads, {shared >> 10} KB, {wide_launch.slots(cut, device)} slots"
        print(f"{name(cut)}: {words}; clusters by size {', '.join(found)}", flush=True)


def chains(bench: Any) -> None:
    alone, half = wide_launch._device(torch.cuda.current_device()).shared_bytes
    kept = wide_launch.FROM_ROWS
    for words, made in (
        ("SmolLM2", lambda: bench.Chain(30, 576, Heads(9, 3, 64), 1536, 49152)),
        ("8B", lambda: bench.Chain(32, 4096, HEADS, 14336, 128256)),
    ):
        chain = made()
        for rows in (16, 32, 64, 128):
            x = torch.randn(rows, chain.hidden, device="cuda").bfloat16()
            line = f"chain {words} M={rows:<3}"
            results = []
            for label, from_rows, shared, override in (
                ("old", 1 << 30, None, Override()),
                ("wide", 9, None, Override()),
                ("wide, no PDL", 9, None, Override(pdl=False)),
                ("wide, 80 KB", 9, (alone, 80 << 10), Override()),
                ("wide, 1 CTA an SM", 9, (alone, alone), Override()),
                ("wide, 160 KB", 9, (160 << 10, half), Override()),
                ("wide, evict normal", 9, None, Override(evict_first=False)),
            ):
                if (rows > 32 and shared and shared[0] == alone) or (rows <= 32 and shared and shared[0] != alone):
                    continue  # changes nothing there
                wide_launch.FROM_ROWS = from_rows
                with shared_bytes_of(shared):
                    work = functools.partial(chain.forward, x, skinny_gemm, override=override)
                    ms = bench.seconds_per_replay(work, 5) * 1e3
                    results.append(work())
                line += f" | {label} {ms:.3f} ({chain.bytes / ms / 1e9:.2f})"
            same = all(one.equal(results[0]) for one in results)
            print(f"{line} | bits equal: {same}", flush=True)
        wide_launch.FROM_ROWS = kept
        chain = None
        torch.cuda.empty_cache()


@torch.no_grad()
def main() -> None:
    # A script, not a module of a package: its neighbour is loaded by its path.
    spec = importlib.util.spec_from_file_location("bench", Path(__file__).with_name("skinny_gemm_bench.py"))
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    launch.load(torch.cuda.current_device())
    print(f"compiled and loaded in {time.monotonic() - began:.1f} s", flush=True)
    clusters()
    for case in CASES:
        check(Product(*case))
    print(f"{time.monotonic() - began:.1f} s", flush=True)
    chains(bench)
    print(f"{time.monotonic() - began:.1f} s", flush=True)
    for case in CASES:
        shapes(Product(*case), bench)
    print(f"done in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()

"""Times the CUDA C++ products of 9 and more rows beside the kernels for few rows, weights cold. By hand, on a GPU:

    python tests/benchmarks/wide_gemm_bench.py

First every cut's bits are compared with the other kernels'. Names of cuts: rows a CTA takes x weight rows of a unit /
pairs of parts side by side, c: CTAs of a cluster. Then chains as they are cut; each product by every cut, the fastest
first; and chains with each product's fastest cut.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import skinny_gemm_bench as bench
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
    return f"{cut.variant.columns}x{16 * cut.unit_tiles}/{cut.split}c{cut.cluster}"


def cuts(product: Product, rows: int) -> list[Cut]:
    """Not those with one or two warps."""
    parts = launch.split_k(product.k, product.op != "add")[0]
    found = wide_launch.cuts(rows, parts, wide_launch._device(torch.cuda.current_device()))
    return [cut for cut in found if cut.warps >= 3]


def check(product: Product) -> None:
    compared, wrong = 0, []
    for rows in (9, 16, 29, 61, 100, 250):
        expected = product.run(rows, OLD)
        for i, cut in enumerate(cuts(product, rows)):
            found = product.run(rows, Override(wide=cut, pdl=(i + rows) % 2 == 0))
            torch.cuda.synchronize()
            compared += 1
            if not all(a.equal(b) for a, b in zip(found, expected, strict=True)):
                wrong.append(f"{rows} rows {name(cut)}")
    words = f"OTHER BITS {len(wrong)}: {wrong[:6]}" if wrong else "all bits equal"
    print(f"{product.op} {product.n} x {product.k}: {compared} compared, {words}", flush=True)


def shapes(product: Product, best: dict[tuple[int, int, int], Cut | None]) -> None:
    """Fills `best`: by rows, tiles and K the fastest cut, None for the old kernels."""
    device = wide_launch._device(torch.cuda.current_device())
    tiles = -(-product.n // 16)
    for rows in ROWS:
        cases = [("old", None), *((name(cut), cut) for cut in cuts(product, rows))]
        times: list[tuple[float, str, Cut | None]] = []
        for words, cut in cases:
            work = functools.partial(product.all_weights, rows, OLD if cut is None else Override(wide=cut))
            times.append((bench.seconds_per_replay(work, 5) / len(product.weights) * 1e6, words, cut))
        parts = launch.split_k(product.k, product.op != "add")[0]
        chosen = wide_launch.choose(rows, tiles, product.k, parts, device)
        ranked = sorted(times, key=lambda one: one[0])
        best[rows, tiles, product.k] = ranked[0][2]
        said = {words: us for us, words, _ in ranked[:5]}
        for group in ("c1", "c2", "c4"):  # the fastest of each
            said.update(next(({w: us} for us, w, _ in ranked if w.endswith(group)), {}))
        shown = " | ".join(f"{w} {us:.1f}" for w, us in sorted(said.items(), key=lambda one: one[1]))
        us, words = next((us, words) for us, words, cut in times if cut == chosen)
        old = f"old {times[0][0]:.1f}, best {product.bytes / ranked[0][0] / 1e6:.2f} TB/s"
        line = f"{product.op:7} {product.n:6}x{product.k:<5} M={rows:<3} {old} | {shown}"
        print(f"{line} | chosen: {words} {us:.1f}", flush=True)


def clusters() -> None:
    """How many clusters the card holds, by their size."""
    index = torch.cuda.current_device()
    device = wide_launch._device(index)
    for variant in wide_launch.VARIANTS:
        cut = Cut(variant, 2, 4 // variant.groups)
        function = wide_launch._module(launch.Epilogue.ADD, index).functions[variant.name(launch.Epilogue.ADD)]
        shared = wide_launch.shared_bytes(cut, device)
        found = ", ".join(f"{n}: {function.most_clusters(n, 32 * (cut.warps + 1), shared)}" for n in (1, 2, 4))
        print(f"{name(cut)}: {shared >> 10} KB, {wide_launch.slots(cut, device)} slots; clusters {found}", flush=True)


def chains(sizes: str, choices: dict[str, Callable[..., Cut | None] | None]) -> None:
    """choices: by a name what takes the place of wide_launch.choose; None: the old kernels."""
    made = {
        "SmolLM2": lambda: bench.Chain(30, 576, Heads(9, 3, 64), 1536, 49152),
        "8B": lambda: bench.Chain(32, 4096, HEADS, 14336, 128256),
    }
    kept = wide_launch.choose
    chain = made[sizes]()
    for rows in (16, 32, 64, 128):
        x = torch.randn(rows, chain.hidden, device="cuda").bfloat16()
        line = f"chain {sizes} M={rows:<3}"
        results = []
        for label, choice in choices.items():
            wide_launch.choose = (lambda *given: None) if choice is None else choice
            override = Override(pdl=False) if "no PDL" in label else Override()
            work = functools.partial(chain.forward, x, skinny_gemm, override=override)
            ms = bench.seconds_per_replay(work, 5) * 1e3
            results.append(work())
            line += f" | {label} {ms:.3f} ({chain.bytes / ms / 1e9:.2f})"
        same = all(one.equal(results[0]) for one in results)
        print(f"{line} | bits equal: {same}", flush=True)
    wide_launch.choose = kept
    del chain
    torch.cuda.empty_cache()


@torch.no_grad()
def main() -> None:
    launch.load(torch.cuda.current_device())
    print(f"compiled and loaded in {time.monotonic() - began:.1f} s", flush=True)
    clusters()
    for case in CASES:
        check(Product(*case))
    print(f"{time.monotonic() - began:.1f} s", flush=True)
    choices: dict[str, Callable[..., Cut | None] | None] = {
        "old": None,
        "chosen": wide_launch.choose,
        "no PDL": wide_launch.choose,
    }
    chains("SmolLM2", choices)
    chains("8B", choices)
    print(f"{time.monotonic() - began:.1f} s", flush=True)
    best: dict[tuple[int, int, int], Cut | None] = {}
    for case in CASES:
        shapes(Product(*case), best)
        print(f"{time.monotonic() - began:.1f} s", flush=True)

    def fastest(rows: int, tiles: int, width: int, parts: int, device: wide_launch.Device) -> Cut | None:
        return best.get((rows, tiles, width))

    chains("8B", {"old": None, "fastest cuts": fastest, "no PDL": fastest})
    print(f"done in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()

"""Times the CUDA C++ matrix products of the decode path inside CUDA graphs, weights cold. By hand, on a GPU:

    python tests/benchmarks/skinny_gemm_bench.py [--only shapes|chains|dependent] [--ceiling 4.55]

Times are the median of graph replays. `plan` is the kernel that serving would take; the others are the same sum cut
otherwise: row tiles . weight tiles . depth . depth of x, b in front for bulk copies.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from cold_graphs import TWINS, copies_of, relative_error, seconds_per_replay

from slipstream.kernels.cuda import launch, skinny_gemm
from slipstream.kernels.cuda.launch import Override, Variant
from slipstream.kernels.cuda.pack import PackedWeight, RowOrder, pack
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Norm, Stream

SHAPES = (  # N, K
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (128256, 4096),
    (960, 576),
    (576, 576),
    (3072, 576),
    (576, 1536),
    (49152, 576),
)
ROWS = (1, 4, 8, 16, 64)


@contextlib.contextmanager
def bulk_bytes_of(bulk_bytes: int | None) -> Iterator[None]:
    """A card on which a CTA may take so much shared memory for a ring (0: none); None: as it is."""
    kept = launch._device
    if bulk_bytes is not None:
        card = dataclasses.replace(kept(torch.cuda.current_device()), bulk_bytes=bulk_bytes)
        launch._device = lambda device: card
    try:
        yield
    finally:
        launch._device = kept


def others(rows: int) -> list[tuple[str, Override]]:
    """Cuts to compare with the plan: every kernel that takes the rows in at most eight groups, few to spare."""
    found = []
    for variant in launch.VARIANTS:
        if rows <= 8 * 8 * variant.row_tiles and (variant.row_tiles == 1 or rows > 4 * variant.row_tiles):
            found.append((label(variant), Override(variant=variant)))
    return found


def label(variant: Variant) -> str:
    cut = f"{variant.row_tiles}.{variant.weight_tiles}.{variant.depth}.{variant.x_depth}"
    return f"b{cut}" if variant.bulk else cut


def shapes(ceiling: float) -> list[dict[str, object]]:
    """One product alone, its launches in a row; each reads other weights."""
    results = []
    for n, k in SHAPES:
        copies = copies_of(2 * n * k)
        plain = torch.empty(n, k, dtype=torch.bfloat16, device="cuda").normal_(std=k**-0.5)
        weights = [pack(plain) for _ in range(copies)]
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda").bfloat16()
            stream = Stream(x)
            expected = F.linear(x.float(), plain.float())
            times: dict[str, float] = {}

            def kernel(
                override: Override, stream: Stream = stream, weights: list[PackedWeight] = weights
            ) -> torch.Tensor:
                for weight in weights:
                    out = skinny_gemm.norm_linear(stream, None, weight, override=override)
                return out

            for name, override in [
                ("plan", Override()),
                ("plan, no PDL", Override(pdl=False)),
                *others(rows),
            ]:
                try:
                    error = relative_error(kernel(override), expected)
                except ValueError:
                    continue  # more parts than this kernel has registers for
                assert error < 5e-3, f"{n} x {k}, {rows} rows, {name}: relative error {error}"
                times[name] = seconds_per_replay(lambda o=override: kernel(o)) / copies * 1e6
            rate = 2 * n * k / times["plan"] / 1e6
            rest = "  ".join(f"{name} {us:.2f}" for name, us in times.items() if name != "plan")
            plan = f"plan {times['plan']:7.2f} us {rate:5.2f} TB/s {rate / ceiling:4.0%}"
            print(f"{n:6} x {k:5} M={rows:<3} {plan} | {rest}", flush=True)
            results.append({"n": n, "k": k, "rows": rows, "us": times})
        del weights, plain
    return results


def dependent() -> list[dict[str, object]]:
    """Latency: products of which each reads what the one before wrote, without a norm in front and with one."""
    results = []
    for width in (576, 4096):
        layers = 64
        weights = [
            pack(torch.empty(width, width, dtype=torch.bfloat16, device="cuda").normal_(std=width**-0.5))
            for _ in range(layers)
        ]
        norm = Norm(torch.ones(width, dtype=torch.bfloat16, device="cuda"), 1e-5)
        for rows in (1, 4, 16):
            x = torch.randn(rows, width, device="cuda").bfloat16()
            sums = x.float().square().unflatten(-1, (-1, 16)).sum(-1)  # [M, width] -> [M, width / 16]

            def adds(x: torch.Tensor = x, weights: list[PackedWeight] = weights) -> torch.Tensor:
                stream = Stream(x)
                for weight in weights:
                    stream = skinny_gemm.linear_add(stream.rows, weight, stream)
                return stream.rows

            def plain(
                norm: Norm | None, sums: torch.Tensor | None, x: torch.Tensor = x, weights: list[PackedWeight] = weights
            ) -> torch.Tensor:
                for weight in weights:
                    x = skinny_gemm.norm_linear(Stream(x, sums), norm, weight)
                return x

            times = {
                "linear_add": adds,
                "linear": functools.partial(plain, None, None),
                "norm_linear, sums given": functools.partial(plain, norm, sums),
                "norm_linear, rows read": functools.partial(plain, norm, None),
            }
            us = {name: seconds_per_replay(work) / layers * 1e6 for name, work in times.items()}
            print(f"dependent {width} x {width} M={rows:<3} " + "  ".join(f"{n} {t:.2f} us" for n, t in us.items()))
            results.append({"dependent": width, "rows": rows, "us": us})
    return results


class Chain:
    """The matrix products of a whole decoder, attention left out (o_proj reads the queries)."""

    def __init__(self, layers: int, hidden: int, heads: Heads, inner: int, vocab: int) -> None:
        def weight(n: int, k: int) -> torch.Tensor:
            return torch.empty(n, k, dtype=torch.bfloat16, device="cuda").normal_(std=k**-0.5)

        self.heads, self.hidden = heads, hidden
        self.norm = Norm(torch.ones(hidden, dtype=torch.bfloat16, device="cuda"), 1e-5)
        qkv = (heads.q + 2 * heads.kv) * heads.dim
        layers = [
            (weight(qkv, hidden), weight(hidden, heads.q * heads.dim), weight(2 * inner, hidden), weight(hidden, inner))
            for _ in range(layers)
        ]
        self.plain = [*layers, (weight(vocab, hidden),)]
        self.bytes = 2 * sum(w.numel() for layer in self.plain for w in layer)
        orders = (RowOrder.HEADS, RowOrder.ROWS, RowOrder.GATE_UP, RowOrder.ROWS)
        self.packed = [tuple(pack(w, o, heads.dim) for w, o in zip(layer, orders, strict=True)) for layer in layers]
        self.packed.append((pack(self.plain[-1][0]),))
        angles = 6 * torch.rand(128, heads.dim // 2, device="cuda").repeat(1, 2)  # -> [128, dim]
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.cells = torch.arange(128, device="cuda")
        self.cache = torch.zeros(8, 16, 2, heads.kv, heads.dim, dtype=torch.bfloat16, device="cuda")

    def forward(self, x: torch.Tensor, ops: Any, **more: Any) -> torch.Tensor:
        """x: [M, hidden] -> [M, vocab]; ops: an object with the four functions, the twins' take plain weights."""
        rows = x.shape[0]
        cos, sin, sink = self.cos[:rows], self.sin[:rows], KVSink(self.cache, self.cells[:rows])
        stream = Stream(x, x.float().square().unflatten(-1, (-1, 16)).sum(-1))  # [M, hidden] -> [M, hidden / 16]
        *layers, (head,) = self.plain if ops is TWINS else self.packed
        for qkv, out, gate_up, down in layers:
            q, _, _ = ops.norm_qkv(stream, self.norm, qkv, self.heads, cos, sin, sink=sink, **more)
            stream = ops.linear_add(q.flatten(1), out, stream, **more)  # [M, q, d] -> [M, q d]
            inner = ops.norm_gate_up(stream, self.norm, gate_up, **more)
            stream = ops.linear_add(inner, down, stream, **more)
        return ops.norm_linear(stream, self.norm, head, **more)


def check(chain: Chain, name: str) -> None:
    """The chain against the torch twins, and with dependent launch against without."""
    x = torch.randn(4, chain.hidden, device="cuda").bfloat16()
    with torch.enable_grad():  # as training runs them: without the Triton kernels
        expected = chain.forward(x, TWINS).float()
    found = chain.forward(x, skinny_gemm, override=Override(pdl=True))
    error = relative_error(found, expected)
    same = found.equal(chain.forward(x, skinny_gemm, override=Override(pdl=False)))
    one = found[:1].equal(chain.forward(x[:1], skinny_gemm))
    with bulk_bytes_of(0):
        bulk = found.equal(chain.forward(x, skinny_gemm))
    words = f"same bits without PDL: {same}, alone: {one}, without bulk copies: {bulk}"
    print(f"{name}: relative error to the twins {error:.4f}, {words}", flush=True)


def chains(ceiling: float) -> list[dict[str, object]]:
    """A whole decoder in one graph, with dependent launch and without."""
    results = []
    for name, made in (
        ("SmolLM2-135M sizes", lambda: Chain(30, 576, Heads(9, 3, 64), 1536, 49152)),
        ("Llama-3.1-8B sizes", lambda: Chain(32, 4096, Heads(32, 8, 128), 14336, 128256)),
    ):
        chain = made()
        check(chain, name)
        for rows in ROWS:
            x = torch.randn(rows, chain.hidden, device="cuda").bfloat16()
            line = f"{name} M={rows:<3}"
            times = {}
            for words, override, bulk_bytes in (
                ("plan", Override(), None),
                ("no PDL", Override(pdl=False), None),
                ("evict_first off", Override(evict_first=False), None),
                ("no bulk copies", Override(), 0),
                ("long rings", Override(), 113 << 10),
                (label(launch.TWO_TILES), Override(variant=launch.TWO_TILES), None),
            ):
                if words not in ("plan", "no PDL") and rows > 16:
                    continue
                try:
                    with bulk_bytes_of(bulk_bytes):
                        work = functools.partial(chain.forward, x, skinny_gemm, override=override)
                        seconds = seconds_per_replay(work)
                except ValueError:
                    continue  # a kernel that has not the registers for one of the products
                rate = chain.bytes / seconds / 1e12
                times[words] = seconds * 1e6
                line += f" | {words} {seconds * 1e6:8.1f} us {rate:5.2f} TB/s {rate / ceiling:4.0%}"
            print(line, flush=True)
            results.append({"chain": name, "rows": rows, "us": times})
        chain = None
        torch.cuda.empty_cache()
    return results


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("shapes", "chains", "dependent"))
    parser.add_argument("--ceiling", type=float, default=4.55, help="TB/s of a pure read")
    args = parser.parse_args()
    began = time.monotonic()
    launch.load(torch.cuda.current_device())
    print(
        f"{torch.cuda.get_device_name()}: kernels compiled and loaded in {time.monotonic() - began:.1f} s", flush=True
    )
    results = []
    for name, work in (
        ("chains", lambda: chains(args.ceiling)),
        ("dependent", dependent),
        ("shapes", lambda: shapes(args.ceiling)),
    ):
        if args.only in (None, name):
            results += work()
    if out := os.environ.get("OUT"):
        with open(os.path.join(out, "skinny_gemm.json"), "w") as file:
            json.dump(results, file)
    print(f"done in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()

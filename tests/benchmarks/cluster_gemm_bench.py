"""Times the CUDA C++ products that divide K over a cluster beside those in force, weights cold. By hand, on a GPU:

    python tests/benchmarks/cluster_gemm_bench.py [check|shapes|chains|counters]...

Names of cuts: rows of x . groups of four warps that sum. check: bits against the kernels for few rows. shapes: products
alone. chains: a model's, as it is chosen and without these kernels. counters: a launch of each, for a profiler.

A kernel that does not come back ends its process; another goes on without this cut.
"""

import contextlib
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import skinny_gemm_bench as bench
import torch
import wide_gemm_bench as wide

from slipstream.kernels.cuda import cluster_launch, launch, skinny_gemm, wide_launch
from slipstream.kernels.cuda.cluster_launch import Cut
from slipstream.kernels.cuda.launch import Override

LAYER = {"qkv": ("qkv", 6144, 4096), "o": ("add", 4096, 4096)}
LAYER |= {"gate_up": ("gate_up", 28672, 4096), "down": ("add", 4096, 14336), "head": ("store", 128256, 4096)}
STUCK = 3
began = time.monotonic()
_doing: list[tuple[float, str]] = []
_left_out = set(filter(None, os.environ.get("LEFT_OUT", "").split(";")))
OTHERS = Override(wide=False, prompt=False)  # the kernels for few rows


def watch() -> None:
    """Ends the process if a kernel does not come back: it waits for what never comes."""
    while True:
        time.sleep(1)
        since, what = _doing[-1] if _doing else (0.0, "")
        if what and time.monotonic() - since > 6:
            print(f"STUCK in {what}", flush=True)
            os._exit(STUCK)


def until_done(parts: list[str], seconds: float) -> None:
    """Each part in a process of its own, again without the cut in which it got stuck."""
    left_out: list[str] = []
    for part in parts:
        for _ in range(6):
            left = seconds - (time.monotonic() - began)
            if left < 3:
                print(f"no time for {part}", flush=True)
                break
            environment = os.environ | {"LEFT_OUT": ";".join(left_out)}
            command = [sys.executable, __file__, *part.split("+")]
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as child:
                timer = threading.Timer(left, child.kill)
                timer.start()
                assert child.stdout
                for line in child.stdout:
                    text = line.decode()
                    print(text, end="", flush=True)
                    if text.startswith("STUCK in "):
                        left_out.append(text.removeprefix("STUCK in ").strip())
                timer.cancel()
            if child.returncode != STUCK:
                break
        if child.returncode:
            print(f"{part} ended with {child.returncode}", flush=True)


def after() -> str:
    return f"[{time.monotonic() - began:.0f} s]"


def card() -> wide_launch.Device:
    return cluster_launch._device(torch.cuda.current_device())


def name(cut: Cut | None) -> str:
    return f"{cut.columns}.{cut.groups}" if cut else "others"


def cuts(what: str, rows: int) -> list[Cut]:
    columns = min(cut.columns for cut in cluster_launch.CUTS if rows <= cut.columns)
    found = [cut for cut in cluster_launch.CUTS if cut.columns == columns]
    return [cut for cut in found if doing(what, cut) not in _left_out]


def doing(what: str, cut: Cut | None) -> str:
    return f"{what} {name(cut)}"


def launches(product: wide.Product, rows: int, cut: Cut) -> bool:
    try:
        product.run(rows, Override(wide=cut))
        return True
    except (RuntimeError, ValueError) as error:
        print(f"{name(cut)} does not launch: {error}", flush=True)
        return False


def check(products: dict[str, wide.Product]) -> None:
    for what, product in products.items():
        compared, wrong = 0, []
        for rows in (64, 61, 33, 32, 17):
            expected = product.run(rows, OTHERS)
            for i, cut in enumerate(cuts(what, rows)):
                _doing[:] = [(time.monotonic(), doing(what, cut))]
                if not launches(product, rows, cut):
                    continue
                for again in range(3):
                    found = product.run(rows, Override(wide=cut, pdl=(i + rows + again) % 2 == 0))
                    torch.cuda.synchronize()
                    compared += 1
                    if not all(a.equal(b) for a, b in zip(found, expected, strict=True)):
                        wrong.append(f"{rows} rows {name(cut)}")
        _doing.clear()
        words = f"OTHER BITS {len(wrong)}: {list(dict.fromkeys(wrong))[:12]}" if wrong else "all bits equal"
        print(f"{what}: {compared} compared, {words} {after()}", flush=True)


def us(what: str, product: wide.Product, rows: int, cut: Cut | None, **more: bool) -> float:
    _doing[:] = [(time.monotonic(), doing(what, cut))]
    with without(cut is None):
        work = functools.partial(product.all_weights, rows, Override(wide=cut, **more))
        took = bench.seconds_per_replay(work, 5) / len(product.weights) * 1e6
    _doing.clear()
    return took


@contextlib.contextmanager
def without(these: bool) -> Iterator[None]:
    """As if the rule chose none of these kernels."""
    now = cluster_launch.cut_for
    if these:
        cluster_launch.cut_for = lambda *_: None  # type: ignore[assignment]
    try:
        yield
    finally:
        cluster_launch.cut_for = now


def shapes(products: dict[str, wide.Product]) -> None:
    for rows in (64, 32):
        for what, product in products.items():
            found = {cut: us(what, product, rows, cut) for cut in (None, *cuts(what, rows))}
            words = " | ".join(f"{name(cut)} {took:.1f}" for cut, took in sorted(found.items(), key=lambda one: one[1]))
            print(f"M={rows:<3} {what:8} floor {product.bytes / 4.5e6:.1f} | {words} {after()}", flush=True)


def chains() -> None:
    chain = bench.Chain(32, 4096, wide.HEADS, 14336, 128256)
    for rows in (64, 33, 32, 17):
        x = torch.randn(rows, chain.hidden, device="cuda").bfloat16()
        work = functools.partial(chain.forward, x, skinny_gemm)
        ms, outs = [], []
        for these in (False, True):
            _doing[:] = [(time.monotonic(), f"chain of {rows} rows")]
            with without(not these):
                outs.append(work())
                ms.append(bench.seconds_per_replay(work, 5) * 1e3)
            _doing.clear()
        same = outs[0].equal(outs[1])
        print(f"chain M={rows}: others {ms[0]:.3f}, chosen {ms[1]:.3f} ms, bits equal {same} {after()}", flush=True)


def counters(products: dict[str, wide.Product]) -> None:
    for product in products.values():
        product.run(64, Override())
    torch.cuda.synchronize()


@torch.no_grad()
def main() -> None:
    wanted = sys.argv[1:]
    if not wanted or wanted[0].isdigit():  # seconds
        until_done(["check", "shapes", "chains"], float(wanted[0]) if wanted else 600.0)
        return
    threading.Thread(target=watch, daemon=True).start()
    launch.load(torch.cuda.current_device())
    print(f"loaded; clusters of 4: {card().clusters(4)}, {card().shared_bytes} bytes a CTA {after()}", flush=True)
    wide.ROWS = (64,)
    if "counters" in wanted:
        wide.COLD_BYTES = 1.0
    if wanted != ["chains"]:
        kinds = ("qkv", "o", "gate_up", "down", "head") if "counters" not in wanted else ("gate_up", "down", "qkv", "o")
        products = {what: wide.Product(*LAYER[what]) for what in kinds}
        for part in ("check", "shapes", "counters"):
            if part in wanted:
                globals()[part](products)
        del products
        torch.cuda.empty_cache()
    if "chains" in wanted:
        chains()
    print(f"done {after()}")


if __name__ == "__main__":
    main()

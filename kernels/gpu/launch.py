"""How kernels are launched: programmatic dependent launch (PDL), and what the card at hand is."""

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from slipstream.kernels.driver import prefer_shared

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def capability() -> int:
    """Compute capability of the current card as 10 * major + minor; 90 in Triton's interpreter, which has no card."""
    if INTERPRET:
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def pdl_enabled() -> bool:
    """Whether a kernel may start while the one before it still runs, up to its `gdc_wait`.

    Every kernel of a chain must wait, even one that reads nothing of its predecessor's: the kernel behind it relies on
    everything before it being done. One program that waits is enough, if it does in every launch: a kernel is done when
    all its programs have ended, so not before the kernel in front is. The others, if they have nothing to do, may end
    without a wait; they must not have written anything. SLIPSTREAM_PDL=0 turns it off; results must be the same bits.
    """
    return not INTERPRET and capability() >= 90 and os.environ.get("SLIPSTREAM_PDL", "1") != "0"


class _Before(threading.local):
    settles = False


_before = _Before()  # what this thread launched last


def settled() -> bool:
    """Whether a kernel launched now finds, before its `gdc_wait`, all done but the kernel that was launched last.

    It does where that one lets its successor start only after its own wait (`settles`): a successor starts when every
    program has let it or has ended, and one at least did only after the wait. A kernel of torch's between
    the two changes nothing: it starts when all before it is done, and the next one when it ends.
    """
    return _before.settles


def launched(settles: bool) -> None:
    """To be told of every launch: whether the kernel lets its successor start only after its own wait."""
    _before.settles = settles


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *,
    num_warps: int,
    num_stages: int = 1,
    maxnreg: int | None = None,
    settles: bool = False,
    **arguments: Any,
) -> None:
    """Run a kernel of the decode path: the one place that passes PDL on (tests put a compiler in its place).

    Args:
        kernel: a `@triton.jit` function with a constexpr `PDL`.
        grid: programs.
        num_warps, num_stages, maxnreg: Triton's launch options.
        settles: the kernel calls `gdc_launch_dependents` after its `gdc_wait`, not before.
        arguments: all others of the kernel, by name.
    """
    # No fusing of a product with a sum but where a kernel asks for it (tl.fma): which of two the compiler fuses hangs
    # on what stands around them, so that the same line gave other bits in a loop than outside of it.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
    if maxnreg is not None:
        options["maxnreg"] = maxnreg
    _run(kernel, grid, {**arguments, "PDL": pdl_enabled()}, options)
    launched(settles)


def _launch_now(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], options: dict[str, Any]) -> None:
    compiled = kernel[grid](**arguments, **options, launch_pdl=arguments["PDL"])
    if not INTERPRET and compiled.function not in _prepared:
        _prepared.add(compiled.function)
        prefer_shared(ctypes.c_void_p(compiled.function))


_prepared: set[int] = set()  # handles of kernels, each seen at its first launch, before graphs are captured


_run: Callable[[Any, tuple[int, ...], dict[str, Any], dict[str, Any]], None] = _launch_now

"""Which kernels run the matrix products of a model: CUDA C++ over packed weights, Triton, or torch.

`SLIPSTREAM_MATRIX` asks: `auto` (or unset) takes CUDA C++ where it can be had, `cuda` insists on it, `triton` is the
portable path, with which tests compare.
"""

import functools
import logging
import os
import time
from dataclasses import dataclass
from typing import Literal

import torch

VARIABLE = "SLIPSTREAM_MATRIX"
CHOICES = ("auto", "cuda", "triton")
OLDEST = 80  # sm_80: the matrix instruction of the CUDA C++ kernels

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MatrixProducts:
    """The choice for a device.

    Args:
        kernels: "cuda" (CUDA C++), "triton", or "torch" (on the CPU).
        reason: why these.
        compile_seconds: that nvcc and loading took in this process so far, INT4's of models that came; 0 where nothing
            was compiled.
    """

    kernels: Literal["cuda", "triton", "torch"]
    reason: str
    compile_seconds: float = 0.0


def matrix_products(device: torch.device | str) -> MatrixProducts:
    """The choice for a device. The first call on a card compiles and loads the kernels, unless a cache has them.

    Raises ValueError for another word in SLIPSTREAM_MATRIX, and for `cuda` where the kernels cannot be had.
    """
    asked = os.environ.get(VARIABLE, "auto")
    if asked not in CHOICES:
        raise ValueError(f"{VARIABLE}={asked!r}; expected one of {', '.join(CHOICES)}")
    if torch.device(device).type != "cuda":
        return MatrixProducts("torch", "on the CPU")
    if asked == "triton":
        return MatrixProducts("triton", f"{VARIABLE}=triton")
    problem, seconds = _load()
    if not problem:
        return MatrixProducts("cuda", "compiled for this card", seconds + sum(_int4_seconds.values()))
    if asked == "cuda":
        raise ValueError(f"{VARIABLE}=cuda, and {problem}; install nvcc of CUDA 12 or newer, or unset the variable")
    return MatrixProducts("triton", problem)


def int4_products(groups: frozenset[int]) -> bool:
    """Whether the CUDA C++ kernels over INT4 weights of these groups can be had, on a card where the others run.

    The first call compiles and loads them, unless a cache has them: before graphs are captured. Raises ValueError where
    SLIPSTREAM_MATRIX is `cuda` and they cannot be had; else the reason is logged, once.
    """
    problem = _load_int4(groups)
    if problem and os.environ.get(VARIABLE) == "cuda":
        raise ValueError(f"{VARIABLE}=cuda, and {problem}; install nvcc of CUDA 12 or newer, or unset the variable")
    return not problem


_int4_seconds: dict[frozenset[int], float] = {}  # that compiling and loading took, by groups


@functools.cache
def _load_int4(groups: frozenset[int]) -> str:
    from slipstream.kernels.cuda import int4_launch

    began = time.perf_counter()
    try:
        int4_launch.load(torch.cuda.current_device(), tuple(sorted(groups)))
        _int4_seconds[groups] = time.perf_counter() - began
        return ""
    except (RuntimeError, OSError) as error:
        problem = f"the CUDA C++ kernels over INT4 weights cannot be loaded: {error}"
    _log.warning("%s: the Triton kernel runs instead", problem)
    return problem


@functools.cache
def _load() -> tuple[str, float]:
    """(why the CUDA C++ kernels cannot be had, or nothing; seconds). The reason is logged, once."""
    from slipstream.kernels.cuda import build, launch
    from slipstream.kernels.gpu.launch import capability

    arch, began = capability(), time.perf_counter()
    if arch < OLDEST:
        problem = f"the card is an sm_{arch}, and the CUDA C++ kernels need sm_{OLDEST} or newer"
    elif not build.available(arch):
        return "there is no nvcc on this host (PATH, CUDA_HOME), nor kernels from an earlier start", 0.0  # logged there
    else:
        try:
            launch.load(torch.cuda.current_device())
            return "", time.perf_counter() - began
        except (RuntimeError, OSError) as error:  # nvcc fails, the cache cannot be written, no driver library
            problem = f"the CUDA C++ kernels cannot be loaded: {error}"
    _log.warning("%s: the Triton kernels run instead", problem)
    return problem, 0.0

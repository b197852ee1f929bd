"""How a matrix product of prompts, hundreds of rows of x, is launched. Twin of the struct in prompt_gemm.cuh."""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slipstream.kernels import driver
from slipstream.kernels.cuda import build
from slipstream.kernels.cuda.launch import BARRIER_BYTES, Epilogue, Override, Params, norms, split_k
from slipstream.kernels.cuda.wide_launch import ORDER_CHUNKS, ORDER_WARPS
from slipstream.kernels.gpu.launch import capability, launched, pdl_enabled

COLUMNS, TILES, THREADS = 128, 8, 384  # rows of x and tiles of weight rows that a CTA takes; as in prompt_gemm.cuh
SLOTS = 7  # of the ring
SLOT_BYTES = 2 * (1024 * TILES + 64 * COLUMNS)
SHARED_BYTES = BARRIER_BYTES + SLOTS * SLOT_BYTES
FROM_ROWS, FROM_WORK = 256, 40  # of x; of what CTAs take, 128 rows by 8 tiles


class PromptParams(ctypes.Structure):
    """As in prompt_gemm.cuh."""

    _fields_ = (
        ("common", Params),
        ("x_ordered", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("parts", "pad")),
    )


@dataclass(frozen=True)
class Sharing:
    """CTAs of a cluster. Changes no bit of the result.

    Args:
        weights: as many, with neighbouring rows of x, share the reads of the weights.
    """

    weights: int = 1


@dataclass(frozen=True)
class Device:
    """What the choice asks of a card.

    Args:
        takes: whether it has wgmma and the shared memory.
        clusters: the card holds at once, by their size.
    """

    takes: bool
    clusters: Callable[[int], int]


@dataclass(frozen=True)
class Grid:
    """Clusters: `walk` for each of `groups` groups of rows of x that a cluster takes."""

    groups: int
    walk: int


def grid(sharing: Sharing, rows: int, tiles: int, device: Device) -> Grid:
    """The clusters that are on the card at once, if there is work for them, each with as many units as the others."""
    groups = -(-rows // (COLUMNS * sharing.weights))
    work = -(-tiles // TILES)
    turns = -(-work // max(1, device.clusters(sharing.weights) // groups))
    return Grid(groups, -(-work // turns))


def choose(rows: int, tiles: int, device: Device) -> Sharing | None:
    """How `rows` rows of x and `tiles` tiles of weight rows are taken; None: other kernels are better.

    On an H200 two CTAs that share their weights are faster than one, or within 2 %. us, others / this: 8B sizes, all
    four products, 128 rows 321 / 320, 256 590 / 361, 2,048 4134 / 1808. SmolLM2-135M's, alone, by work: 10 of o and
    down 7 / 15 and 10 / 22, 16 of qkv 8 / 14, 20 of o and down 11 / 15 and 16 / 22, 32 of qkv 14.5 / 14.2, 40 of o and
    down 19 / 16 and 28 / 23, 48 of gate_up 19 / 12, 64 of qkv 28 / 15, 384 of gate_up 134 / 32.
    """
    groups = -(-rows // COLUMNS)
    if not device.takes or rows < FROM_ROWS or groups * -(-tiles // TILES) < FROM_WORK:
        return None
    # Sharing takes a tenth off, and a group without rows in the company of an odd one as long as any other.
    return Sharing(weights=2 if groups % 2 == 0 or groups > 8 else 1)


@functools.cache
def _module(epilogue: Epilogue, device: int) -> driver.Module:
    functions = [(f"order_{int(norm)}", 0) for norm in norms(epilogue)]
    functions.append((name(epilogue), SHARED_BYTES))
    return driver.Module(build.compiled(capability(), [build.prompt(int(epilogue))])[0], device, functions)


def name(epilogue: Epilogue) -> str:
    """The kernel's name in the cubin."""
    return f"prompt_{int(epilogue)}"


def load(device: int) -> None:
    """Compile and load everything: before a graph is captured."""
    if _device(device).takes:
        build.compiled(capability(), [build.prompt(int(epilogue)) for epilogue in Epilogue])
        for epilogue in Epilogue:
            _module(epilogue, device)


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _ordered(device: int, elements: int) -> torch.Tensor:
    # As in wide_launch.py.
    return torch.empty(elements, dtype=torch.bfloat16, device=torch.device("cuda", device))


@functools.cache
def _device(device: int) -> Device:
    @functools.cache
    def clusters(size: int) -> int:
        # A cluster lies in one group of multiprocessors, of which a card has several of unlike size.
        function = _module(Epilogue.ADD, device).functions[name(Epilogue.ADD)]
        return function.most_clusters(size, THREADS, SHARED_BYTES)

    return Device(capability() == 90, clusters)


def sharing_for(epilogue: Epilogue, params: Params, device: int) -> Sharing | None:
    """As `choose`, for a launch."""
    if params.M < FROM_ROWS or not _in_pairs(params):
        return None
    return choose(params.M, _tiles(epilogue, params), _device(device))


def _in_pairs(params: Params) -> bool:
    """Whether two outputs side by side, and what they are added to or turned by, begin at multiples of 4 bytes."""
    strides = params.N | params.residual_stride | params.angle_stride | params.kv_stride
    return strides % 2 == 0 and all((at or 0) % 4 == 0 for at in (params.residual, params.cos, params.sin))


def _tiles(epilogue: Epilogue, params: Params) -> int:
    return -(-params.N // (8 if epilogue is Epilogue.GATE_UP else 16))


def launch(epilogue: Epilogue, norm: bool, params: Params, device: int, sharing: Sharing, override: Override) -> None:
    """Fill the cut into `params` and launch on torch's current stream. `params.N`: outputs of a row, or weight rows."""
    if not _in_pairs(params):
        raise ValueError("outputs or strides are odd; expected even ones, two outputs are written at once")
    parts, _ = split_k(params.K, norm)
    tiles = _tiles(epilogue, params)
    there = grid(sharing, params.M, tiles, _device(device))
    params.tiles = tiles + tiles % 2
    params.m_groups = there.groups * sharing.weights
    params.slots = SLOTS
    chunks = params.K // 32
    ordered = _ordered(device, params.m_groups * COLUMNS * params.K)
    prompt = PromptParams(params, ordered.data_ptr(), parts)
    pdl = pdl_enabled() if override.pdl is None else override.pdl
    functions, stream = _module(epilogue, device).functions, _stream(device)
    order_ctas = params.m_groups * COLUMNS // 8 * -(-chunks // (ORDER_WARPS * ORDER_CHUNKS))
    functions[f"order_{int(norm)}"].launch(order_ctas, 32 * ORDER_WARPS, 0, stream, prompt, pdl=pdl)
    functions[name(epilogue)].launch(
        there.groups * there.walk * sharing.weights,
        THREADS,
        SHARED_BYTES,
        stream,
        prompt,
        pdl=pdl,
        cluster=sharing.weights,
    )
    launched(settles=epilogue is Epilogue.QKV)  # as prompt_gemm.cuh does

"""How the two kernels in front of routed experts are launched. Twins of the structs in gate.cuh and choose.cuh."""

import ctypes
import functools

import torch

from slipstream.kernels import driver
from slipstream.kernels.cuda import build
from slipstream.kernels.cuda.route_launch import MAX_EXPERTS, MAX_PER_TOKEN, MAX_ROWS, check
from slipstream.kernels.gpu.launch import capability, launched, pdl_enabled

OLDEST = 90  # sm_90: clusters and bulk copies
_THREADS, _WARPS, _CHUNK, _DEPTH, _TILES, _MOST_PARTS = 256, 8, 32, 4, 2, 8
_OUTPUTS, _SUMS = 8 * 16 * _TILES, _WARPS * 8 * (16 * _TILES + 4)
_MOST_SHARED = 200 << 10


class GateParams(ctypes.Structure):
    """As in gate.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "shared_weight", "x", "norm_weight", "sumsq_in")),
        *((name, ctypes.c_void_p) for name in ("normed", "logits", "inner")),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("M", "K", "E", "I", "num_sumsq", "chunks", "chunks_per_warp", "parts")),
        ("router_units", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("inverse_width", ctypes.c_float),
        ("pad", ctypes.c_int32),
    )


class ChooseParams(ctypes.Structure):
    """As in choose.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "out", "logits", "bias", "ids", "gates")),
        *((name, ctypes.c_void_p) for name in ("count", "entries", "order", "place")),
        *((name, ctypes.c_int32) for name in ("M", "E", "per_token", "N", "chunks", "groups", "groups_kept")),
        *((name, ctypes.c_int32) for name in ("normalise", "tile_bits", "chooses", "lists")),
        ("scaling", ctypes.c_float),
    )


def split_k(width: int) -> tuple[int, int]:
    """(CTAs along K, chunks of each of their warps): part of the arithmetic, so by the width alone."""
    chunks = width // _CHUNK
    parts = max(1, min(_MOST_PARTS, -(-chunks // (_WARPS * _DEPTH))))
    per_warp = -(-chunks // (_WARPS * parts))
    return -(-chunks // (_WARPS * per_warp)), per_warp


def gate_bytes(rows: int, width: int, num_sumsq: int) -> int:
    """Of shared memory of a CTA of the first kernel."""
    parts, per_warp = split_k(width)
    groups = -(-rows // 8)
    owned = -(-groups // parts)
    before = 32 + _SUMS + owned * parts * _OUTPUTS + 2 * num_sumsq
    return 4 * (-(-before // 256) * 256) + _TILES * _WARPS * per_warp * 1024


def takes(arch: int, width: int) -> bool:
    """Whether the first kernel runs on an sm_`arch`, over rows of `width` with a sum of squares of each 16 columns."""
    return arch >= OLDEST and width % _CHUNK == 0 and gate_bytes(MAX_ROWS, width, width // 16) <= _MOST_SHARED


def choose_bytes(rows: int, per_token: int, num_experts: int) -> int:
    """Of the second."""
    return 4 * (-(-rows * per_token // 4) * 4 + 2 * _WARPS * num_experts + 8)


@functools.cache
def _module(name: str, device: int) -> driver.Module:
    cubin = build.compiled(capability(), [build.Unit(name, ())])[0]
    most = _MOST_SHARED if name == "gate" else choose_bytes(MAX_ROWS, MAX_PER_TOKEN, MAX_EXPERTS)
    return driver.Module(cubin, device, [(f"{name}_rows", most)])


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def load(device: int) -> None:
    """Compile and load: before a graph is captured."""
    _module("gate", device)
    _module("choose", device)


def launch_gate(params: GateParams, device: int, pdl: bool | None = None) -> None:
    """On torch's current stream; the cut is filled in."""
    params.chunks = params.K // _CHUNK
    params.parts, params.chunks_per_warp = split_k(params.K)
    params.inverse_width = 1 / params.K
    params.router_units = -(-params.E // (16 * _TILES))
    units = params.router_units + (-(-params.I // (8 * _TILES)) if params.shared_weight else 0)
    shared = gate_bytes(params.M, params.K, params.num_sumsq)
    if not 0 < params.M <= MAX_ROWS or params.K % _CHUNK or shared > _MOST_SHARED:
        raise ValueError(
            f"{params.M} rows of {params.K} with {params.num_sumsq} sums: expected 1 to {MAX_ROWS} rows, a multiple of "
            f"{_CHUNK}, and at most {_MOST_SHARED} bytes of shared memory (found {shared})"
        )
    _module("gate", device).functions["gate_rows"].launch(
        units * params.parts,
        _THREADS,
        shared,
        _stream(device),
        params,
        pdl=pdl_enabled() if pdl is None else pdl,
        cluster=params.parts,
    )
    launched(settles=False)


def launch_choose(params: ChooseParams, device: int, pdl: bool | None = None) -> None:
    """On torch's current stream."""
    check(params.M, params.E, params.per_token, max(1, params.groups))
    tiles = -(-params.N // 16) if params.weight else 0
    _module("choose", device).functions["choose_rows"].launch(
        1 + -(-tiles // _WARPS),
        _THREADS,
        choose_bytes(params.M, params.per_token, params.E),
        _stream(device),
        params,
        pdl=pdl_enabled() if pdl is None else pdl,
    )
    launched(settles=False)

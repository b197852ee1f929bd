"""How the router is cut and launched. Twin of the struct in route.cuh."""

import ctypes
import functools
from enum import IntEnum

import torch

from slipstream.kernels import driver
from slipstream.kernels.cuda import build
from slipstream.kernels.expert_lists import ExpertLists
from slipstream.kernels.gpu.launch import capability, launched, pdl_enabled
from slipstream.kernels.route import Routing

MAX_ROWS, MAX_EXPERTS, MAX_GROUPS, MAX_PER_TOKEN = 128, 512, 32, 32
_THREADS, _CHUNK, _TILE = 256, 32, 16
_CTAS = 168  # that a product is cut into, about: one and a bit on each of a large card's multiprocessors


class Stage(IntEnum):
    """What a launch does."""

    ROUTE = 0
    LOGITS = 1
    FROM_LOGITS = 2
    FROM_IDS = 3


class RouteParams(ctypes.Structure):
    """As in route.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "bias", "sums", "logits", "arrived", "ids", "gates")),
        *((name, ctypes.c_void_p) for name in ("count", "entries", "order", "place")),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("stage", "M", "E", "per_token", "chunks", "chunks_per_warp", "parts")),
        *((name, ctypes.c_int32) for name in ("groups", "groups_kept", "normalise", "tile", "selects")),
        ("scaling", ctypes.c_float),
        ("pad", ctypes.c_int32),
    )


def split_k(num_experts: int, width: int) -> tuple[int, int]:
    """(CTAs along K, chunks of each of their warps): part of the arithmetic, so by the shape alone."""
    chunks, tiles, warps = width // _CHUNK, -(-num_experts // _TILE), _THREADS // 32
    parts = max(1, min(-(-chunks // warps), _CTAS // tiles))
    per_warp = -(-chunks // (warps * parts))
    return -(-chunks // (warps * per_warp)), per_warp


def shared_bytes(rows: int, per_token: int, num_experts: int) -> int:
    """Of a CTA: the sums of its warps, and later masks, starts, ids, bias and scores."""
    return max(
        4 * (8 * 8 * 20 + 4),
        4 * (4 * num_experts + num_experts + 8 + rows * per_token + num_experts + 16 * num_experts),
    )


def check(rows: int, num_experts: int, per_token: int, groups: int) -> None:
    """Raises ValueError for what the kernel does not do."""
    if rows > MAX_ROWS or num_experts > MAX_EXPERTS or per_token > min(MAX_PER_TOKEN, num_experts):
        raise ValueError(
            f"{rows} rows, {per_token} of {num_experts} experts: expected at most {MAX_ROWS} rows, {MAX_EXPERTS} "
            f"experts and {MAX_PER_TOKEN} of them a row"
        )
    if groups > MAX_GROUPS or num_experts % groups:
        raise ValueError(f"{num_experts} experts in {groups} groups: expected at most {MAX_GROUPS} equal ones")


@functools.cache
def _module(device: int) -> driver.Module:
    cubin = build.compiled(capability(), [build.Unit("route", ())])[0]
    return driver.Module(cubin, device, [("route_rows", shared_bytes(MAX_ROWS, MAX_PER_TOKEN, MAX_EXPERTS))])


@functools.cache
def _arrived(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def load(device: int) -> None:
    """Compile and load: before a graph is captured."""
    _module(device)
    _arrived(torch.device("cuda", device))


def product(x: torch.Tensor, weight: torch.Tensor) -> tuple[RouteParams, torch.Tensor]:
    """Parameters of the product of x [M, h] and weight [E, h], both bf16, and the memory of its sums.

    Raises ValueError for others.
    """
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or not weight.is_contiguous() or x.stride(-1) != 1:
        raise ValueError(f"router of {weight.dtype} over {x.dtype}: expected contiguous bfloat16 for both")
    (rows, width), num_experts = x.shape, weight.shape[0]
    if width % _CHUNK or x.stride(0) % 8:
        raise ValueError(f"rows of {width}, {x.stride(0)} apart: expected multiples of {_CHUNK} and 8")
    parts, per_warp = split_k(num_experts, width)
    sums = torch.empty(parts, rows, num_experts, dtype=torch.float32, device=x.device)
    made = RouteParams(weight=weight.data_ptr(), x=x.data_ptr(), x_stride=x.stride(0), sums=sums.data_ptr())
    made.M, made.E, made.chunks, made.chunks_per_warp, made.parts = rows, num_experts, width // _CHUNK, per_warp, parts
    made.arrived = _arrived(x.device).data_ptr()
    return made, sums


def choose(params: RouteParams, bias: torch.Tensor, routing: Routing, ids: torch.Tensor, gates: torch.Tensor) -> None:
    """Fills in the choice of experts."""
    if bias.dtype != torch.float32 or not bias.is_contiguous():
        raise ValueError(f"bias is {bias.dtype}: expected contiguous float32")
    params.bias, params.ids, params.gates = bias.data_ptr(), ids.data_ptr(), gates.data_ptr()
    params.per_token, params.groups, params.groups_kept = routing.per_token, routing.groups, routing.groups_kept
    params.normalise, params.scaling = int(routing.normalise), routing.scaling


def fill(params: RouteParams, lists: ExpertLists) -> None:
    """Fills in that lists are made."""
    params.count, params.entries = lists.count.data_ptr(), lists.entries.data_ptr()
    params.order, params.place = lists.order.data_ptr(), lists.place.data_ptr()
    params.tile, params.selects = lists.tile, 1


def launch(stage: Stage, params: RouteParams, device: int, pdl: bool | None = None) -> None:
    """On torch's current stream."""
    check(params.M, params.E, params.per_token, max(1, params.groups))
    params.stage = stage
    ctas = -(-params.E // _TILE) * params.parts if stage in (Stage.ROUTE, Stage.LOGITS) else 1
    _module(device).functions["route_rows"].launch(
        ctas,
        _THREADS,
        shared_bytes(params.M, params.per_token, params.E),
        _stream(device),
        params,
        pdl=pdl_enabled() if pdl is None else pdl,
    )
    launched(settles=False)

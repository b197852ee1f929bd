"""How the one kernel of the routed experts is launched. Twin of the struct and the sizes in expert_stream.cuh."""

import ctypes
import functools

import torch

from slipstream.kernels import driver
from slipstream.kernels.cuda import build
from slipstream.kernels.cuda.int4_launch import shared_limit
from slipstream.kernels.expert_lists import ExpertLists
from slipstream.kernels.expert_mlp import ExpertWeights
from slipstream.kernels.gpu.launch import capability, launched, pdl_enabled
from slipstream.kernels.int4 import BLOCK, Int4Weight

_TILE = 8  # rows of an entry
_WARPS = 16
_MOST_CHUNKS, _MOST_DOWN_CHUNKS = 14 * _WARPS, 8
_BARRIER_BYTES, _SLOT_BYTES = 256, 32 * (512 + 64)
_SUM_BYTES = 4 * _WARPS * 8 * 36
_SLOTS_AT_ONCE, _MOST_SLOTS = 4, 8  # a ring is a multiple of the first: expert_stream.cuh says why
_MOST_PAIRS = 1024
_ENTRY_COUNTER, _COUNTERS = 32, 1 << 15
FEWEST_ROWS = 3  # of fewer, two kernels are faster


class StreamParams(ctypes.Structure):
    """As in expert_stream.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "down", "down_scales", "x", "count", "entries")),
        *(
            (name, ctypes.c_void_p)
            for name in ("order", "place", "gates", "add", "inner", "scratch", "out", "counters")
        ),
        *((name, ctypes.c_int64) for name in ("x_stride", "add_stride")),
        *((name, ctypes.c_int32) for name in ("M", "N", "pairs", "per_token", "most", "blocks", "down_blocks")),
        *((name, ctypes.c_int32) for name in ("chunks", "down_chunks", "slots", "evict_first", "pad")),
    )


def _list_bytes(most: int, pairs: int) -> int:
    return 16 * most + 12 * pairs


def _num_counters(most: int) -> int:
    return 32 + _ENTRY_COUNTER * most


def slots_of(limit: int, most: int, pairs: int) -> int:
    """Of the ring, in so many bytes of shared memory."""
    fit = (limit - _BARRIER_BYTES - _SUM_BYTES - _list_bytes(most, pairs)) // _SLOT_BYTES
    return max(0, min(_MOST_SLOTS, fit // _SLOTS_AT_ONCE * _SLOTS_AT_ONCE))


def takes(weights: ExpertWeights, lists: ExpertLists) -> bool:
    """Whether the kernel does these shapes here: entries of 8 rows, rows that its warps hold in registers, a ring."""
    gate_up, down = weights.gate_up, weights.down
    assert isinstance(gate_up, Int4Weight)
    assert isinstance(down, Int4Weight)
    most, pairs = len(lists.entries), lists.order.numel()
    return (
        capability() >= 90
        and lists.tile == _TILE
        and pairs <= _MOST_PAIRS
        and _num_counters(most) <= _COUNTERS
        and gate_up.in_features <= BLOCK * _MOST_CHUNKS
        and down.in_features <= BLOCK * _MOST_DOWN_CHUNKS
        and slots_of(shared_limit(capability()), most, pairs) > 0
    )


@functools.cache
def _module(device: int) -> driver.Module:
    arch = capability()
    cubin = build.compiled(arch, [build.Unit("expert_stream", ())])[0]
    return driver.Module(cubin, device, [("experts_stream", shared_limit(arch))])


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zero again behind every launch, but for the sign of the first, which every launch flips."""
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


def load(device: int) -> None:
    """Compile and load everything: before a graph is captured."""
    if capability() >= 90:
        _module(device)
        _counters(torch.device("cuda", device))


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _sms(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def experts(
    x: torch.Tensor,
    weights: ExpertWeights,
    lists: ExpertLists,
    gates: torch.Tensor,
    add: torch.Tensor | None,
    device: int,
    pdl: bool | None = None,
) -> torch.Tensor:
    """The whole of `expert_mlp` behind its checks: x [M, h] bf16, gates [M, k] contiguous -> [M, h]."""
    gate_up, down = weights.gate_up, weights.down
    assert isinstance(gate_up, Int4Weight)
    assert isinstance(down, Int4Weight)
    (rows, per_token), most = gates.shape, len(lists.entries)
    pairs, width = rows * per_token, x.shape[1]
    out = torch.empty_like(x)
    inner, scratch = x.new_empty(pairs, down.in_features), x.new_empty(pairs, width, dtype=torch.float32)
    params = StreamParams(weight=gate_up.words.data_ptr(), scales=gate_up.scales.data_ptr(), x=x.data_ptr())
    params.down, params.down_scales = down.words.data_ptr(), down.scales.data_ptr()
    params.count, params.entries = lists.count.data_ptr(), lists.entries.data_ptr()
    params.order, params.place = lists.order.data_ptr(), lists.place.data_ptr()
    params.gates, params.inner, params.scratch = gates.data_ptr(), inner.data_ptr(), scratch.data_ptr()
    params.out, params.counters = out.data_ptr(), _counters(x.device).data_ptr()
    if add is not None:
        params.add, params.add_stride = add.data_ptr(), add.stride(0)
    params.x_stride, params.M, params.N, params.pairs, params.per_token = x.stride(0), rows, width, pairs, per_token
    params.most, params.evict_first = most, 1
    params.blocks, params.chunks = len(gate_up.words) // weights.num_experts, gate_up.in_features // BLOCK
    params.down_blocks, params.down_chunks = len(down.words) // weights.num_experts, down.in_features // BLOCK
    params.slots = slots_of(shared_limit(capability()), most, pairs)
    shared = _BARRIER_BYTES + params.slots * _SLOT_BYTES + _SUM_BYTES + _list_bytes(most, pairs)
    pdl = pdl_enabled() if pdl is None else pdl
    launch = _module(device).functions["experts_stream"].launch
    launch(_sms(device), 32 * (_WARPS + 1), shared, _stream(device), params, pdl=pdl)
    launched(settles=True)  # its CTAs let the next kernel start behind their wait
    return out

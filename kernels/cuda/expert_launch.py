"""How the routed experts' kernels are cut and launched. Twin of the struct and the lists in expert_gemm.cu."""

import ctypes
import functools
from dataclasses import dataclass

import torch

from slipstream.kernels import driver
from slipstream.kernels.cuda import build
from slipstream.kernels.cuda.int4_launch import shared_limit
from slipstream.kernels.expert_lists import ExpertLists
from slipstream.kernels.gpu.launch import capability, launched, pdl_enabled, settled
from slipstream.kernels.int4 import BLOCK, Int4Weight

GROUP = 32
_PARTS = 16  # of K, for gate and up: a warp for each
_SUMS_STRIDE = 36
_STAGED_PAIRS = 1024  # lists of more are read where they lie
_MOST_SUMS = 80 << 10  # bytes of a CTA's sums of pairs; of more rows they go to memory


class ExpertParams(ctypes.Structure):
    """As in expert_gemm.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "x", "count", "entries", "order", "place", "gates")),
        *((name, ctypes.c_void_p) for name in ("add", "out", "scratch")),
        *((name, ctypes.c_int64) for name in ("x_stride", "add_stride")),
        *((name, ctypes.c_int32) for name in ("M", "N", "pairs", "per_token", "most", "chunks")),
        *((name, ctypes.c_int32) for name in ("blocks", "staged", "settled", "sums_at", "evict_first", "sums_in_turn")),
    )


@dataclass(frozen=True)
class Variant:
    """One compiled kernel. None of this changes a bit of the result.

    Args:
        row_tiles: tiles of 8 rows of an entry.
        depth: chunks of 32 k in flight per thread.
        threads, ctas: of a CTA, and of these on a multiprocessor, that the registers allow.
    """

    row_tiles: int
    depth: int
    threads: int
    ctas: int

    def name(self, kind: str) -> str:
        """The kernel's name in the cubin."""
        return f"experts_{kind}_{self.row_tiles}_{self.depth}_{self.threads}_{self.ctas}"


GATE_UP = (
    Variant(1, 7, 512, 1),
    Variant(1, 2, 512, 2),
    Variant(2, 2, 512, 1),
    Variant(4, 2, 512, 1),
)
DOWN = (
    Variant(1, 8, 256, 2),
    Variant(2, 4, 256, 2),
    Variant(4, 2, 256, 2),
)


@dataclass(frozen=True)
class Plan:
    """How a launch is cut. None of this changes a bit.

    Args:
        stream: the one kernel of expert_stream.cuh, where it takes the shapes; else two. None: by the number of rows.
        gate_up, down: kernels; None: by the rows of an entry, and gate_up by the number of units.
        ctas: of gate_up on a multiprocessor; 0: one for every unit.
        settled: down may read the lists before it waits, where that is known to be safe.
        pdl: None: as everywhere.
    """

    stream: bool | None = None
    gate_up: Variant | None = None
    down: Variant | None = None
    ctas: int | None = None
    settled: bool = True
    evict_first: bool = True
    pdl: bool | None = None


AS_PLANNED = Plan()


def variant_of(kernels: tuple[Variant, ...], tile: int) -> Variant:
    """The first for entries of `tile` rows."""
    return next(one for one in kernels if 8 * one.row_tiles == tile)


def gate_up_of(tile: int, units: int, sms: int) -> Variant:
    """For entries of `tile` rows: while every unit has a multiprocessor to itself, the one with most in flight; of more
    units, CTAs that stand two on one, each reading while the other adds its sums."""
    return GATE_UP[1] if tile == 8 and units > sms else variant_of(GATE_UP, tile)


@functools.cache
def _module(device: int) -> driver.Module:
    arch = capability()
    cubin = build.compiled(arch, [build.Unit("expert_gemm", ())])[0]
    names = [v.name("gate_up") for v in GATE_UP] + [v.name("down") for v in DOWN] + ["experts_combine"]
    return driver.Module(cubin, device, [(name, shared_limit(arch)) for name in names])


def load(device: int) -> None:
    """Compile and load everything: before a graph is captured."""
    _module(device)


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _sms(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _params(weight: Int4Weight, x: torch.Tensor, lists: ExpertLists, num_experts: int) -> ExpertParams:
    pairs, most = lists.order.numel(), len(lists.entries)
    made = ExpertParams(weight=weight.words.data_ptr(), scales=weight.scales.data_ptr(), x=x.data_ptr())
    made.count, made.entries = lists.count.data_ptr(), lists.entries.data_ptr()
    made.order, made.place = lists.order.data_ptr(), lists.place.data_ptr()
    made.x_stride, made.pairs, made.most = x.stride(0), pairs, most
    made.chunks, made.blocks = weight.in_features // BLOCK, weight.words.shape[0] // num_experts
    made.staged = int(pairs <= _STAGED_PAIRS)
    return made


def gate_up(
    x: torch.Tensor, weight: Int4Weight, lists: ExpertLists, num_experts: int, device: int, plan: Plan = AS_PLANNED
) -> torch.Tensor:
    """silu(gate) * up of every pair, by place: x [M, h] bf16 -> [M k, I]."""
    params = _params(weight, x, lists, num_experts)
    width = weight.num_rows // num_experts // 2
    out = x.new_empty(params.pairs, width)
    units = params.most * params.blocks
    variant = plan.gate_up or gate_up_of(lists.tile, units, _sms(device))
    if 8 * variant.row_tiles < lists.tile:
        raise ValueError(f"entries of {lists.tile} rows: {variant} takes fewer")
    params.out, params.M, params.N = out.data_ptr(), len(x), width
    params.sums_at = 4 * params.most + params.pairs if params.staged else 0
    params.evict_first = int(plan.evict_first and params.pairs <= _STAGED_PAIRS)
    one_turn = _PARTS * 8 * variant.row_tiles * _SUMS_STRIDE
    params.sums_in_turn = 2 if 4 * (params.sums_at + 2 * one_turn) <= shared_limit(capability()) else 1
    sums = params.sums_in_turn * one_turn
    ctas = variant.ctas if plan.ctas is None else plan.ctas
    _launch(
        "gate_up",
        variant,
        units if not ctas else min(units, ctas * _sms(device)),
        variant.threads,
        sums,
        params,
        device,
        plan,
    )
    launched(settles=True)  # its CTAs let the next kernel start behind their wait
    return out


def down(
    inner: torch.Tensor,
    weight: Int4Weight,
    lists: ExpertLists,
    num_experts: int,
    gates: torch.Tensor,
    add: torch.Tensor | None,
    device: int,
    plan: Plan = AS_PLANNED,
) -> torch.Tensor:
    """What `gate_up` made [M k, I], through each place's expert, weighted by gates [M, k] and summed, and `add`."""
    params = _params(weight, inner, lists, num_experts)
    (rows, per_token), width = gates.shape, weight.num_rows // num_experts
    out = inner.new_empty(rows, width)
    params.out, params.M, params.N, params.per_token = out.data_ptr(), rows, width, per_token
    params.gates = gates.data_ptr()
    if add is not None:
        params.add, params.add_stride = add.data_ptr(), add.stride(0)
    sums = params.pairs * _SUMS_STRIDE
    scratch = None
    if 4 * sums > _MOST_SUMS:
        scratch, sums = torch.empty(params.pairs, width, dtype=torch.float32, device=inner.device), 0
        params.scratch = scratch.data_ptr()
    variant = plan.down or variant_of(DOWN, lists.tile)
    params.sums_at = 4 * params.most + 2 * params.pairs if params.staged else 0
    # Lists that are not copied go through L1, which only the wait empties of what lay there before.
    params.settled = int(plan.settled and params.staged and settled())
    params.evict_first = int(plan.evict_first and params.pairs <= _STAGED_PAIRS)
    _launch("down", variant, params.blocks, variant.threads, sums, params, device, plan)
    launched(settles=False)
    if scratch is not None:
        pdl = pdl_enabled() if plan.pdl is None else plan.pdl
        _module(device).functions["experts_combine"].launch(rows, 256, 0, _stream(device), params, pdl=pdl)
        launched(settles=False)
    return out


def _launch(
    kind: str, variant: Variant, ctas: int, threads: int, sums: int, params: ExpertParams, device: int, plan: Plan
) -> None:
    pdl = pdl_enabled() if plan.pdl is None else plan.pdl
    shared = 4 * (params.sums_at + sums)
    _module(device).functions[variant.name(kind)].launch(ctas, threads, shared, _stream(device), params, pdl=pdl)

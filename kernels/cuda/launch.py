"""How a skinny matrix product is cut and launched. Twin of the structs and lists in skinny_gemm.cu."""

import ctypes
import functools
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from slipstream.kernels import driver
from slipstream.kernels.cuda import build
from slipstream.kernels.gpu.launch import capability, launched, pdl_enabled


class Epilogue(IntEnum):
    """What happens to the product."""

    STORE = 0
    ADD = 1
    GATE_UP = 2
    QKV = 3


class Params(ctypes.Structure):
    """As in skinny_gemm.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "norm_weight", "sumsq_in", "residual", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("write_index", "out", "out_k", "out_v", "sumsq_out", "counter")),
        *((name, ctypes.c_int64) for name in ("x_stride", "residual_stride", "angle_stride", "kv_stride")),
        *(
            (name, ctypes.c_int32)
            for name in ("M", "N", "K", "tiles", "chunks_per_part", "slots", "num_sumsq", "m_groups")
        ),
        *((name, ctypes.c_int32) for name in ("q_heads", "kv_heads", "head_dim", "evict_first")),
        *((name, ctypes.c_int32) for name in ("left", "fixed")),
        *((name, ctypes.c_float) for name in ("eps", "inverse_width")),
    )


@dataclass(frozen=True)
class Variant:
    """One compiled kernel. None of this changes a bit of the result.

    Args:
        row_tiles: tiles of 8 rows of x in a CTA.
        weight_tiles: tiles of 16 weight rows that a CTA takes at a time.
        depth: chunks (32 k) of weights in flight per thread; bulk: of each part in a slot of the ring.
        x_depth: chunks of x that a thread holds.
        max_warps: that the registers allow.
        bulk: weights come by bulk copies (bulk_gemm.cuh), not by loads (skinny_gemm.cuh).
    """

    row_tiles: int
    weight_tiles: int
    depth: int
    x_depth: int
    max_warps: int
    bulk: bool = False

    def name(self, epilogue: Epilogue, norm: bool) -> str:
        """The kernel's name in the cubin."""
        cut = (self.row_tiles, self.weight_tiles, self.depth, self.x_depth)
        return f"{'bulk' if self.bulk else 'skinny'}_{int(epilogue)}_{int(norm)}_" + "_".join(map(str, cut))

    @property
    def resident(self) -> bool:
        """Bulk: x is read once, not once a tile; all chunks of a part must fit in x_depth."""
        return self.bulk and self.x_depth == RESIDENT_CHUNKS

    def sum_bytes(self, parts: int) -> int:
        """Of shared memory for the parts' sums in fp32."""
        return 4 * parts * 8 * self.row_tiles * (16 * self.weight_tiles + 4) * (2 if self.resident else 1)

    def slot_bytes(self, parts: int) -> int:
        """Of a slot of the ring."""
        return 1024 * self.weight_tiles * self.depth * parts

    def slots(self, parts: int, shared: int) -> int:
        """Of the ring, where a CTA may take `shared` bytes."""
        return min(MAX_SLOTS, (shared - BARRIER_BYTES - self.sum_bytes(parts)) // self.slot_bytes(parts))

    def shared_bytes(self, parts: int, shared: int) -> int:
        """Of one CTA."""
        if not self.bulk:
            return self.sum_bytes(parts)
        ring = self.slots(parts, shared) * self.slot_bytes(parts)
        return BARRIER_BYTES + ring + self.sum_bytes(parts)


MAX_SLOTS, BARRIER_BYTES = 15, 384  # as in bulk_gemm.cuh
MIN_SLOTS = 4  # a shorter ring hides nothing
RESIDENT_CHUNKS = 16
SHORT_K, SHORT_K_PAIRS, SHORT_K_16 = Variant(1, 1, 4, 4, 12), Variant(1, 2, 4, 4, 12), Variant(2, 2, 4, 2, 12)
ONE_TILE, TWO_TILES = Variant(1, 1, 4, 2, 8), Variant(1, 2, 4, 2, 8)
ROWS_16, ROWS_32, ROWS_64 = Variant(2, 2, 4, 1, 8), Variant(4, 2, 2, 1, 12), Variant(8, 2, 2, 1, 8)
BULK = Variant(1, 1, 1, RESIDENT_CHUNKS, 8, bulk=True)
BULK_LONG_K, BULK_ONE = Variant(1, 2, 1, 4, 8, bulk=True), Variant(1, 1, 1, 8, 8, bulk=True)
VARIANTS = (
    *(SHORT_K, SHORT_K_PAIRS, SHORT_K_16, ONE_TILE, TWO_TILES, ROWS_16, ROWS_32, ROWS_64),
    *(BULK, BULK_LONG_K, BULK_ONE),
)
MAX_ROWS = 2048  # of a launch of skinny_gemm.cuh; prompts of several requests are just more CTAs
MAX_WARPS = 12  # of a CTA; of CTAs of a short K also what an SM is counted to hold
# Of shared memory for a CTA by bulk copies, in turns: large and small fit on an SM, even with attention's 74 KB in the
# place of the small one, and two large ones do not (bulk_gemm.cuh).
LARGE_BULK_BYTES, MOST_BULK_BYTES = 140 << 10, 80 << 10
IN_L2 = 8 << 20  # bytes of a weight that other CTAs find in the L2 once one has read it


def norms(epilogue: Epilogue) -> tuple[bool, ...]:
    """Whether kernels with a norm in front, without, or both are compiled; all have every variant."""
    return {Epilogue.ADD: (False,), Epilogue.GATE_UP: (True,)}.get(epilogue, (False, True))


def split_k(width: int, norm: bool) -> tuple[int, int]:
    """(parts, chunks of 32 in the longest) of a K of `width`: arithmetic, so the same for any number of rows."""
    chunks = width // 32
    per_part = -(-chunks // (MAX_WARPS if not norm and chunks <= 4 * MAX_WARPS else 8))
    return -(-chunks // per_part), per_part


@dataclass(frozen=True)
class Device:
    """What the choice of a kernel asks of a card.

    Args:
        sms: multiprocessors.
        bulk_bytes: of shared memory for a CTA of which two fit on one; 0: the card has no bulk copies.
        large_bytes: of every other kernel's CTAs, beside which one of the others fits; 0: as the others.
    """

    sms: int
    bulk_bytes: int
    large_bytes: int = 0


def choose(rows: int, tiles: int, width: int, parts: int, per_part: int, device: Device) -> Variant:
    """The kernel for `rows` rows of x; tiles: of 16 weight rows.

    A short K in the L2 is bound by what a CTA waits for, hardly by bytes: the lowest CTAs that are all on the card at
    once are the fastest, or within 2 % of them, of 13 kernels for SmolLM2's layers at 16, 32, 64 and 128 rows on an
    H200. Where none are, ROWS_32 is: ROWS_64, alone on an SM, takes twice as long for as many rows.
    """
    short = per_part <= 4
    in_l2 = tiles * 32 * width <= IN_L2
    if in_l2 and short:
        units, at_once = -(-tiles // 2), device.sms * (MAX_WARPS // parts)
        for variant in (SHORT_K_PAIRS, SHORT_K_16):
            if units * -(-rows // (8 * variant.row_tiles)) <= at_once or rows <= 8 * variant.row_tiles:
                return variant
        return ROWS_32
    if not in_l2 and rows <= 8 and parts <= BULK.max_warps:
        found = _bulk(tiles, per_part, device.sms)
        if device.bulk_bytes and found.slots(parts, device.bulk_bytes) >= MIN_SLOTS:
            return found
    if rows <= 8:
        return SHORT_K if short else TWO_TILES if tiles >= 8 * device.sms else ONE_TILE
    if rows <= 16:
        return SHORT_K_16 if short else ROWS_16
    if rows <= 32 or parts > ROWS_64.max_warps:
        return ROWS_32
    return ROWS_64


def _bulk(tiles: int, per_part: int, sms: int) -> Variant:
    if per_part <= RESIDENT_CHUNKS:
        return BULK
    # Two tiles at a time halve the reads of x, if there are any after the first, but must not leave SMs idle.
    pairs = 2 * -(-tiles // (2 * sms)) <= -(-tiles // sms)
    return BULK_LONG_K if pairs else BULK_ONE


def most_shared_bytes(variant: Variant, shared: int) -> int:
    """Of any launch, where a CTA by bulk copies may take `shared`. Fewer parts make its slots smaller, not its ring."""
    return shared if variant.bulk else variant.shared_bytes(variant.max_warps, shared)


@functools.cache
def _module(epilogue: Epilogue, device: int) -> driver.Module:
    shared = max(_device(device).bulk_bytes, _device(device).large_bytes)
    functions = [
        (variant.name(epilogue, norm), most_shared_bytes(variant, shared))
        for norm in norms(epilogue)
        for variant in VARIANTS
        if shared or not variant.bulk
    ]
    return driver.Module(build.cubins(capability())[int(epilogue)], device, functions)


def load(device: int) -> None:
    """Compile and load everything, the other kernels of bf16 products, too: before a graph is captured."""
    from slipstream.kernels.cuda import cluster_launch, prompt_launch, wide_launch  # built upon this module

    for epilogue in Epilogue:
        _module(epilogue, device)
    wide_launch.load(device)
    cluster_launch.load(device)
    prompt_launch.load(device)


@dataclass(frozen=True)
class Override:
    """For measurements: another cut than the table's. `parts` changes bits, the rest does not."""

    variant: Variant | None = None
    parts: int | None = None
    pdl: bool | None = None
    evict_first: bool = True
    wide: Any = None  # a cut of wide_launch.py or cluster_launch.py; False: none
    prompt: Any = None  # a sharing of prompt_launch.py; False: none


@dataclass(frozen=True)
class Flow:
    """How kernels of bulk copies hand the memory over from one to the next (bulk_gemm.cuh). Changes no bits.

    Args:
        left: KB that a CTA has still to ask for when the next kernel may start.
        fixed: units that a CTA has from the start; the others go to whoever comes first.
    """

    left: int = 96
    fixed: int = 3


# The best of 150 tried on an H200, with rings in turns of 140 and 80 KB. Steps of Llama-3.1-8B's sizes with attention
# over 300 tokens, M = 1: 3.94 ms (4.28 with 80 KB each and units dealt out beforehand; M = 4 and 8: 4.09 and 4.35 for
# 4.37 and 4.62). left = 64 takes 0.13 more, 112 and 128 0.02, 160 to 256 0.05; fixed = 1 or 2 0.03. Tried and gone: KB
# that a CTA asks into the L2 behind its wait, after those in its ring (32 to 64: 0.01 to 0.02 more at M = 1 and 4; 96
# 0.05), or before it (64 of every kernel 0.02, 256 0.16 more), the next kernel's weights, asked for at this one's end
# (32 KB 0.05, 96 0.13, 192 0.28 more), and a bound on KB asked for and not there yet (40 to 128: 0.8 more).
FLOW = Flow()


# Of BULK_ONE: of q_a and kv_a of Kimi-K2.5, with one unit for each CTA and latencies before and behind, a layer takes
# 1.3 us less at M = 1 and 1.5 at 4 than with 96; 48, 64, 128 and 192 are worse.
ONE_FLOW = Flow(left=32)


class _Turn(threading.local):
    large = False


_turn = _Turn()  # whether this thread's last kernel of bulk copies had a large ring


def _take_turn(epilogue: Epilogue, card: Device) -> int:
    """Bytes of shared memory for a CTA of the kernel that is launched now.

    Large and small in turns, and large always in front of attention, so that every capture of a step finds the same.
    """
    _turn.large = epilogue is Epilogue.QKV or not _turn.large
    return card.large_bytes if _turn.large and card.large_bytes else card.bulk_bytes


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _device(device: int) -> Device:
    properties = torch.cuda.get_device_properties(device)
    half = properties.shared_memory_per_multiprocessor // 2 - 1024  # the system takes 1 KB of each CTA
    if capability() < 90:
        return Device(properties.multi_processor_count, 0)
    large = LARGE_BULK_BYTES if 2 * half >= LARGE_BULK_BYTES + MOST_BULK_BYTES else 0
    return Device(properties.multi_processor_count, min(half, MOST_BULK_BYTES), large)


def launch(
    epilogue: Epilogue,
    norm: bool,
    params: Params,
    device: int,
    override: Override,
) -> None:
    """Fill the cut into `params` and launch on torch's current stream. `params.N`: outputs of a row, or weight rows."""
    parts, per_part = split_k(params.K, norm)
    if override.parts is not None:
        per_part = -(-(params.K // 32) // override.parts)
        parts = -(-(params.K // 32) // per_part)
    card = _device(device)
    tiles = -(-params.N // (8 if epilogue is Epilogue.GATE_UP else 16))
    variant = override.variant or choose(params.M, tiles, params.K, parts, per_part, card)
    units = -(-tiles // variant.weight_tiles)  # what a CTA takes at a time
    params.tiles = units * variant.weight_tiles
    params.chunks_per_part = per_part
    params.m_groups = -(-params.M // (8 * variant.row_tiles))
    params.evict_first = int(override.evict_first and params.m_groups == 1)
    ctas, warps, shared = units * params.m_groups, parts, card.bulk_bytes
    if variant.bulk:
        shared = _take_turn(epilogue, card)
        params.slots = variant.slots(parts, shared)
        if params.m_groups > 1 or params.slots < 1 or (variant.resident and per_part > variant.x_depth):
            raise ValueError(f"{params.M} rows, {parts} parts of {per_part}: {variant.name(epilogue, norm)} cannot")
        slot, handed = variant.slot_bytes(parts), ONE_FLOW if variant == BULK_ONE else FLOW
        params.left, params.fixed = (handed.left << 10) // slot, handed.fixed
        ctas, warps = min(units, card.sms), parts + 1
    if parts > variant.max_warps:
        raise ValueError(f"{parts} parts; {variant.name(epilogue, norm)} has registers for {variant.max_warps}")
    _module(epilogue, device).functions[variant.name(epilogue, norm)].launch(
        ctas,
        32 * warps,
        # All of it, used or not: no second large one shall fit.
        shared if variant.bulk else variant.shared_bytes(parts, 0),
        _stream(device),
        params,
        pdl=pdl_enabled() if override.pdl is None else override.pdl,
    )
    launched(settles=epilogue is Epilogue.QKV or variant.bulk)  # as they do

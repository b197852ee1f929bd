"""How a matrix product of 9 and more rows of x is cut and launched. Twin of the struct and the list in wide_gemm.cu."""

import ctypes
import functools
from dataclasses import dataclass

import torch

from slipstream.kernels import driver
from slipstream.kernels.cuda import build
from slipstream.kernels.cuda.launch import IN_L2, Epilogue, Override, Params, norms, split_k
from slipstream.kernels.gpu.launch import capability, launched, pdl_enabled

HEADER_BYTES, MAX_SLOTS = 1024, 15  # as in wide_gemm.cuh
MIN_SLOTS = 2
FROM_ROWS = 1 << 30  # of x: no product is cut so unless asked for (9, when it has been timed)
# What one H200 gives, in bytes a second: from DRAM, and from the L2 to all multiprocessors. Only their ratio counts.
DRAM_RATE, L2_RATE = 4.4, 5.5


class WideParams(ctypes.Structure):
    """As in wide_gemm.cuh."""

    _fields_ = (("common", Params), ("parts", ctypes.c_int32))


@dataclass(frozen=True)
class Variant:
    """One compiled kernel. None of this changes a bit of the result.

    Args:
        row_tiles: tiles of 8 rows of x that a warp sums.
        groups: of so many rows, side by side in a CTA.
        x_warps: that bring x into shared memory.
        max_warps: that sum: `groups` for each tile of 16 weight rows.
        ctas: on a multiprocessor, that the registers allow.
    """

    row_tiles: int
    groups: int
    x_warps: int
    max_warps: int
    ctas: int

    def name(self, epilogue: Epilogue, norm: bool) -> str:
        """The kernel's name in the cubin."""
        cut = (self.row_tiles, self.groups, self.x_warps, self.max_warps)
        return f"wide_{int(epilogue)}_{int(norm)}_" + "_".join(map(str, cut))

    @property
    def columns(self) -> int:
        """Rows of x that a CTA takes."""
        return 8 * self.row_tiles * self.groups

    @property
    def max_tiles(self) -> int:
        """Of 16 weight rows, in a unit."""
        return self.max_warps // self.groups

    def slot_bytes(self, unit_tiles: int) -> int:
        """Of the ring: a chunk of each of two parts."""
        return 2 * (1024 * unit_tiles + 64 * self.columns)

    @property
    def sum_bytes(self) -> int:
        """Of a pair's sums in fp32."""
        return 4 * self.columns * (16 * self.max_tiles + 4)


ROWS_16, ROWS_32, ROWS_64 = Variant(2, 1, 2, 8, 2), Variant(4, 1, 2, 8, 2), Variant(8, 1, 4, 8, 1)
ROWS_64_HIGH, ROWS_128 = Variant(8, 1, 4, 14, 1), Variant(8, 2, 4, 12, 1)
VARIANTS = (ROWS_16, ROWS_32, ROWS_64, ROWS_64_HIGH, ROWS_128)
BY_ROWS = ((ROWS_16,), (ROWS_32,), (ROWS_64, ROWS_64_HIGH), (ROWS_128, ROWS_64_HIGH, ROWS_64))


@dataclass(frozen=True)
class Cut:
    """A kernel, and the tiles of 16 weight rows in a unit, an even number."""

    variant: Variant
    unit_tiles: int


@dataclass(frozen=True)
class Device:
    """What the choice of a kernel asks of a card.

    Args:
        sms: multiprocessors that clusters fill.
        shared_bytes: of shared memory for a CTA alone on one, and for each of two; empty: the card has no clusters.
    """

    sms: int
    shared_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """Clusters of `pairs` CTAs: `walk` for each of `groups` groups of rows of x; each takes `turns` units at most."""

    pairs: int
    groups: int
    walk: int
    turns: int


def grid(cut: Cut, rows: int, tiles: int, parts: int, sms: int) -> Grid:
    """The clusters that are on the card at once, if there is work for them, each with as many units as the others."""
    pairs, groups, units = -(-parts // 2), -(-rows // cut.variant.columns), -(-tiles // cut.unit_tiles)
    turns = -(-units // max(1, sms // pairs // groups))
    return Grid(pairs, groups, -(-units // turns), turns)


def slots(cut: Cut, device: Device) -> int:
    """Of the ring."""
    room = device.shared_bytes[cut.variant.ctas - 1] - HEADER_BYTES - cut.variant.sum_bytes
    return min(MAX_SLOTS, room // cut.variant.slot_bytes(cut.unit_tiles))


def shared_bytes(cut: Cut, device: Device) -> int:
    """Of one CTA."""
    ring = slots(cut, device) * cut.variant.slot_bytes(cut.unit_tiles)
    return HEADER_BYTES + ring + cut.variant.sum_bytes


def cost(cut: Cut, rows: int, tiles: int, parts: int, device: Device) -> float:
    """What the busiest multiprocessor waits for: weights from DRAM, or these and rows of x through the L2."""
    there = grid(cut, rows, tiles, parts, device.sms)
    weights, x = 16 * cut.unit_tiles, cut.variant.columns
    together = max(1, there.groups if there.groups * there.pairs <= device.sms else 1)  # find weights in the L2
    return there.turns * max(weights / together / DRAM_RATE, (weights + x) / L2_RATE)


def cuts(rows: int, device: Device) -> list[Cut]:
    """All that take `rows` rows of x with few columns to spare."""
    variants = next((several for several in BY_ROWS if rows <= several[0].columns), BY_ROWS[-1])
    found = [Cut(v, tiles) for v in variants for tiles in range(v.max_tiles, 0, -2)]
    return list(dict.fromkeys(cut for cut in found if slots(cut, device) >= MIN_SLOTS))


def choose(rows: int, tiles: int, width: int, parts: int, device: Device) -> Cut | None:
    """The cut for `rows` rows of x and `tiles` tiles of weight rows; None: skinny_gemm.cuh is better."""
    if rows < FROM_ROWS or not device.shared_bytes or tiles * 32 * width <= IN_L2:
        return None
    return min(cuts(rows, device), key=lambda cut: cost(cut, rows, tiles, parts, device))


@functools.cache
def _module(epilogue: Epilogue, device: int) -> driver.Module:
    card = _device(device)
    functions = [(v.name(epilogue, norm), max(card.shared_bytes)) for norm in norms(epilogue) for v in VARIANTS]
    return driver.Module(build.compiled(capability(), [build.wide(int(epilogue))])[0], device, functions)


def load(device: int) -> None:
    """Compile and load everything: before a graph is captured."""
    if _device(device).shared_bytes:
        build.compiled(capability(), [build.wide(int(epilogue)) for epilogue in Epilogue])
        for epilogue in Epilogue:
            _module(epilogue, device)


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _device(device: int) -> Device:
    properties = torch.cuda.get_device_properties(device)
    # The system takes 1 KB of each CTA.
    alone, half = (properties.shared_memory_per_multiprocessor // ctas - 1024 for ctas in (1, 2))
    # A cluster lies in one group of multiprocessors, of which a card has several of unlike size: 132 in all on an H200.
    sms = properties.multi_processor_count // 16 * 16
    return Device(sms, (alone, half) if capability() == 90 else ())


def cut_for(epilogue: Epilogue, norm: bool, params: Params, device: int) -> Cut | None:
    """As `choose`, for a launch."""
    tiles = -(-params.N // (8 if epilogue is Epilogue.GATE_UP else 16))
    return choose(params.M, tiles, params.K, split_k(params.K, norm)[0], _device(device))


def launch(epilogue: Epilogue, norm: bool, params: Params, device: int, cut: Cut, override: Override) -> None:
    """Fill the cut into `params` and launch on torch's current stream. `params.N`: outputs of a row, or weight rows."""
    parts, per_part = split_k(params.K, norm)
    card = _device(device)
    tiles = -(-params.N // (8 if epilogue is Epilogue.GATE_UP else 16))
    there = grid(cut, params.M, tiles, parts, card.sms)
    params.tiles = tiles + tiles % 2
    params.chunks_per_part = per_part
    params.m_groups = there.groups
    params.slots = slots(cut, card)
    params.evict_first = int(override.evict_first and there.groups == 1)
    if params.slots < MIN_SLOTS or cut.unit_tiles % 2 or cut.unit_tiles > cut.variant.max_tiles:
        raise ValueError(f"{cut}: {params.slots} slots; expected {MIN_SLOTS}, tiles in pairs that the kernel takes")
    name = cut.variant.name(epilogue, norm)
    _module(epilogue, device).functions[name].launch(
        there.pairs * there.groups * there.walk,
        32 * (cut.unit_tiles * cut.variant.groups + cut.variant.x_warps + 1),
        shared_bytes(cut, card),
        _stream(device),
        WideParams(params, parts),
        pdl=pdl_enabled() if override.pdl is None else override.pdl,
        cluster=there.pairs,
    )
    launched(settles=epilogue is Epilogue.QKV)  # as wide_gemm.cuh does

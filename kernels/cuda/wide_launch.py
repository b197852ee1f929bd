"""How a matrix product of 9 and more rows of x is cut and launched. Twin of the struct and the list in wide_gemm.cu."""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slipstream.kernels import driver
from slipstream.kernels.cuda import build
from slipstream.kernels.cuda.launch import BARRIER_BYTES, IN_L2, MAX_SLOTS, Epilogue, Override, Params, norms, split_k
from slipstream.kernels.gpu.launch import capability, launched, pdl_enabled

MAX_WARPS = 8  # that sum
ORDER_WARPS, ORDER_CHUNKS = 4, 4  # as in order_rows.cuh
MIN_SLOTS = 2
FROM_ROWS = 9  # of x; up to 8 take bulk_gemm.cuh


class WideParams(ctypes.Structure):
    """As in wide_gemm.cuh."""

    _fields_ = (
        ("common", Params),
        ("x_ordered", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("parts", "split", "columns", "clustered")),
    )


@dataclass(frozen=True)
class Variant:
    """One compiled kernel. None of this changes a bit of the result.

    Args:
        row_tiles: tiles of 8 rows of x that a warp sums.
        groups: of so many rows, side by side in a CTA.
    """

    row_tiles: int
    groups: int

    def name(self, epilogue: Epilogue) -> str:
        """The kernel's name in the cubin."""
        return f"wide_{int(epilogue)}_{self.row_tiles}_{self.groups}"

    @property
    def columns(self) -> int:
        """Rows of x that a CTA takes."""
        return 8 * self.row_tiles * self.groups


ROWS_16, ROWS_32, ROWS_64, ROWS_128 = Variant(2, 1), Variant(4, 1), Variant(8, 1), Variant(8, 2)
VARIANTS = (ROWS_16, ROWS_32, ROWS_64, ROWS_128)


@dataclass(frozen=True)
class Cut:
    """How a kernel takes a product.

    Args:
        variant: the kernel.
        unit_tiles: tiles of 16 weight rows in a unit, an even number.
        split: pairs of parts of K that are summed side by side: 1 or all.
        cluster: CTAs that share the reads of x.
    """

    variant: Variant
    unit_tiles: int
    split: int
    cluster: int = 1

    @property
    def warps(self) -> int:
        """That sum."""
        return self.unit_tiles // 2 * self.variant.groups * self.split

    @property
    def slot_bytes(self) -> int:
        """Of the ring."""
        return 2 * self.split * (1024 * self.unit_tiles + 64 * self.variant.columns)

    @property
    def sum_bytes(self) -> int:
        """Of a unit's sums in fp32."""
        return 4 * self.split * self.variant.columns * (16 * self.unit_tiles + 4)


@dataclass(frozen=True)
class Device:
    """What the choice of a kernel asks of a card.

    Args:
        sms: multiprocessors.
        shared_bytes: of shared memory for a CTA alone on one; 0: the card has no clusters.
        clusters: the card holds at once, no more than one CTA of them on an SM, by their size.
    """

    sms: int
    shared_bytes: int
    clusters: Callable[[int], int]


@dataclass(frozen=True)
class Grid:
    """Clusters: `walk` for each of `groups` groups of rows of x; each takes `turns` times units at most."""

    groups: int
    walk: int
    turns: int


def grid(cut: Cut, rows: int, tiles: int, device: Device) -> Grid:
    """The clusters that are on the card at once, if there is work for them, each with as many units as the others."""
    groups, units = -(-rows // cut.variant.columns), -(-tiles // cut.unit_tiles)
    work = -(-units // cut.cluster)
    turns = -(-work // max(1, device.clusters(cut.cluster) // groups))
    return Grid(groups, -(-work // turns), turns)


def slots(cut: Cut, device: Device) -> int:
    """Of the ring."""
    room = device.shared_bytes - BARRIER_BYTES - cut.sum_bytes
    return min(MAX_SLOTS, room // cut.slot_bytes)


def shared_bytes(cut: Cut, device: Device) -> int:
    """Of one CTA."""
    return BARRIER_BYTES + slots(cut, device) * cut.slot_bytes + cut.sum_bytes


def cuts(rows: int, parts: int, device: Device) -> list[Cut]:
    """All that take `rows` rows of x with few columns to spare: for measurements."""
    smallest = next((v for v in VARIANTS if rows <= v.columns), VARIANTS[-1])
    variants = (smallest, ROWS_64) if smallest is ROWS_128 else (smallest,)
    found = [
        Cut(variant, tiles, split, cluster)
        for variant in variants
        for split in dict.fromkeys((1, -(-parts // 2)))
        for tiles in range(2 * (MAX_WARPS // variant.groups // split), 0, -2)
        for cluster in (1, 2, 4)
    ]
    return [cut for cut in found if slots(cut, device) >= MIN_SLOTS]


def choose(rows: int, tiles: int, width: int, parts: int, device: Device) -> Cut | None:
    """The cut for `rows` rows of x and `tiles` tiles of weight rows; None: skinny_gemm.cuh is better.

    The fastest of all `cuts` on an H200, or within 5 % of it, for 9 to 256 rows of Llama-3.1-8B's products and
    SmolLM2's head. Of 4096 x 4096 skinny_gemm.cuh is 2 us faster at 64 rows (21.7, 23.6), 0.5 at 9.
    """
    if rows < FROM_ROWS or not device.shared_bytes or tiles * 32 * width <= IN_L2:
        return None
    pairs = -(-parts // 2)
    if tiles >= 8 * device.sms and (rows > 32 or pairs < 4):
        return _high(rows, tiles, device)
    variant = next((v for v in (ROWS_16, ROWS_32) if rows <= v.columns), ROWS_64)
    at_once = -(-tiles // 2) * -(-rows // variant.columns) <= device.sms  # each unit of two tiles finds an SM
    return Cut(variant, 2 if at_once or pairs > MAX_WARPS // 2 else 4, pairs, cluster=2)


def _high(rows: int, tiles: int, device: Device) -> Cut:
    """For many weight rows: high units, so that x is read less often."""
    if rows > 64:
        return Cut(ROWS_128, 8, 1, cluster=2)
    if rows > 32:
        height = min((14, 16), key=lambda n: n * -(-tiles // (n * device.sms)))  # what an SM takes in all its turns
        return Cut(ROWS_64, height, 1)
    return Cut(ROWS_16 if rows <= 16 else ROWS_32, 12, 1)


@functools.cache
def _module(epilogue: Epilogue, device: int) -> driver.Module:
    functions = [(f"order_{int(norm)}", 0) for norm in norms(epilogue)]
    functions += [(v.name(epilogue), _device(device).shared_bytes) for v in VARIANTS]
    return driver.Module(build.compiled(capability(), [build.wide(int(epilogue))])[0], device, functions)


def load(device: int) -> None:
    """Compile and load everything: before a graph is captured."""
    if _device(device).shared_bytes:
        build.compiled(capability(), [build.wide(int(epilogue)) for epilogue in Epilogue])
        for epilogue in Epilogue:
            _module(epilogue, device)


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _ordered(device: int, elements: int) -> torch.Tensor:
    # From the stream's or the captured graph's pool, which has it back as soon as the product is launched: whatever
    # kernel gets the room next writes behind its wait for that product.
    return torch.empty(elements, dtype=torch.bfloat16, device=torch.device("cuda", device))


@functools.cache
def _device(device: int) -> Device:
    properties = torch.cuda.get_device_properties(device)
    sms = properties.multi_processor_count
    alone = properties.shared_memory_per_multiprocessor - 1024  # which the system takes of each CTA

    @functools.cache
    def clusters(size: int) -> int:
        # A cluster lies in one group of multiprocessors, of which a card has several of unlike size.
        function = _module(Epilogue.ADD, device).functions[ROWS_64.name(Epilogue.ADD)]
        return function.most_clusters(size, 32 * (MAX_WARPS + 1), alone)

    return Device(sms, alone if capability() == 90 else 0, clusters)


def cut_for(epilogue: Epilogue, norm: bool, params: Params, device: int) -> Cut | None:
    """As `choose`, for a launch."""
    tiles = -(-params.N // (8 if epilogue is Epilogue.GATE_UP else 16))
    return choose(params.M, tiles, params.K, split_k(params.K, norm)[0], _device(device))


def launch(epilogue: Epilogue, norm: bool, params: Params, device: int, cut: Cut, override: Override) -> None:
    """Fill the cut into `params` and launch on torch's current stream. `params.N`: outputs of a row, or weight rows."""
    parts, _ = split_k(params.K, norm)
    card = _device(device)
    tiles = -(-params.N // (8 if epilogue is Epilogue.GATE_UP else 16))
    there = grid(cut, params.M, tiles, card)
    params.tiles = tiles + tiles % 2
    params.m_groups = there.groups
    params.slots = slots(cut, card)
    params.evict_first = int(override.evict_first and there.groups == 1)
    if params.slots < MIN_SLOTS or cut.unit_tiles % 2 or cut.warps > MAX_WARPS or cut.split not in (1, -(-parts // 2)):
        raise ValueError(f"{cut}: {params.slots} slots, {parts} parts; expected tiles in pairs that the kernel takes")
    chunks, columns = params.K // 32, cut.variant.columns
    ordered = _ordered(device, there.groups * columns * params.K)
    wide = WideParams(params, ordered.data_ptr(), parts, cut.split, columns, int(cut.cluster > 1))
    pdl = pdl_enabled() if override.pdl is None else override.pdl
    functions, stream = _module(epilogue, device).functions, _stream(device)
    order_ctas = there.groups * columns // 8 * -(-chunks // (ORDER_WARPS * ORDER_CHUNKS))
    functions[f"order_{int(norm)}"].launch(order_ctas, 32 * ORDER_WARPS, 0, stream, wide, pdl=pdl)
    functions[cut.variant.name(epilogue)].launch(
        there.groups * there.walk * cut.cluster,
        32 * (cut.warps + 1),
        shared_bytes(cut, card),
        stream,
        wide,
        pdl=pdl,
        cluster=cut.cluster,
    )
    launched(settles=epilogue is Epilogue.QKV)  # as wide_gemm.cuh does

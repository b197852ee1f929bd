"""How a matrix product over INT4 weights is cut and launched. Twin of the struct and the list in int4_gemm.cu."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.kernels import driver
from slipstream.kernels.cuda import build
from slipstream.kernels.cuda.launch import Epilogue, Override, Params
from slipstream.kernels.gpu.launch import capability, launched, pdl_enabled
from slipstream.kernels.int4 import BLOCK, GROUPS, Int4Weight

QUAD = 128  # input features that a warp takes at a time
# Shared memory of a block by compute capability, in bytes; an unknown card gets the least.
_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
_LEAST_SHARED_BYTES = 99 << 10
_FEW_BLOCKS = 128
_BULK_ARCH = 90  # cards from here on copy in bulk

# Whether few rows run on int4_bulk.cuh where the card can. It settles the number of parts of K, so it changes bits, of
# all row counts alike.
BULK = False


class Int4Params(ctypes.Structure):
    """As in int4_parts.cuh."""

    _fields_ = (
        ("common", Params),
        ("scales", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("staged_stride", "x_at", "sums_at", "slots_of_block")),
        ("inverse_slots", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Variant:
    """One compiled kernel that loads weights into registers (int4_gemm.cuh). None of this changes a bit of the result.

    Args:
        row_tiles: tiles of 8 rows of x in a CTA.
        depth: quads of weights in flight per thread.
        staged: rows of x are read once, through the norm, into shared memory, and a CTA may take several blocks of the
            weight in turn; else rows are read by every warp as it needs them.
        max_warps, ctas: of a CTA, and of these on a multiprocessor, that the registers allow.
    """

    row_tiles: int
    depth: int
    staged: bool
    max_warps: int
    ctas: int

    def name(self, epilogue: Epilogue, group: int) -> str:
        """The kernel's name in the cubin."""
        cut = f"{self.row_tiles}_{self.depth}_{int(self.staged)}_{32 * self.max_warps}"
        return f"int4_{int(epilogue)}_{int(has_norm(epilogue))}_{group}_{cut}"

    def staged_bytes(self, rows: int, width: int) -> int:
        """Of the rows of x: each 64 bytes longer than a multiple of 128, so that a warp's reads meet no bank twice."""
        return 2 * rows * (width + 32) if self.staged else 0

    def sums_bytes(self, parts: int) -> int:
        """Of the parts' sums in fp32."""
        return _sum_bytes(parts, 8 * self.row_tiles)


@dataclass(frozen=True)
class Bulk:
    """One compiled kernel whose weights come by bulk copies (int4_bulk.cuh). None of this changes a bit of the result.

    Args:
        row_tiles: tiles of 8 rows of x in a CTA; other CTAs have the next rows.
        x_quads: quads of x that a thread holds.
        resident: these are all of a part, so that x is read once, not once a block; only behind a norm, without one the
            other kernel does so by itself.
    """

    row_tiles: int
    x_quads: int
    resident: bool

    def name(self, epilogue: Epilogue, group: int) -> str:
        """The kernel's name in the cubin."""
        cut = f"{self.row_tiles}_{self.x_quads}_{int(self.resident)}"
        return f"int4bulk_{int(epilogue)}_{int(has_norm(epilogue))}_{group}_{cut}"

    def takes(self, norm: bool, quads: int) -> bool:
        """Whether it is compiled with a norm or without, and for rows of so many quads."""
        compiled = norm if self.resident else not norm or self.row_tiles == 1
        return compiled and (not self.resident or quads <= BULK_PARTS * self.x_quads)


@dataclass(frozen=True)
class Cut:
    """How kernels by bulk copies are cut; none of it changes a bit. As `Flow` in launch.py.

    Args:
        ring: KB of a CTA's ring at most.
        left: KB that a CTA has still to ask for when the next kernel may start.
        ahead, gate_up: KB behind those in its ring that a CTA asks into the L2 before it waits; of the gate and up
            projection, whose predecessor is so small that its ring holds all of it and the memory is free.
        row_tiles: of a CTA where there are more than 8 rows and no norm.
    """

    ring: int = 112
    left: int = 64
    ahead: int = 0
    gate_up: int = 0
    row_tiles: int = 1


CUT = Cut()  # of every launch; measurements put others here
MIN_SLOTS = 3  # of a ring: a shorter one hides nothing
MAX_SLOTS, BARRIER_BYTES = 20, 256  # as in int4_bulk.cuh
BULK_PARTS, BULK_ROWS = 8, 16

WIDE, NARROW, NARROW_DEEP = Variant(1, 2, True, 16, 1), Variant(1, 1, True, 8, 3), Variant(1, 2, True, 8, 2)
WIDE_16, NARROW_16 = Variant(2, 2, True, 16, 1), Variant(2, 2, True, 8, 2)
DIRECT, DIRECT_16, DIRECT_32 = Variant(1, 2, False, 16, 1), Variant(2, 1, False, 16, 1), Variant(4, 1, False, 16, 1)
VARIANTS = (WIDE, NARROW, NARROW_DEEP, WIDE_16, NARROW_16, DIRECT, DIRECT_16, DIRECT_32)
RESIDENT, STREAM, STREAM_16 = Bulk(1, 4, True), Bulk(1, 4, False), Bulk(2, 2, False)
BULKS = (RESIDENT, STREAM, STREAM_16)


def takes(weight: Int4Weight) -> bool:
    """Whether the kernels run on this weight."""
    return weight.words.numel() > 0 and weight.in_features % QUAD == 0


def has_norm(epilogue: Epilogue) -> bool:
    """Whether the kernels of an epilogue read x through a norm: each is compiled in the one form that layers use."""
    return epilogue in (Epilogue.GATE_UP, Epilogue.QKV)


def split_k(num_rows: int, width: int) -> int:
    """Parts of K of a weight [num_rows, width]: part of the arithmetic, so by its shape alone.

    Where weights are loaded into registers, one of few rows is spread over more warps of each block, so that as many
    loads are in flight.
    """
    most = 16 if not BULK and -(-num_rows // BLOCK) <= _FEW_BLOCKS else BULK_PARTS
    return min(most, width // QUAD)


def choose(epilogue: Epilogue, rows: int, shape: Sequence[int], group: int, arch: int) -> Variant | Bulk:
    """The kernel for `rows` rows of x, of those that fit into the shared memory of a block. shape: the weight's."""
    norm, width = has_norm(epilogue), shape[1]
    if BULK and arch >= _BULK_ARCH and rows <= BULK_ROWS:
        wide = STREAM_16 if rows > 8 and CUT.row_tiles > 1 and not norm else STREAM
        found = RESIDENT if RESIDENT.takes(norm, width // QUAD) else wide
        if layout(found, epilogue, rows, shape, group, arch).slots >= MIN_SLOTS:
            return found
    parts = split_k(shape[0], width)
    if rows <= 8:
        few = WIDE if parts > 8 else NARROW_DEEP if epilogue == Epilogue.QKV else NARROW
        candidates = (few, DIRECT)
    elif rows <= 16:
        candidates = (WIDE_16 if parts > 8 else NARROW_16, DIRECT_16)
    else:
        return DIRECT_32
    staged, direct = candidates
    return staged if staged.staged_bytes(rows, width) + staged.sums_bytes(parts) <= shared_limit(arch) else direct


@dataclass(frozen=True)
class Layout:
    """Shared memory of one launch by bulk copies: barriers, ring, the norm's weight, sums.

    Args:
        slots: of the ring.
        slot, x_at, sums_at, total: bytes.
    """

    slots: int
    slot: int
    x_at: int
    sums_at: int
    total: int


def layout(bulk: Bulk, epilogue: Epilogue, rows: int, shape: Sequence[int], group: int, arch: int) -> Layout:
    """Of a CTA of which two fit on a multiprocessor; too few slots where that is too small."""
    parts = split_k(*shape)
    most = (shared_limit(arch) + 1024) // 2 - 1024  # the system takes 1 KB of each CTA
    norm = 2 * shape[1] if has_norm(epilogue) else 0
    sums = 2 * _sum_bytes(parts, min(rows, 8 * bulk.row_tiles))
    slot = parts * (BLOCK * QUAD // 2 + BLOCK * QUAD // group * 2)  # a quad of each part, and its scales
    slots = max(0, min(MAX_SLOTS, min(CUT.ring << 10, most - BARRIER_BYTES - norm - sums) // slot))
    x_at = BARRIER_BYTES + slots * slot
    return Layout(slots, slot, x_at, x_at + norm, x_at + norm + sums)


def _sum_bytes(parts: int, columns: int) -> int:
    return 4 * parts * columns * 36


def turns(variant: Variant, blocks: int, quads: int, parts: int, sms: int, shared_bytes: int) -> int:
    """Blocks of the weight that a CTA takes one after the other: so many that all CTAs are on the card at once.

    Args:
        shared_bytes: of a CTA that takes several, with two places for its sums; 1 where it may not ask for so much.
    """
    limit = shared_limit(capability())
    if not variant.staged or quads % (parts * variant.depth) or shared_bytes > limit:
        return 1
    together = max(1, min(variant.ctas, limit // (shared_bytes + 1024))) * sms
    return -(-blocks // together)


def shared_limit(arch: int) -> int:
    """Bytes of shared memory that a block may ask for."""
    return _SHARED_BYTES.get(arch, _LEAST_SHARED_BYTES)


def _unit(group: int, epilogue: Epilogue) -> build.Unit:
    return build.Unit("int4_gemm", (f"SLIPSTREAM_GROUP={group}", f"SLIPSTREAM_EPILOGUE={int(epilogue)}"))


@functools.cache
def _module(group: int, epilogue: Epilogue, device: int) -> driver.Module:
    arch = capability()
    cubin = build.compiled(arch, [_unit(group, epilogue)])[0]
    bulks = [bulk for bulk in BULKS if arch >= _BULK_ARCH and bulk.takes(has_norm(epilogue), 1)]
    names = [one.name(epilogue, group) for one in VARIANTS] + [one.name(epilogue, group) for one in bulks]
    return driver.Module(cubin, device, [(name, shared_limit(arch)) for name in names])


def load(device: int, groups: tuple[int, ...] = GROUPS) -> None:
    """Compile and load everything: before a graph is captured."""
    build.compiled(capability(), [_unit(group, epilogue) for group in groups for epilogue in Epilogue])
    for group in groups:
        for epilogue in Epilogue:
            _module(group, epilogue, device)


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _sms(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch(epilogue: Epilogue, weight: Int4Weight, params: Params, device: int, override: Override) -> None:
    """Fill the cut into `params` and launch on torch's current stream.

    Args:
        override: `variant` may be one of this module; `parts` is none of its choices.
    """
    parts = split_k(*weight.shape)
    kernel = override.variant or choose(epilogue, params.M, weight.shape, weight.group, capability())
    assert isinstance(kernel, Variant | Bulk)
    blocks = weight.words.shape[0]
    params.weight, params.tiles = weight.words.data_ptr(), 2 * blocks
    params.m_groups = -(-params.M // (8 * kernel.row_tiles))
    params.evict_first = int(override.evict_first and params.m_groups == 1)
    everything = Int4Params(params, weight.scales.data_ptr())
    if isinstance(kernel, Bulk):
        ctas, shared_bytes = _cut_bulk(kernel, epilogue, everything, weight, _sms(device))
    else:
        ctas, shared_bytes = _cut_loads(kernel, everything, blocks, parts, _sms(device))
    _module(weight.group, epilogue, device).functions[kernel.name(epilogue, weight.group)].launch(
        ctas,
        32 * parts,
        shared_bytes,
        _stream(device),
        everything,
        pdl=pdl_enabled() if override.pdl is None else override.pdl,
    )
    launched(settles=epilogue is Epilogue.QKV or isinstance(kernel, Bulk))  # as the kernels do


def _cut_bulk(bulk: Bulk, epilogue: Epilogue, given: Int4Params, weight: Int4Weight, sms: int) -> tuple[int, int]:
    """Fills `given`; (CTAs, bytes of shared memory of each)."""
    common, parts = given.common, split_k(*weight.shape)
    quads = common.K // QUAD
    if parts > BULK_PARTS or not bulk.takes(has_norm(epilogue), quads):
        raise ValueError(f"{parts} parts of {quads} quads: {bulk} takes fewer, or is not compiled")
    found = layout(bulk, epilogue, common.M, weight.shape, weight.group, capability())
    if found.slots < 1:
        raise ValueError(f"{common.M} rows of {common.K}: no shared memory is left for {bulk}")
    common.slots, common.left = found.slots, (CUT.left << 10) // found.slot
    ahead = CUT.gate_up if epilogue is Epilogue.GATE_UP else CUT.ahead
    common.ahead = (ahead << 10) // found.slot if common.m_groups == 1 else 0  # else each group would ask
    given.x_at, given.sums_at = found.x_at // 4, found.sums_at // 4
    given.slots_of_block = -(-quads // parts)
    given.inverse_slots = -(-(1 << 31) // given.slots_of_block)
    groups = common.m_groups
    return groups * min(weight.words.shape[0], max(1, sms // groups)), found.total


def _cut_loads(variant: Variant, given: Int4Params, blocks: int, parts: int, sms: int) -> tuple[int, int]:
    """Fills `given`; (CTAs, bytes of shared memory of each)."""
    common = given.common
    if parts > variant.max_warps or (variant.staged and 8 * variant.row_tiles < common.M):
        raise ValueError(f"{common.M} rows, {parts} parts: {variant} takes fewer")
    staged, sums = variant.staged_bytes(common.M, common.K), variant.sums_bytes(parts)
    in_turn = turns(variant, blocks, common.K // QUAD, parts, sms, staged + 2 * sums)
    given.staged_stride, given.sums_at = common.K + 32, staged // 4
    return -(-blocks // in_turn) * common.m_groups, staged + sums * min(2, in_turn)

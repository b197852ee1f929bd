"""How a matrix product over INT4 weights is cut and launched. Twin of the struct and the list in int4_gemm.cu."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from slipstream.kernels import driver
from slipstream.kernels.cuda import build
from slipstream.kernels.cuda.launch import Epilogue, Override, Params
from slipstream.kernels.gpu.launch import capability, launched, pdl_enabled
from slipstream.kernels.int4 import BLOCK, GROUPS, Int4Weight

QUAD = 128  # input features that a warp takes at a time
MAX_PARTS = 8  # of K: warps of a CTA, or CTAs of a cluster
CLUSTER = MAX_PARTS
# Shared memory of a block by compute capability, in bytes; an unknown card gets the least.
_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
_LEAST_SHARED_BYTES = 99 << 10
_BULK_ARCH = 90  # cards from here on copy in bulk


class Int4Params(ctypes.Structure):
    """As in int4_parts.cuh."""

    _fields_ = (
        ("common", Params),
        ("scales", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("staged_stride", "x_at", "sums_at", "step", "ahead", "trigger")),
    )


@dataclass(frozen=True)
class Variant:
    """One compiled kernel that loads weights into registers (int4_gemm.cuh). None of this changes a bit of the result.

    Args:
        row_tiles: tiles of 8 rows of x in a CTA.
        depth: quads of weights in flight per thread.
        staged: rows of x are read once, through the norm, into shared memory, and a CTA may take several blocks of the
            weight in turn; else rows are read by every warp as it needs them.
        ctas: on a multiprocessor, that the registers allow.
    """

    row_tiles: int
    depth: int
    staged: bool
    ctas: int

    def name(self, epilogue: Epilogue, group: int) -> str:
        """The kernel's name in the cubin."""
        cut = f"{self.row_tiles}_{self.depth}_{int(self.staged)}"
        return f"int4_{int(epilogue)}_{int(has_norm(epilogue))}_{group}_{cut}"

    def staged_bytes(self, rows: int, width: int) -> int:
        """Of the rows of x in shared memory."""
        return _row_bytes(width) * rows if self.staged else 0

    def sums_bytes(self, parts: int) -> int:
        """Of the parts' sums in fp32."""
        return _sum_bytes(parts, 8 * self.row_tiles)


class Rows(IntEnum):
    """Where a ring's kernel keeps rows of x, as in int4_ring.cuh; CLUSTER is int4_cluster.cuh."""

    RESIDENT = 0
    STREAM = 1
    CLUSTER = 2


@dataclass(frozen=True)
class Ring:
    """One compiled kernel whose weights come by bulk copies through rings. None of this changes a bit of the result.

    Args:
        rows: where rows of x lie.
        row_tiles: tiles of 8 rows of x; it takes no more.
        x_quads: quads of x that a thread holds; RESIDENT: that a part may have.
    """

    rows: Rows
    row_tiles: int
    x_quads: int = 0

    def name(self, epilogue: Epilogue, group: int) -> str:
        """The kernel's name in the cubin."""
        of = f"{int(epilogue)}_{int(has_norm(epilogue))}_{group}_{self.row_tiles}"
        if self.rows is Rows.CLUSTER:
            return f"int4cluster_{of}"
        return f"int4ring_{of}_{self.x_quads}_{int(self.rows)}"

    @property
    def norms(self) -> tuple[bool, ...]:
        """Compiled without a norm in front, with one: rows without a norm are resident where they stream once."""
        return (True,) if self.rows is Rows.RESIDENT else (False, True)

    def takes(self, norm: bool, rows: int, per_part: int) -> bool:
        """Whether this kernel is there, and for so many rows and quads in a part."""
        fits = self.rows is not Rows.RESIDENT or per_part <= self.x_quads
        return norm in self.norms and rows <= 8 * self.row_tiles and fits

    def warps(self, parts: int) -> int:
        """Of a CTA."""
        return CLUSTER if self.rows is Rows.CLUSTER else parts

    def grid(self, blocks: int, sms: int) -> int:
        """CTAs: so many that all are on the card at once. In a cluster each warp of each CTA takes a block."""
        if self.rows is Rows.CLUSTER:
            return CLUSTER * min(-(-blocks // CLUSTER), max(1, sms // CLUSTER))
        return min(blocks, sms)


class Trigger(IntEnum):
    """When a ring's kernel lets the next one start, as in int4_parts.cuh: at once, behind its last copy, at its end."""

    AT_START = 0
    AT_LAST_COPY = 1
    AT_END = 2


@dataclass(frozen=True)
class Cut:
    """How the rings of a launch are cut; none of it changes a bit.

    Args:
        ring_bytes: of a CTA's rings at most. What does not fit beside another CTA is left out.
        step: quads in a slot: 1, 2 or 4.
        ahead: quads of each warp that come into the L2 before the wait, behind those of its ring.
        trigger: when the next kernel may start.
        whole_sm: a CTA may take all shared memory of an SM, and no other fits beside it.
    """

    ring_bytes: int = 80 << 10
    step: int = 1
    ahead: int = 0
    trigger: Trigger = Trigger.AT_START
    whole_sm: bool = False


CUT = Cut()  # of every launch; measurements put others here
MIN_SLOTS = 2  # of a warp's ring: a shorter one hides nothing


@dataclass(frozen=True)
class Layout:
    """Shared memory of one launch of a ring's kernel: barriers, rings, rows of x or the norm's weight, sums.

    Args:
        slots: of each warp.
        x_at, sums_at, total: bytes.
    """

    slots: int
    x_at: int
    sums_at: int
    total: int


NARROW, NARROW_DEEP, NARROW_16 = Variant(1, 1, True, 2), Variant(1, 2, True, 2), Variant(2, 2, True, 1)
DIRECT, DIRECT_16, DIRECT_32 = Variant(1, 2, False, 1), Variant(2, 1, False, 1), Variant(4, 1, False, 1)
VARIANTS = (NARROW, NARROW_DEEP, NARROW_16, DIRECT, DIRECT_16, DIRECT_32)
RING, RING_STREAM = Ring(Rows.RESIDENT, 1, 4), Ring(Rows.STREAM, 1, 4)
RING_CLUSTER = Ring(Rows.CLUSTER, 2)
RINGS = (RING, RING_STREAM, RING_CLUSTER)


def takes(weight: Int4Weight) -> bool:
    """Whether the kernels run on this weight."""
    return weight.words.numel() > 0 and weight.in_features % QUAD == 0


def has_norm(epilogue: Epilogue) -> bool:
    """Whether the kernels of an epilogue read x through a norm: each is compiled in the one form that layers use."""
    return epilogue in (Epilogue.GATE_UP, Epilogue.QKV)


def split_k(width: int) -> tuple[int, int]:
    """(parts, quads in each) of a K of `width`: part of the arithmetic, so by K alone."""
    quads = width // QUAD
    per_part = -(-quads // MAX_PARTS)
    return -(-quads // per_part), per_part


def choose(epilogue: Epilogue, rows: int, shape: Sequence[int], group: int, arch: int, sms: int) -> Variant | Ring:
    """The kernel for `rows` rows of x, of those that fit into the shared memory of a block. shape: the weight's."""
    width = shape[1]
    parts, per_part = split_k(width)
    for ring in RINGS if arch >= _BULK_ARCH else ():
        fits = ring.takes(has_norm(epilogue), rows, per_part)
        if fits and layout(ring, epilogue, rows, shape, group, CUT, arch, sms).slots >= MIN_SLOTS:
            return ring
    if rows > 16:
        return DIRECT_32
    if rows > 8:
        staged, direct = NARROW_16, DIRECT_16
    else:
        staged, direct = NARROW_DEEP if epilogue == Epilogue.QKV else NARROW, DIRECT
    fits = staged.staged_bytes(rows, width) + staged.sums_bytes(parts) <= shared_limit(arch)
    return staged if fits else direct


def layout(
    ring: Ring, epilogue: Epilogue, rows: int, shape: Sequence[int], group: int, cut: Cut, arch: int, sms: int
) -> Layout:
    """Shared memory of a launch; too few slots where that is too small."""
    parts, per_part = split_k(shape[1])
    blocks, warps, limit = -(-shape[0] // BLOCK), ring.warps(parts), shared_limit(arch)
    most = limit if cut.whole_sm else (limit + 1024) // 2 - 1024  # the system takes 1 KB of each CTA
    beside = 2 * shape[1] if has_norm(epilogue) else 0
    if ring.rows is Rows.CLUSTER:
        beside = _row_bytes(per_part * QUAD) * rows
    together = ring.grid(blocks, sms)  # blocks that the card takes at a time
    sums = _sum_bytes(warps, rows) * (2 if blocks > together else 1)
    slot = cut.step * _quad_bytes(group)
    slots = max(0, min(cut.ring_bytes, most - beside - sums - 128)) // (warps * (slot + 8))
    x_at = -(-8 * warps * slots // 128) * 128 + warps * slots * slot
    return Layout(slots, x_at, x_at + beside, x_at + beside + sums)


def _row_bytes(width: int) -> int:
    """Of a staged row of x: 64 bytes longer than a multiple of 128, so that a warp's reads meet no bank twice."""
    return 2 * (width + 32)


def _sum_bytes(parts: int, columns: int) -> int:
    return 4 * parts * columns * 36


def _quad_bytes(group: int) -> int:
    """Of a block's quad: 32 rows of 128 nibbles, and their scales."""
    return BLOCK * QUAD // 2 + BLOCK * QUAD // group * 2


def turns(variant: Variant, blocks: int, quads: int, per_part: int, sms: int, shared_bytes: int) -> int:
    """Blocks of the weight that a CTA takes one after the other: so many that all CTAs are on the card at once.

    Args:
        shared_bytes: of a CTA that takes several, with two places for its sums; 1 where it may not ask for so much.
    """
    whole = per_part % variant.depth == 0 and quads % per_part % variant.depth == 0
    limit = shared_limit(capability())
    if not variant.staged or not whole or shared_bytes > limit:
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
    rings = [ring for ring in RINGS if arch >= _BULK_ARCH and has_norm(epilogue) in ring.norms]
    names = [v.name(epilogue, group) for v in VARIANTS] + [ring.name(epilogue, group) for ring in rings]
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
    parts, per_part = split_k(params.K)
    arch, sms = capability(), _sms(device)
    chosen = override.variant or choose(epilogue, params.M, weight.shape, weight.group, arch, sms)
    assert isinstance(chosen, Variant | Ring)
    blocks = weight.words.shape[0]
    params.weight, params.chunks_per_part = weight.words.data_ptr(), per_part * (QUAD // 32)
    params.tiles = 2 * blocks
    params.m_groups = 1 if isinstance(chosen, Ring) else -(-params.M // (8 * chosen.row_tiles))
    params.evict_first = int(override.evict_first and params.m_groups == 1)
    everything, warps = Int4Params(params, weight.scales.data_ptr(), params.K + 32), parts
    if isinstance(chosen, Ring):
        ctas, shared_bytes = _cut_ring(chosen, epilogue, everything, weight, per_part, sms)
        warps = chosen.warps(parts)
    else:
        ctas, shared_bytes = _cut_loads(chosen, everything, blocks, parts, sms)
    _module(weight.group, epilogue, device).functions[chosen.name(epilogue, weight.group)].launch(
        ctas,
        32 * warps,
        shared_bytes,
        _stream(device),
        everything,
        pdl=pdl_enabled() if override.pdl is None else override.pdl,
        cluster=CLUSTER if isinstance(chosen, Ring) and chosen.rows is Rows.CLUSTER else 1,
    )
    launched(settles=epilogue is Epilogue.QKV)  # as the kernels do


def _cut_ring(
    ring: Ring, epilogue: Epilogue, given: Int4Params, weight: Int4Weight, per_part: int, sms: int
) -> tuple[int, int]:
    """Fills `given`; (CTAs, bytes of shared memory of each)."""
    common = given.common
    if not ring.takes(has_norm(epilogue), common.M, per_part):
        raise ValueError(f"{common.M} rows, parts of {per_part} quads: {ring} takes fewer, or is not compiled")
    found = layout(ring, epilogue, common.M, weight.shape, weight.group, CUT, capability(), sms)
    if found.slots < 1:
        raise ValueError(f"{common.M} rows of {common.K}: no shared memory is left for {ring}")
    common.slots = found.slots
    given.x_at, given.sums_at = found.x_at // 4, found.sums_at // 4
    given.step, given.ahead, given.trigger = CUT.step, CUT.ahead, CUT.trigger
    if ring.rows is Rows.CLUSTER:
        given.staged_stride = per_part * QUAD + 32
    return ring.grid(weight.words.shape[0], sms), found.total


def _cut_loads(variant: Variant, given: Int4Params, blocks: int, parts: int, sms: int) -> tuple[int, int]:
    """Fills `given`; (CTAs, bytes of shared memory of each)."""
    common, (_, per_part) = given.common, split_k(given.common.K)
    if variant.staged and 8 * variant.row_tiles < common.M:
        raise ValueError(f"{common.M} rows: {variant} takes fewer")
    staged, sums = variant.staged_bytes(common.M, common.K), variant.sums_bytes(parts)
    in_turn = turns(variant, blocks, common.K // QUAD, per_part, sms, staged + 2 * sums)
    given.sums_at = staged // 4
    return -(-blocks // in_turn) * common.m_groups, staged + sums * min(2, in_turn)

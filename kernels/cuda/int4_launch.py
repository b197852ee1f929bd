"""How a matrix product over INT4 weights is cut and launched. Twin of the struct and the list in int4_gemm.cu."""

import ctypes
import functools
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


class Int4Params(ctypes.Structure):
    """As in int4_gemm.cuh."""

    _fields_ = (
        ("common", Params),
        ("scales", ctypes.c_void_p),
        ("staged_stride", ctypes.c_int32),
        ("sums_at", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Variant:
    """One compiled kernel. None of this changes a bit of the result.

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
        return 4 * parts * 8 * self.row_tiles * 36


WIDE, NARROW, NARROW_DEEP = Variant(1, 2, True, 16, 1), Variant(1, 1, True, 8, 3), Variant(1, 2, True, 8, 2)
WIDE_16, NARROW_16 = Variant(2, 2, True, 16, 1), Variant(2, 2, True, 8, 2)
DIRECT, DIRECT_16, DIRECT_32 = Variant(1, 2, False, 16, 1), Variant(2, 1, False, 16, 1), Variant(4, 1, False, 16, 1)
VARIANTS = (WIDE, NARROW, NARROW_DEEP, WIDE_16, NARROW_16, DIRECT, DIRECT_16, DIRECT_32)


def takes(weight: Int4Weight) -> bool:
    """Whether the kernels run on this weight."""
    return weight.words.numel() > 0 and weight.in_features % QUAD == 0


def has_norm(epilogue: Epilogue) -> bool:
    """Whether the kernels of an epilogue read x through a norm: each is compiled in the one form that layers use."""
    return epilogue in (Epilogue.GATE_UP, Epilogue.QKV)


def split_k(num_rows: int, width: int) -> tuple[int, int]:
    """(parts, quads in each) of a weight [num_rows, width]: part of the arithmetic, so by its shape alone.

    A weight of few rows is spread over more warps of each block, so that as many loads are in flight.
    """
    quads = width // QUAD
    most = 16 if -(-num_rows // BLOCK) <= _FEW_BLOCKS else 8
    per_part = -(-quads // most)
    return -(-quads // per_part), per_part


def choose(epilogue: Epilogue, rows: int, width: int, parts: int, shared_bytes: int) -> Variant:
    """The kernel for `rows` rows of x, of those that fit into the shared memory of a block."""
    if rows <= 8:
        few = WIDE if parts > 8 else NARROW_DEEP if epilogue == Epilogue.QKV else NARROW
        candidates = (few, DIRECT)
    elif rows <= 16:
        candidates = (WIDE_16 if parts > 8 else NARROW_16, DIRECT_16)
    else:
        return DIRECT_32
    staged, direct = candidates
    return staged if staged.staged_bytes(rows, width) + staged.sums_bytes(parts) <= shared_bytes else direct


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
    return driver.Module(cubin, device, [(v.name(epilogue, group), shared_limit(arch)) for v in VARIANTS])


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
    parts, per_part = split_k(*weight.shape)
    variant = override.variant or choose(epilogue, params.M, params.K, parts, shared_limit(capability()))
    assert isinstance(variant, Variant)
    if parts > variant.max_warps or (variant.staged and 8 * variant.row_tiles < params.M):
        raise ValueError(f"{params.M} rows, {parts} parts: {variant} takes fewer")
    blocks = weight.words.shape[0]
    params.weight, params.chunks_per_part = weight.words.data_ptr(), per_part * (QUAD // 32)
    params.tiles = 2 * blocks
    params.m_groups = -(-params.M // (8 * variant.row_tiles))
    params.evict_first = int(override.evict_first and params.m_groups == 1)
    staged, sums = variant.staged_bytes(params.M, params.K), variant.sums_bytes(parts)
    in_turn = turns(variant, blocks, params.K // QUAD, per_part, _sms(device), staged + 2 * sums)
    ctas = -(-blocks // in_turn) * params.m_groups
    everything = Int4Params(params, weight.scales.data_ptr(), params.K + 32, staged // 4)
    _module(weight.group, epilogue, device).functions[variant.name(epilogue, weight.group)].launch(
        ctas,
        32 * parts,
        staged + sums * min(2, in_turn),
        _stream(device),
        everything,
        pdl=pdl_enabled() if override.pdl is None else override.pdl,
    )
    launched(settles=epilogue is Epilogue.QKV)  # as int4_gemm.cuh does

"""How a skinny matrix product is cut and launched. Twin of the structs and lists in skinny_gemm.cu."""

import ctypes
import functools
from dataclasses import dataclass
from enum import IntEnum

import torch

from slipstream.kernels.cuda import build, driver
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
        *((name, ctypes.c_void_p) for name in ("write_index", "out", "out_k", "out_v", "sumsq_out")),
        *((name, ctypes.c_int64) for name in ("x_stride", "residual_stride", "angle_stride", "kv_stride")),
        *((name, ctypes.c_int32) for name in ("M", "N", "K", "tiles", "chunks_per_part", "num_sumsq", "m_groups")),
        *((name, ctypes.c_int32) for name in ("q_heads", "kv_heads", "head_dim", "evict_first")),
        *((name, ctypes.c_float) for name in ("eps", "inverse_width")),
    )


@dataclass(frozen=True)
class Variant:
    """One compiled kernel. None of this changes a bit of the result.

    Args:
        row_tiles: tiles of 8 rows of x in a CTA.
        weight_tiles: tiles of 16 weight rows that a CTA takes at a time.
        depth, x_depth: chunks (32 k) of weights and of x in flight per thread.
        loop: CTAs on an SM, each of which takes several tiles in turn; 0: a CTA for each.
        max_warps: that the registers allow.
    """

    row_tiles: int
    weight_tiles: int
    depth: int
    x_depth: int
    loop: int
    max_warps: int

    def name(self, epilogue: Epilogue, norm: bool) -> str:
        """The kernel's name in the cubin."""
        cut = (self.row_tiles, self.weight_tiles, self.depth, self.x_depth, self.loop)
        return f"skinny_{int(epilogue)}_{int(norm)}_" + "_".join(map(str, cut))

    def shared_bytes(self, warps: int) -> int:
        """Of one CTA: the sums of each warp in fp32."""
        return 4 * warps * 8 * self.row_tiles * (16 * self.weight_tiles + 4)


SHORT_K, SHORT_K_PAIRS = Variant(1, 1, 4, 4, 0, 12), Variant(1, 2, 4, 4, 0, 12)
ONE_TILE, ONE_TILE_SHALLOW, ONE_TILE_LOOP = (
    Variant(1, 1, 8, 2, 0, 8),
    Variant(1, 1, 4, 2, 0, 8),
    Variant(1, 1, 8, 2, 2, 8),
)
TWO_TILES, TWO_TILES_LOOP, TWO_TILES_DEEP = (
    Variant(1, 2, 4, 2, 0, 8),
    Variant(1, 2, 4, 2, 2, 8),
    Variant(1, 2, 8, 2, 1, 8),
)
SHORT_K_LOOP = Variant(1, 2, 3, 3, 2, 8)
SHORT_K_16, ROWS_16 = Variant(2, 2, 4, 2, 0, 12), Variant(2, 2, 4, 1, 0, 8)
ROWS_32, ROWS_64 = Variant(4, 2, 2, 1, 0, 12), Variant(8, 2, 2, 1, 0, 8)
MAX_ROWS = 128
MAX_WARPS = 12
IN_L2 = 8 << 20  # bytes of a weight that other CTAs find in the L2 once one has read it


def variants(epilogue: Epilogue, norm: bool) -> tuple[Variant, ...]:
    """Every kernel compiled for an epilogue, with or without a norm in front."""
    common = (
        SHORT_K_PAIRS,
        TWO_TILES,
        TWO_TILES_LOOP,
        TWO_TILES_DEEP,
        SHORT_K_16,
        ROWS_16,
        ROWS_32,
        ROWS_64,
    )
    if epilogue in (Epilogue.GATE_UP, Epilogue.QKV):
        return common
    return (SHORT_K, SHORT_K_LOOP, ONE_TILE_SHALLOW, ONE_TILE, ONE_TILE_LOOP, *common)


def norms(epilogue: Epilogue) -> tuple[bool, ...]:
    """Whether kernels with a norm in front, without, or both are compiled."""
    return {Epilogue.ADD: (False,), Epilogue.GATE_UP: (True,)}.get(epilogue, (False, True))


def split_k(width: int, norm: bool) -> tuple[int, int]:
    """(parts, chunks of 32 in each) of a K of `width`: part of the arithmetic, so the same for any number of rows."""
    chunks = width // 32
    per_part = -(-chunks // (MAX_WARPS if not norm and chunks <= 4 * MAX_WARPS else 8))
    return -(-chunks // per_part), per_part


def choose(epilogue: Epilogue, rows: int, tiles: int, width: int, parts: int, per_part: int, sms: int) -> Variant:
    """The kernel for `rows` rows of x; tiles: of 16 outputs or pairs."""
    pairs = epilogue in (Epilogue.GATE_UP, Epilogue.QKV)
    weight_tiles = tiles * (2 if pairs else 1)
    short = per_part <= 4
    if weight_tiles * 32 * width <= IN_L2 and short:
        ctas = -(-weight_tiles // 2)
        if rows <= 8 and not pairs and weight_tiles <= 2 * sms:
            return SHORT_K
        for variant in (SHORT_K_PAIRS, SHORT_K_16, ROWS_32):  # the fewest rows of x in a CTA that fill the SMs once
            if ctas * -(-rows // (8 * variant.row_tiles)) <= sms or rows <= 8 * variant.row_tiles:
                return variant
        return ROWS_32 if parts > ROWS_64.max_warps else ROWS_64
    if rows <= 8:
        if short:
            whole = per_part == SHORT_K_LOOP.depth and width == 32 * parts * per_part
            return SHORT_K_LOOP if whole and parts <= SHORT_K_LOOP.max_warps and not pairs else SHORT_K_PAIRS
        return TWO_TILES if pairs or weight_tiles >= 8 * sms else ONE_TILE
    if rows <= 16:
        return SHORT_K_16 if short else ROWS_16
    if rows <= 32 or parts > ROWS_64.max_warps:
        return ROWS_32
    return ROWS_64


@functools.cache
def _module(epilogue: Epilogue, device: int) -> driver.Module:
    functions = [
        (variant.name(epilogue, norm), variant.shared_bytes(variant.max_warps))
        for norm in norms(epilogue)
        for variant in variants(epilogue, norm)
    ]
    return driver.Module(build.cubins(capability())[int(epilogue)], device, functions)


def load(device: int) -> None:
    """Compile and load everything: before a graph is captured."""
    for epilogue in Epilogue:
        _module(epilogue, device)


@dataclass(frozen=True)
class Override:
    """For measurements: another cut than the table's. `parts` changes bits, the rest does not."""

    variant: Variant | None = None
    parts: int | None = None
    pdl: bool | None = None
    evict_first: bool = True


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _sms(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch(epilogue: Epilogue, norm: bool, tiles: int, params: Params, device: int, override: Override) -> None:
    """Fill the cut into `params` and launch on torch's current stream.

    Args:
        tiles: tiles of 16 outputs (or pairs of outputs).
    """
    parts, per_part = split_k(params.K, norm)
    if override.parts is not None:
        per_part = -(-(params.K // 32) // override.parts)
        parts = -(-(params.K // 32) // per_part)
    sms = _sms(device)
    variant = override.variant or choose(epilogue, params.M, tiles, params.K, parts, per_part, sms)
    if parts > variant.max_warps:
        raise ValueError(f"{parts} parts; {variant.name(epilogue, norm)} has registers for {variant.max_warps}")
    ctas = tiles if epilogue in (Epilogue.GATE_UP, Epilogue.QKV) else -(-tiles // variant.weight_tiles)
    params.tiles = ctas if epilogue in (Epilogue.GATE_UP, Epilogue.QKV) else ctas * variant.weight_tiles
    params.chunks_per_part = per_part
    params.m_groups = -(-params.M // (8 * variant.row_tiles))
    params.evict_first = int(override.evict_first and params.m_groups == 1)
    if variant.loop:
        if params.m_groups > 1 or params.K % (32 * parts) or per_part % variant.depth:
            raise ValueError(f"{params.M} rows, {parts} parts of {per_part}: {variant.name(epilogue, norm)} cannot")
        ctas = min(ctas, variant.loop * sms)
    _module(epilogue, device).functions[variant.name(epilogue, norm)].launch(
        ctas * params.m_groups,
        32 * parts,
        variant.shared_bytes(parts),
        _stream(device),
        params,
        pdl=pdl_enabled() if override.pdl is None else override.pdl,
    )
    launched(settles=epilogue is Epilogue.QKV)  # as skinny_gemm.cuh does

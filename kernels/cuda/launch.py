"""How a skinny matrix product is cut and launched. Twin of the structs and lists in skinny_gemm.cu."""

import ctypes
import functools
from dataclasses import dataclass
from enum import IntEnum

import torch

from slipstream.kernels.cuda import build, driver
from slipstream.kernels.gpu.launch import capability, pdl_enabled


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
        *((name, ctypes.c_int32) for name in ("M", "N", "K", "chunks_per_warp", "num_sumsq", "m_groups")),
        *((name, ctypes.c_int32) for name in ("q_heads", "kv_heads", "head_dim", "evict_first")),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True)
class Variant:
    """One compiled kernel. None of this changes a bit of the result.

    Args:
        row_tiles: tiles of 8 rows of x in a CTA.
        weight_tiles: tiles of 16 weight rows in a CTA.
        depth, x_depth: chunks (32 k) of weights and of x in flight per thread.
        max_warps: that the registers allow.
    """

    row_tiles: int
    weight_tiles: int
    depth: int
    x_depth: int
    max_warps: int

    def name(self, epilogue: Epilogue, norm: bool) -> str:
        """The kernel's name in the cubin."""
        return f"skinny_{int(epilogue)}_{int(norm)}_{self.row_tiles}_{self.weight_tiles}_{self.depth}_{self.x_depth}"

    def shared_bytes(self, warps: int) -> int:
        """Of one CTA: the sums of each warp in fp32."""
        return 4 * warps * 8 * self.row_tiles * (16 * self.weight_tiles + 4)


SHORT_K, SHORT_K_PAIRS = Variant(1, 1, 4, 4, 12), Variant(1, 2, 4, 4, 12)
ONE_TILE, ONE_TILE_SHALLOW, TWO_TILES = Variant(1, 1, 8, 2, 8), Variant(1, 1, 4, 2, 8), Variant(1, 2, 4, 2, 8)
ROWS_16, ROWS_32, ROWS_64 = Variant(2, 2, 3, 1, 16), Variant(4, 2, 2, 1, 12), Variant(8, 2, 2, 1, 12)
ROWS_64_NORM = Variant(8, 2, 2, 1, 8)
MAX_ROWS = 128


def variants(epilogue: Epilogue, norm: bool) -> tuple[Variant, ...]:
    """Every kernel compiled for an epilogue, with or without a norm in front."""
    common = (TWO_TILES, ROWS_16, ROWS_32, ROWS_64_NORM if norm else ROWS_64)
    if epilogue in (Epilogue.GATE_UP, Epilogue.QKV):
        return (SHORT_K_PAIRS, *common)
    return (SHORT_K, SHORT_K_PAIRS, ONE_TILE_SHALLOW, ONE_TILE, *common)


def norms(epilogue: Epilogue) -> tuple[bool, ...]:
    """Whether kernels with a norm in front, without, or both are compiled."""
    return {Epilogue.ADD: (False,), Epilogue.GATE_UP: (True,)}.get(epilogue, (False, True))


def split_k(width: int, norm: bool, arch: int) -> tuple[int, int]:
    """(warps, chunks of 32 per warp) of a K of `width`: part of the arithmetic, so the same for any number of rows."""
    chunks = width // 32
    # Twelve warps' sums of 64 rows fill 108 KB of shared memory, which the small chips do not have.
    most = 12 if not norm and arch in (80, 90, 100) and chunks <= 48 else 8
    per_warp = -(-chunks // most)
    return -(-chunks // per_warp), per_warp


def choose(epilogue: Epilogue, norm: bool, rows: int, out_rows: int, chunks_per_warp: int) -> Variant:
    """The kernel for `rows` rows of x and `out_rows` rows of the weight."""
    pairs = epilogue in (Epilogue.GATE_UP, Epilogue.QKV)
    if rows <= 8:
        if chunks_per_warp <= 4:
            return SHORT_K_PAIRS if pairs or out_rows >= 16384 else SHORT_K
        return TWO_TILES if pairs or rows > 4 or out_rows >= 16384 else ONE_TILE
    if rows <= 16:
        return ROWS_16
    if rows <= 32:
        return ROWS_32
    return ROWS_64_NORM if norm else ROWS_64


@functools.cache
def _module(epilogue: Epilogue, device: int) -> driver.Module:
    functions = [
        (variant.name(epilogue, norm), variant.shared_bytes(variant.max_warps if capability() in (80, 90, 100) else 8))
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
    """For measurements: another cut than the table's. `warps` changes bits, the rest does not."""

    variant: Variant | None = None
    warps: int | None = None
    pdl: bool | None = None
    evict_first: bool = True


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def launch(epilogue: Epilogue, norm: bool, tiles: int, params: Params, device: int, override: Override) -> None:
    """Fill the cut into `params` and launch on torch's current stream.

    Args:
        tiles: tiles of 16 outputs (or pairs of outputs).
    """
    warps, per_warp = split_k(params.K, norm, capability())
    if override.warps is not None:
        per_warp = -(-(params.K // 32) // override.warps)
        warps = -(-(params.K // 32) // per_warp)
    variant = override.variant or choose(epilogue, norm, params.M, 16 * tiles, per_warp)
    if warps > variant.max_warps:
        raise ValueError(f"{warps} warps; {variant.name(epilogue, norm)} has registers for {variant.max_warps}")
    pairs = epilogue in (Epilogue.GATE_UP, Epilogue.QKV)
    ctas = tiles if pairs else -(-tiles // variant.weight_tiles)
    params.chunks_per_warp = per_warp
    params.m_groups = -(-params.M // (8 * variant.row_tiles))
    params.evict_first = int(override.evict_first and params.m_groups == 1)
    _module(epilogue, device).functions[variant.name(epilogue, norm)].launch(
        ctas * params.m_groups,
        32 * warps,
        variant.shared_bytes(warps),
        _stream(device),
        params,
        pdl=pdl_enabled() if override.pdl is None else override.pdl,
    )

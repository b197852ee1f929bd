"""How latent attention is cut on a card: tiles by architecture, chunks of keys by a row's position, room for them."""

from dataclasses import dataclass

import torch
import triton

from slipstream.kernels.gpu.tiles import architecture

CLASSES = 12  # a chunk is doubled up to so many times


@dataclass(frozen=True)
class Tile:
    """How large the pieces of a launch are.

    Args:
        rows: of a program, query heads folded in: always as many, so that sums are taken in one order.
        keys: tokens of a tile, a power of two.
        warps: of a program.
        stages: of the pipeline that loads tiles. Touches no bits.
        chunks: that a row's keys are cut into, at most: a power of two. Chunks are single tiles while a row has no more
            of them, else of twice, four times, ... as many: what a row gets from them follows from its position alone.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    chunks: int = 64

    @property
    def first_bits(self) -> int:
        """Positions below 1 << first_bits have chunks of one tile."""
        return (self.keys * self.chunks).bit_length() - 1


@dataclass(frozen=True)
class Combine:
    """How partials are put together: columns of a program, chunks at a time, warps. All three touch bits."""

    columns: int = 64
    chunks: int = 16
    warps: int = 2


# By architecture: decode and verify, then prompts. One cell of Kimi and DeepSeek has 1,152 bytes; two tiles of 32 of
# them and the queries of 16 rows are what sm_120's 99 KB hold.
_DECODE = {80: Tile(16, 32, 4, 3), 90: Tile(16, 32, 4, 3), 120: Tile(16, 32, 4, 2)}
_PREFILL = {80: Tile(32, 32, 8, 3), 90: Tile(64, 64, 8, 2), 120: Tile(32, 32, 8, 2)}
_FP32 = Tile(16, 16, 4, 1, 8)  # for tests of tiny models
COMBINE = Combine()
PROGRAMS = 264  # of a launch, about: two waves of 132 multiprocessors


def decode_tile(dtype: torch.dtype) -> Tile:
    return _DECODE[architecture()] if dtype.itemsize == 2 else _FP32


def prefill_tile(dtype: torch.dtype) -> Tile:
    return _PREFILL[architecture()] if dtype.itemsize == 2 else _FP32


@dataclass(frozen=True)
class Split:
    """row_blocks: of a request; chunks: room for partials of each; programs: of each (changes no bits)."""

    row_blocks: int
    chunks: int
    programs: int

    @staticmethod
    def of(batch: int, folded: int, context: int, tile: Tile, programs: int) -> "Split":
        """folded: rows x heads; context: tokens that the block table can hold; programs: of the whole launch, about."""
        if context > 1 << tile.first_bits + CLASSES:
            raise ValueError(f"a block table of {context} tokens: expected at most {1 << tile.first_bits + CLASSES}")
        row_blocks = triton.cdiv(folded, tile.rows)
        chunks = min(tile.chunks, triton.cdiv(context, tile.keys))
        return Split(row_blocks, chunks, max(1, min(chunks, programs // (batch * row_blocks))))

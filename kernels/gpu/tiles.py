"""Tile sizes of the matrix products: data by architecture and weight shape, none searched for at run time.

What decides a row's bits (how K is cut) hangs on the architecture and the weight's shape alone. How many rows a
program takes hangs on the number of rows and changes no bit.
"""

import functools
import warnings
from dataclasses import dataclass, replace

import torch

from slipstream.kernels.gpu import launch

# A program keeps its whole weight tile (it is loaded before the kernel waits for its predecessor) up to this K.
RESIDENT_K = 2048
ROW_BLOCKS = (8, 16, 32, 64, 128)
# Shared memory of one block, bytes, by architecture; what Triton itself needs beside the tiles is left free.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}
_SPARE_BYTES = 8 * 1024
_LEAST_K = 16  # columns of a warp in one step that the matrix unit takes


@dataclass(frozen=True)
class Tile:
    """How one weight shape is cut.

    Args:
        block_n: weight rows of a program; of a paired product (gate and up; both halves of a head) in each of the two.
        block_k: columns of one step; 0: the whole row is loaded at once (K at most RESIDENT_K).
        warps: of a program.
        split: warps that each take a share of every step's columns: all of them, or (fp32) 1: none do. More than one
            also keeps Triton from `wgmma`, which it takes from some number of rows on, and which may sum otherwise.
            0: no matrix unit, rows one after the other (resident weights and narrow outputs only).
        stages: Triton's; one fewer steps of weights lie in shared memory.
        prefetch: columns whose bytes are asked into the L2 cache before the kernel waits for its predecessor.
        max_block_m: most rows of a program; more rows take more programs.
        norm_apart_from: from this many rows a program on, the norm is a kernel of its own (same bits).
    """

    block_n: int
    block_k: int = 0
    warps: int = 4
    split: int = 4
    stages: int = 1
    prefetch: int = 0
    max_block_m: int = 32
    norm_apart_from: int = 64

    def __post_init__(self) -> None:
        if self.split > 1 and self.block_k % (_LEAST_K * self.split):
            raise ValueError(
                f"{self.block_k} columns a step for {self.split} warps; expected a multiple of {_LEAST_K * self.split}"
            )

    def block_m(self, num_rows: int) -> int:
        """Rows of a program when `num_rows` travel together."""
        if not self.split:
            return next((b for b in (1, 2, 4) if b >= num_rows), min(8, self.max_block_m))
        return min(next((b for b in ROW_BLOCKS if b >= num_rows), ROW_BLOCKS[-1]), self.max_block_m)

    def fitted(self, block_m: int, width: int, paired: bool) -> "Tile":
        """With as many stages as the card's shared memory holds; `width`: bytes of an element."""
        if not self.block_k:
            return self
        step = self.block_k * (self.block_n * (2 if paired else 1) + block_m) * width
        # Normed rows pass through shared memory on their way to the matrix unit. The warps' partial sums meet there,
        # too, after the last step. Of `stages`, Triton keeps one fewer in shared memory.
        room = SHARED_BYTES[architecture()] - _SPARE_BYTES - self.block_k * block_m * width
        return replace(self, stages=max(2, min(self.stages, room // step + 1)))

    def whole_head(self, half: int, num_in: int, width: int) -> "Tile":
        """This tile, of programs that each hold both halves, `half` rows each, of a head: its norm needs them all."""
        block_n = max(16, 1 << (half - 1).bit_length())
        if block_n <= self.block_n or not self.split:
            return replace(self, block_n=block_n)
        fewer = replace(self, block_n=block_n, max_block_m=max(8, min(self.max_block_m, 1024 // block_n)))
        step = max(64, _LEAST_K * self.split)
        if self.block_k or 2 * block_n * num_in * width <= SHARED_BYTES[architecture()] // 2:
            return replace(fewer, block_k=min(self.block_k, step) if width == 2 else self.block_k)
        return replace(fewer, block_k=step, stages=5)  # too large to be resident


_RESIDENT = Tile(block_n=16)
# (N, K) of a weight: its tile. A shape that is not listed takes the class of its K.
# The figures of tests/benchmarks/kernel_sweep.py on an H200 stand in tests/benchmarks/NOTES.md.
_LISTED: dict[int, dict[tuple[int, int], Tile]] = {
    90: {
        (3072, 576): Tile(block_n=32),
        (49152, 576): Tile(block_n=32),
        (6144, 4096): Tile(block_n=16, block_k=512, stages=4, prefetch=512, max_block_m=64, norm_apart_from=32),
    },
    80: {},
    120: {},
}
# Weights wider than RESIDENT_K by architecture: single products, paired products.
_STREAMED = {
    90: (
        Tile(block_n=32, block_k=512, stages=4, prefetch=512, max_block_m=64, norm_apart_from=32),
        Tile(block_n=32, block_k=256, stages=4, prefetch=512, max_block_m=64, norm_apart_from=32),
    ),
    80: (
        Tile(block_n=32, block_k=128, stages=5, max_block_m=64, norm_apart_from=32),
        Tile(block_n=16, block_k=128, stages=5, max_block_m=64, norm_apart_from=32),
    ),
    120: (
        Tile(block_n=32, block_k=128, stages=4, prefetch=512, max_block_m=64, norm_apart_from=32),
        Tile(block_n=16, block_k=128, stages=4, prefetch=512, max_block_m=64, norm_apart_from=32),
    ),
}

# fp32 has no matrix unit here: each sum runs over k in one thread, in order. For tests of tiny models.
_FULL_PRECISION = Tile(block_n=16, block_k=32, split=1, stages=2)


@functools.cache
def architecture() -> int:
    """80, 90 or 120: whose tiles the current card uses. A card between them, or a later one, uses the safe set (80)."""
    capability = launch.capability()
    if capability in SHARED_BYTES:
        return capability
    if capability in (86, 87, 89):  # Ampere and Ada with 99 KB of shared memory
        return 120 if capability != 87 else 80
    warnings.warn(f"no tiles for compute capability {capability / 10}: the safe set is used", stacklevel=2)
    return 80


def tile_for(num_out: int, num_in: int, dtype: torch.dtype, *, paired: bool = False) -> Tile:
    """The tile of a weight [num_out, num_in]; `paired`: two of its rows are needed in one program."""
    if dtype == torch.float32:
        return _FULL_PRECISION
    arch = architecture()
    listed = _LISTED[arch].get((num_out, num_in))
    if listed is not None:
        return listed
    room = (SHARED_BYTES[arch] - _SPARE_BYTES) // (num_in * dtype.itemsize) - _RESIDENT.block_n * (2 if paired else 1)
    if num_in > RESIDENT_K or room < ROW_BLOCKS[0]:
        return _STREAMED[arch][int(paired)]
    # Rows lie in shared memory beside the weights.
    max_block_m = max(b for b in ROW_BLOCKS if b <= min(room, _RESIDENT.max_block_m))
    # Until the kernel before is done, a program's weights lie in its threads' registers.
    num_bytes = _RESIDENT.block_n * (2 if paired else 1) * num_in * dtype.itemsize
    warps = 4 if num_bytes <= 48 * 1024 else 8
    return replace(_RESIDENT, max_block_m=max_block_m, warps=warps, split=warps)

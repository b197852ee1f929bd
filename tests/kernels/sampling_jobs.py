"""Sampling by kernels on ranks of tests/engine/rank_pool.py: in Triton's interpreter, through memory that they share.

They wait for each other as on cards, so that an exchange may hang on what another one before it brought.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels.gpu import sampling as gpu
from slipstream.kernels.gpu.peer_exchange import PeerExchange, num_bytes
from slipstream.kernels.sampling_batch import SamplingBatch
from slipstream.kernels.vocabulary_part import VocabularyPart


@dataclass(frozen=True)
class Sizes:
    """Of the kernels, small for the interpreter: token ids a program, candidates looked at together, and at most."""

    tile: int = 128
    chunk: int = 64
    candidates: int = 8192


class _Shared(PeerExchange):
    """Memories that are files of one directory, mapped by every rank."""

    def __init__(self, parallel: TensorParallel, directory: Path) -> None:
        words = num_bytes(parallel.size) // 8
        paths = [directory / f"{parallel.size}-{rank}" for rank in range(parallel.size)]
        self.memories = [torch.from_file(str(path), shared=True, size=words, dtype=torch.int64) for path in paths]
        super().__init__(parallel.rank, parallel.size, [one.data_ptr() for one in self.memories], "cpu", 20.0)


_exchanges: dict[tuple[Path, int], _Shared] = {}


def sample_parts(
    parallel: TensorParallel,
    directory: Path,
    sizes: Sizes,
    widths: Sequence[int],
    cases: Sequence[tuple[torch.Tensor, SamplingBatch, torch.Tensor]],
) -> tuple[list[torch.Tensor], list[int], bool]:
    """Of each case (logits [B, R, V], parameters, positions): tokens, most exchanges of a place; if all is well."""
    if (directory, parallel.size) not in _exchanges:
        _exchanges[directory, parallel.size] = _Shared(parallel, directory)
    shared = _exchanges[directory, parallel.size]
    part, tokens, moved = VocabularyPart(parallel.rank, widths, shared), [], []
    before: dict[str, Any] = {name: getattr(gpu, name) for name in ("_TILE", "_CHUNK_OF_RANKS", "_MAX_CANDIDATES")}
    gpu._TILE, gpu._CHUNK_OF_RANKS, gpu._MAX_CANDIDATES = sizes.tile, sizes.chunk, sizes.candidates
    try:
        for logits, batch, positions in cases:
            epochs = shared._epochs.clone()
            tokens.append(gpu.sample(logits[..., part.ids].contiguous(), batch, positions, 1, part))
            moved.append(int((shared._epochs - epochs).max()))
    finally:
        for name, value in before.items():
            setattr(gpu, name, value)
    clean = not gpu._standing_histogram(torch.device("cpu")).any()
    return tokens, moved, clean and shared.lost() is None

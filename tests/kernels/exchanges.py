"""Ranks of an exchange in one process, for tests: in the interpreter one after the other, on a card in two streams.

Also the launches that are compiled without a card.
"""

from typing import Any

import torch

from slipstream.kernels.gpu import sampling
from slipstream.kernels.gpu.all_gather import all_gather
from slipstream.kernels.gpu.all_reduce import all_reduce, all_reduce_add
from slipstream.kernels.gpu.peer_exchange import CAPACITY, PeerExchange, num_bytes
from slipstream.kernels.sampling_batch import SamplingBatch
from slipstream.kernels.stream import Stream
from slipstream.kernels.vocabulary_part import VocabularyPart


def peers(size: int, device: str) -> list[PeerExchange]:
    """Rank 0..size - 1, whose memories are ordinary tensors of this process; in the interpreter nobody waits."""
    seconds = 2.0 if device == "cuda" else 0.0
    memories = [torch.zeros(num_bytes(size) // 8, dtype=torch.int64, device=device) for _ in range(size)]
    made = [PeerExchange(r, size, [m.data_ptr() for m in memories], device, seconds) for r in range(size)]
    for one in made:
        one.kept = memories  # type: ignore[attr-defined]  # an address does not keep them
    return made


def one_after_the_other(ranks: list[PeerExchange], call: Any) -> list[Any]:
    """call(rank's exchange, rank) of each, in the interpreter, which cannot wait: all push first, then all receive."""
    for rank, one in enumerate(ranks[:-1]):
        epochs = one._epochs.clone()
        call(one, rank)  # finds nobody's words
        one._epochs.copy_(epochs)
        one._state[1] = 0
        one._lost.zero_()
    return [call(one, rank) for rank, one in reversed(list(enumerate(ranks)))][::-1]


class _Meta(PeerExchange):
    """Tensors without memory, for launches that are compiled only."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self._starts = rank, size, {}
        self._buffers = torch.empty(size, dtype=torch.int64, device="meta")
        self._epochs = torch.empty(CAPACITY, dtype=torch.int32, device="meta")
        self._state = torch.empty(2, dtype=torch.int64, device="meta")
        self._lost = torch.empty(1, dtype=torch.int64, device="meta")


def compiled() -> None:
    """Both kernels, for 2 and 8 ranks, bf16 and fp32, one row and more than a launch takes at a time."""
    for size in (2, 8):
        for rows, width in ((1, 4096), (16, 7168), (300, 4096)):
            x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
            all_reduce_add(x, Stream(x), _Meta(1, size))
        all_reduce(torch.empty(3, 576, device="meta"), _Meta(0, size))
        all_gather(
            torch.empty(4, 128256 // size, dtype=torch.bfloat16, device="meta"), [128256 // size] * size, _Meta(1, size)
        )
        all_gather(torch.empty(4, 33, dtype=torch.bfloat16, device="meta"), [33] * size, _Meta(1, size))
    x = torch.empty(1, 4096, dtype=torch.bfloat16, device="meta")
    all_reduce_add(x, Stream(x), None)


def compiled_sampling() -> None:
    """Sampling and proposing of 2 and 8 ranks, each with a part of the vocabulary."""
    batch = SamplingBatch(
        *(torch.empty(5, dtype=dtype, device="meta") for dtype in (torch.float32, torch.int64, torch.float64)),
        *(torch.empty(5, dtype=torch.int64, device="meta") for _ in range(2)),
        slots=torch.empty(4, dtype=torch.int64, device="meta"),
    )
    positions = torch.empty(4, 4, dtype=torch.int64, device="meta")
    for size in (2, 8):
        part = VocabularyPart(1, [128256 // size] * size, _Meta(1, size))
        logits = torch.empty(4, 4, 128256 // size, dtype=torch.bfloat16, device="meta")
        sampling.sample(logits, batch, positions, 1, part)
        part = VocabularyPart(1, [32000 // size] * size, _Meta(1, size))
        ids = torch.empty(32000, dtype=torch.int64, device="meta")
        logits = torch.empty(4, 32000 // size, dtype=torch.bfloat16, device="meta")
        sampling.propose_tokens(logits, batch, positions[:, 0], ids, 1, None, part)

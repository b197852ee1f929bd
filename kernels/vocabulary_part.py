"""Logits that several ranks make together, each its own columns: the best of all, or all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.kernels.all_gather import all_gather

_NAN_BITS = 0x7FC00000


@dataclass(frozen=True)
class VocabularyPart:
    """The columns of one rank.

    Args:
        rank: this one.
        widths: columns of each rank, side by side in rank order.
        carrier: what ranks exchange tensors through: a torch process group, on cards a `PeerExchange`.
    """

    rank: int
    widths: Sequence[int]
    carrier: Any

    @property
    def start(self) -> int:
        """Id of this rank's first column."""
        return sum(self.widths[: self.rank])

    @property
    def ids(self) -> slice:
        """Of this rank's columns."""
        return slice(self.start, self.start + self.widths[self.rank])

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's [..., Vr] -> everybody's [..., V]. All ranks call it."""
        if logits.is_cuda:
            whole: torch.Tensor = self.carrier.all_gather(logits, self.widths)
            return whole
        return torch.cat(all_gather(logits, self.widths, self.carrier), dim=-1)  # size x [..., Vr] -> [..., V]

    def best(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The id of the largest score over all ranks, of equals the lowest: tensors on the CPU.

        Args:
            scores: [...] fp32, the largest of this rank's columns.
            ids: [...] int64, theirs, counted over all ranks' columns.

        A (score, id) of each rank is exchanged, as one integer.
        """
        packed = pack_best(scores, ids)
        everybody = all_gather(packed[..., None], [1] * len(self.widths), self.carrier)  # size x [..., 1]
        best = torch.cat(everybody, dim=-1).amax(dim=-1)  # size x [..., 1] -> [..., size] -> [...]
        return 0xFFFFFFFF - (best & 0xFFFFFFFF)


def pack_best(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A score (fp32) and its id (int64) as one int64: the largest is the best score, of equals the lowest id.

    NaN is larger than any number, as where one rank has all columns, whatever its sign: a CPU makes negative ones.
    """
    return (ordered_bits(scores).long() << 32) | (0xFFFFFFFF - ids)


def ordered_bits(scores: torch.Tensor) -> torch.Tensor:
    """fp32 -> int32 in the order of the scores; NaN is the largest."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 counts as 0.0
    bits = bits.masked_fill(scores.isnan(), _NAN_BITS)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)

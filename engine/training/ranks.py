"""The ranks of a training: processes, on one host or several, that each compute a part of every batch.

What comes out hangs on no clock and no algorithm of a library: numbers and gradients are added in rank order, so that
every rank has the same bits after every step, and the same run on as many ranks gives them again. Another number of
ranks adds in another order and agrees within rounding. Rank 0 alone reads what the run begins with, evaluates, and
writes; it tells the others how long the run has lasted and whether it goes on.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from slipstream.kernels.all_gather import PeerLost, all_gather

# Words that are summed at a time: what a sum needs beside the gradients themselves is twice that.
_SUMMED_WORDS = 1 << 24
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """One rank's way to the others.

    Args:
        rank, size: this one, of how many.
        nodes: the host that each rank runs on, by number; host 0 holds every conversation.
        group: a torch process group for tensors of the CPU and of the training's device; None for one rank.

    Every exchange raises PeerLost when a peer is gone, or does not answer within the group's timeout.
    """

    rank: int
    size: int
    nodes: tuple[int, ...]
    group: Any

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def told(self, numbers: Sequence[float]) -> list[float]:
        """Rank 0's numbers, as float64; every rank gives as many."""
        said = torch.tensor(numbers, dtype=torch.float64)
        self.broadcast_(said)
        return [float(number) for number in said]

    def shared(self, value: T | None) -> T:
        """Rank 0's value, whatever can be pickled; the others give None."""
        if self.size == 1:
            assert value is not None
            return value
        data = bytearray(pickle.dumps(value) if self.leads else b"")
        size = int(self.told([len(data)])[0])
        content = torch.frombuffer(data, dtype=torch.uint8) if self.leads else torch.empty(size, dtype=torch.uint8)
        self.broadcast_(content)
        result: T = pickle.loads(bytes(content.numpy()))  # of a process that we started beside us
        return result

    def broadcast_(self, tensor: torch.Tensor) -> None:
        """Replaces a tensor by rank 0's, whose shape and dtype it has."""
        if self.size > 1:
            self._exchange(lambda group: group.broadcast(tensor, 0))

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """The sums over the ranks of numbers, in float64, added in rank order."""
        sums = [0.0] * len(numbers)
        for part in self.gathered(torch.tensor(numbers, dtype=torch.float64)):
            sums = [total + float(number) for total, number in zip(sums, part, strict=True)]
        return sums

    def gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor [n] of the CPU, in rank order."""
        return [tensor] if self.size == 1 else all_gather(tensor, [len(tensor)] * self.size, self.group)

    def sum_(self, flat: torch.Tensor) -> None:
        """Replaces flat [n] on every rank by the sum over the ranks, added in rank order.

        Each rank adds one slice of all ranks and gives the sums to the others: what travels is what a ring would carry.
        """
        if self.size == 1:
            return
        for part in flat.split(_SUMMED_WORDS):
            width = -(-len(part) // self.size)
            own = torch.nn.functional.pad(part, (0, width * self.size - len(part)))  # [p] -> [size * width]
            received = torch.empty_like(own)
            self._exchange(lambda group, own=own, received=received: group.alltoall_base(received, own, [], []))
            first, *others = received.split(width)  # [size * width] -> size x [width]: my slice of each rank
            for other in others:
                first += other
            self._exchange(lambda group, own=own, first=first: group._allgather_base(own, first))
            part.copy_(own[: len(part)])  # [size * width] -> [p]

    def _exchange(self, begin: Any) -> None:
        try:
            begin(self.group).wait()
        except RuntimeError as error:
            raise PeerLost(str(error)) from error


ALONE = Ranks(0, 1, (0,), None)


def cut_batch(
    members: Sequence[int], lengths: Sequence[int], holders: Sequence[Sequence[int]] | None, nodes: Sequence[int]
) -> list[list[int]]:
    """Which of a batch's conversations each rank computes: about as many tokens each, as far as hosts hold them.

    Args:
        members: the batch, conversations by index.
        lengths: tokens of every conversation.
        holders: the hosts that hold each conversation; None: every host holds all.
        nodes: the host of each rank.

    Returns:
        One list a rank, in the batch's order; a rank without one still takes part in every exchange. The result is a
        function of the arguments alone.
    """
    anywhere = sorted(set(nodes))
    held = {index: anywhere if holders is None else holders[index] for index in members}
    load = [0] * len(nodes)
    parts: list[list[int]] = [[] for _ in nodes]
    # What few hosts hold is given away first, and of that the longest: the rest can still make up for it.
    for index in sorted(members, key=lambda index: (len(held[index]), -lengths[index], index)):
        rank = min((r for r, node in enumerate(nodes) if node in held[index]), key=lambda r: (load[r], r))
        load[rank] += lengths[index]
        parts[rank].append(index)
    order = {index: place for place, index in enumerate(members)}
    return [sorted(part, key=order.__getitem__) for part in parts]

"""Tensor parallelism: who the ranks are, and which part of an axis each of them holds.

An explicit object, handed to a model's constructor: its layers ask it for their share, and reduce or gather through it.
Everything else reads as if there were one device. Shards may be uneven, and empty where there are more ranks than
rows: an empty shard adds nothing to a sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from slipstream.kernels.all_reduce import all_reduce
from slipstream.kernels.all_reduce_add import add, all_reduce_add
from slipstream.kernels.stream import Stream
from slipstream.kernels.vocabulary_part import VocabularyPart


@dataclass(frozen=True)
class Cut:
    """The part start..stop - 1 of an axis of `total` entries that one rank holds."""

    start: int
    stop: int
    total: int

    @classmethod
    def whole(cls, total: int) -> "Cut":
        return cls(0, total, total)

    @property
    def size(self) -> int:
        return self.stop - self.start

    def times(self, width: int) -> "Cut":
        """The same part where every entry is `width` rows."""
        return Cut(self.start * width, self.stop * width, self.total * width)


@dataclass(frozen=True)
class HeadCut:
    """Attention heads of one rank: query heads and the KV heads that they read; q.size is a multiple of kv.size."""

    q: Cut
    kv: Cut


class CardExchange(Protocol):
    """How ranks on cards exchange tensors: `PeerExchange` or `NcclExchange` of the kernels.

    in_kernels: other kernels can exchange words by it themselves.
    """

    in_kernels: bool

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As the op of that name."""

    def all_reduce_add(self, partial: torch.Tensor, stream: Stream) -> Stream:
        """As the op of that name."""

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """This rank's [..., n] -> the parts of all ranks, side by side in rank order."""

    def lost(self) -> int | None:
        """A rank that did not come in time, or None. Asks no device."""

    def be_patient(self, seconds: float) -> None:
        """Changes the longest wait for a peer in every exchange from now on."""


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place among the ranks.

    Args:
        rank: 0..size - 1; rank 0 speaks with the world.
        size: ranks that share every layer.
        group: what they exchange tensors on the CPU through (a torch process group); None exactly at size 1.
        card: what they exchange CUDA tensors through (a `CardExchange`); None where each is a CPU.
    """

    rank: int = 0
    size: int = 1
    group: Any = field(default=None, compare=False)
    card: "CardExchange | None" = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or (self.group is None) != (self.size == 1):
            raise ValueError(f"rank {self.rank} of {self.size} ranks, group {self.group}")

    def carrier(self, x: torch.Tensor) -> Any:
        """What carries tensors like `x` to the other ranks."""
        return self.card if x.is_cuda else self.group

    def cut(self, total: int) -> Cut:
        """This rank's part of an axis of `total` entries: contiguous, the first ranks one longer where it is uneven."""
        return _cut(total, self.rank, self.size)

    def cut_heads(self, num_heads: int, num_kv_heads: int) -> HeadCut:
        """This rank's heads. Groups stay whole: on every rank the same number of query heads reads each KV head.

        Up to as many ranks as KV heads, each has a range of KV heads with all their query heads. With more ranks than
        that, the ranks are divided over the KV heads, and each KV head's query heads over its ranks; a rank that is
        left without a query head holds no KV head either.
        """
        group = num_heads // num_kv_heads
        if self.size <= num_kv_heads:
            kv = self.cut(num_kv_heads)
            return HeadCut(Cut(kv.start * group, kv.stop * group, num_heads), kv)
        for head in range(num_kv_heads):
            ranks = _cut(self.size, head, num_kv_heads)
            if ranks.start <= self.rank < ranks.stop:
                q = _cut(group, self.rank - ranks.start, ranks.size)
                kv = Cut(head, head + min(q.size, 1), num_kv_heads)
                return HeadCut(Cut(head * group + q.start, head * group + q.stop, num_heads), kv)
        raise AssertionError("every rank belongs to a KV head")


def single() -> TensorParallel:
    """One device: nothing is cut, nothing is exchanged."""
    return TensorParallel()


class AllReduce(nn.Module):
    """The sum of all ranks' partial results. A module, so that a hook sees what goes in (partial) and comes out."""

    def __init__(self, parallel: TensorParallel) -> None:
        super().__init__()
        self.parallel = parallel

    def forward(self, partial: torch.Tensor) -> torch.Tensor:
        """[...] of each rank -> their sum [...], the same bits on every rank."""
        return partial if self.parallel.size == 1 else all_reduce(partial, self.parallel.carrier(partial))

    def add_to(self, stream: Stream, partial: torch.Tensor) -> Stream:
        """The stream with the sum of [M, h] added: in one kernel, unless a hook wants to see the sum."""
        if self._forward_hooks or not partial.is_cuda:
            return add(self(partial), stream)
        return all_reduce_add(partial, stream, self.parallel.carrier(partial))


class SplitVocabulary:
    """Logits of a vocabulary that is divided over the ranks.

    Args:
        vocab_size: rows of the head, cut by `TensorParallel.cut`.
        parallel: the ranks.
    """

    def __init__(self, vocab_size: int, parallel: TensorParallel) -> None:
        self.parallel = parallel
        self.widths = [_cut(vocab_size, rank, parallel.size).size for rank in range(parallel.size)]

    @property
    def part(self) -> VocabularyPart | None:
        """What this rank has of the logits that `own` leaves; None where that is all of them."""
        parallel = self.parallel
        if parallel.size == 1 or (parallel.card is not None and not parallel.card.in_kernels):
            return None
        return self._part

    def own(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's logits [..., Vr] -> as `part` says: the same, or [..., V]."""
        return logits if self.part is not None or self.parallel.size == 1 else self._part.gather(logits)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """What `own` left -> [..., V]: the one place where logits are put together. All ranks call it."""
        return logits if self.part is None else self._part.gather(logits)

    @property
    def _part(self) -> VocabularyPart:
        parallel = self.parallel
        return VocabularyPart(parallel.rank, self.widths, parallel.group if parallel.card is None else parallel.card)


@dataclass(frozen=True)
class Shard:
    """What a rank keeps of one tensor of a checkpoint.

    Args:
        view: the tensor to fill.
        shape: of the whole tensor.
        dim: the axis that is cut.
        start: where on that axis this rank's part begins.
        dtypes: that the checkpoint may store it in.
    """

    view: torch.Tensor
    shape: torch.Size
    dim: int = 0
    start: int = 0
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)

    @classmethod
    def whole(cls, view: torch.Tensor) -> "Shard":
        return cls(view, view.shape)

    @classmethod
    def of(cls, view: torch.Tensor, dim: int, cut: Cut) -> "Shard":
        shape = list(view.shape)
        shape[dim] = cut.total
        return cls(view, torch.Size(shape), dim, cut.start)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole tensor, without a copy."""
        return tensor.narrow(self.dim, self.start, self.view.shape[self.dim]) if tensor.dim() else tensor


def _cut(total: int, rank: int, size: int) -> Cut:
    base, longer = divmod(total, size)
    start = rank * base + min(rank, longer)
    return Cut(start, start + base + (rank < longer), total)

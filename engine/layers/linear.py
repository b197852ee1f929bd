"""Linear layers without bias. A layer owns the loading of its weight; each rank holds, and reads, only its part.

Linear                      the whole weight on every rank
ColumnParallelLinear        output features are cut: each rank makes its part of y
MergedColumnParallelLinear  several of those with one input, run as one
RowParallelLinear           input features are cut: each rank makes a partial sum of all of y, then they are reduced
AddPartial                  the reduce alone, for partial sums that are made elsewhere
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from slipstream.engine.tensor_parallel import AllReduce, Cut, Shard, TensorParallel
from slipstream.kernels.all_reduce_add import add
from slipstream.kernels.linear_add import linear_add
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.stream import Norm, Stream
from slipstream.kernels.weight import as_matrix

_device: ContextVar[str | None] = ContextVar("device of new weights", default=None)


@contextmanager
def unallocated() -> Iterator[None]:
    """Linear layers made meanwhile have weights without memory (device `meta`): a loader decides on their form."""
    token = _device.set("meta")
    try:
        yield
    finally:
        _device.reset(token)


def new_weight(*shape: int, dtype: torch.dtype | None) -> nn.Parameter:
    """An uninitialised weight; one without memory inside `unallocated`."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=_device.get()))


class Linear(nn.Module):
    """y = norm(x) W^T, no bias. weight: [out_features, in_features].

    It is a parameter until a model is loaded. Then layers/quantized.py may have put an `Int4Weight` there, and
    packed_weights.py a `PackedWeight`: forms that every op takes as it takes a tensor.
    """

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight: Any = new_weight(out_features, in_features, dtype=dtype)

    def forward(self, x: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """x [..., in_features], read through `norm` if there is one -> [..., out_features]."""
        y = norm_linear(Stream(x.reshape(-1, x.shape[-1])), norm, self.weight)  # [..., in] -> [M, in] -> [M, out]
        return y.view(*x.shape[:-1], y.shape[-1])  # [M, out] -> [..., out]

    def matrix(self) -> torch.Tensor:
        """[out_features, in_features]: the parameter's own memory, or a copy of a weight in another form."""
        return as_matrix(self.weight.data if isinstance(self.weight, nn.Parameter) else self.weight)

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name below this layer -> where it goes; of a weight in another form, a copy to be read only."""
        return {"weight": Shard.whole(self.matrix())}


class ColumnParallelLinear(Linear):
    """This rank's output features.

    Args:
        in_features: input width, whole on every rank.
        cut: output features of this rank.
    """

    def __init__(self, in_features: int, cut: Cut, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(in_features, cut.size, dtype=dtype)
        self.cut = cut

    def shards(self) -> dict[str, Shard]:
        return {"weight": Shard.of(self.matrix(), 0, self.cut)}


class MergedColumnParallelLinear(Linear):
    """Several column-parallel layers of one input, their weights stacked by rows and run as one.

    Args:
        in_features: shared input width.
        cuts: name -> this rank's output rows of each part, in stacking order (checkpoints store the parts, whole, under
            these names, beside this layer).
    """

    def __init__(self, in_features: int, cuts: Mapping[str, Cut], *, dtype: torch.dtype | None = None) -> None:
        super().__init__(in_features, sum(cut.size for cut in cuts.values()), dtype=dtype)
        self.cuts = dict(cuts)
        self.parts = {name: cut.size for name, cut in cuts.items()}

    def part_slices(self) -> dict[str, slice]:
        """Rows of `weight` that hold each part."""
        slices, start = {}, 0
        for name, rows in self.parts.items():
            slices[name] = slice(start, start + rows)
            start += rows
        return slices

    def shards(self) -> dict[str, Shard]:
        """Part name -> where it goes."""
        matrix = self.matrix()
        return {n: Shard.of(matrix[rows], 0, self.cuts[n]) for n, rows in self.part_slices().items()}


class RowParallelLinear(Linear):
    """The last linear layer of a block: all output features, from this rank's input features and everybody else's.

    Args:
        cut: input features of this rank.
        out_features: output width, whole on every rank.
        parallel: the ranks.
    """

    def __init__(
        self, cut: Cut, out_features: int, parallel: TensorParallel, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(cut.size, out_features, dtype=dtype)
        self.cut = cut
        self.reduce = AllReduce(parallel)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's input [M, cut.size] -> its part of the sum [M, out_features]."""
        return norm_linear(Stream(x), None, self.weight)

    def forward(self, x: torch.Tensor, stream: Stream) -> Stream:  # type: ignore[override]
        """This rank's input [M, cut.size] -> the stream [M, out_features] with the sum over all ranks added to it."""
        if self.reduce.parallel.size == 1:
            return linear_add(x, self.weight, stream)
        return self.reduce.add_to(stream, self.partial(x))

    def shards(self) -> dict[str, Shard]:
        return {"weight": Shard.of(self.matrix(), 1, self.cut)}


class AddPartial(nn.Module):
    """The last step of a block that makes its partial sum itself: reduce over all ranks, add to the stream."""

    def __init__(self, parallel: TensorParallel) -> None:
        super().__init__()
        self.reduce = AllReduce(parallel)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum, which is what `forward` gets: [M, h]."""
        return x

    def forward(self, x: torch.Tensor, stream: Stream) -> Stream:
        """This rank's part [M, h] of the sum -> the stream [M, h] with the sum over all ranks added to it."""
        return add(x, stream) if self.reduce.parallel.size == 1 else self.reduce.add_to(stream, x)

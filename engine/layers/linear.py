"""Linear layers without bias. A layer owns the loading of its weight; each rank holds, and reads, only its part.

Linear                      the whole weight on every rank
ColumnParallelLinear        output features are cut: each rank makes its part of y
MergedColumnParallelLinear  several of those with one input, run as one
RowParallelLinear           input features are cut: each rank makes a partial sum of all of y, then they are reduced
"""

from collections.abc import Mapping

import torch
from torch import nn

from slipstream.engine.tensor_parallel import AllReduce, Cut, Shard, TensorParallel
from slipstream.kernels.linear import linear


class Linear(nn.Module):
    """y = x W^T, no bias. weight: [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return linear(x, self.weight)

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name below this layer -> where it goes."""
        return {"weight": Shard.whole(self.weight.data)}


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
        return {"weight": Shard.of(self.weight.data, 0, self.cut)}


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
        return {n: Shard.of(self.weight.data[rows], 0, self.cuts[n]) for n, rows in self.part_slices().items()}

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[..., sum of rows] -> one [..., rows] a part."""
        return y.split(list(self.parts.values()), dim=-1)


class RowParallelLinear(Linear):
    """All output features, from this rank's input features and everybody else's.

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
        """This rank's input [..., cut.size] -> its part of the sum [..., out_features]."""
        return linear(x, self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's input [..., cut.size] -> the sum over all ranks [..., out_features]."""
        return self.reduce(self.partial(x))

    def shards(self) -> dict[str, Shard]:
        return {"weight": Shard.of(self.weight.data, 1, self.cut)}

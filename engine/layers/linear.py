"""Linear layers. A layer owns the loading of its weight; the rest of the code reads as if there were one device."""

import torch
from torch import nn

from slipstream.kernels.linear import linear


class Linear(nn.Module):
    """y = x W^T, no bias. weight: [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return linear(x, self.weight)


class MergedLinear(Linear):
    """Several linear layers of one input, their weights stacked by rows and run as one.

    Args:
        in_features: shared input width.
        parts: name -> output rows of each part, in stacking order (checkpoints store the parts under these names).
    """

    def __init__(self, in_features: int, parts: dict[str, int], *, dtype: torch.dtype | None = None) -> None:
        super().__init__(in_features, sum(parts.values()), dtype=dtype)
        self.parts = dict(parts)

    def part_slices(self) -> dict[str, slice]:
        """Rows of `weight` that hold each part."""
        slices, start = {}, 0
        for name, rows in self.parts.items():
            slices[name] = slice(start, start + rows)
            start += rows
        return slices

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[..., sum of rows] -> one [..., rows] a part."""
        return y.split(list(self.parts.values()), dim=-1)

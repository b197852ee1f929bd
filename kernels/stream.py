"""The residual stream between two blocks, and the norm that the next block reads it through."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Stream:
    """The residual stream of M rows.

    Args:
        rows: [M, h].
        sumsq: [M, P] fp32, sums of squares of P consecutive parts of each row, so that the kernel behind need not read
            the row twice; None: it reads the row itself.
    """

    rows: torch.Tensor
    sumsq: torch.Tensor | None = None


@dataclass(frozen=True)
class Norm:
    """RMSNorm's constants. weight: [n]; eps: added to the mean square."""

    weight: torch.Tensor
    eps: float

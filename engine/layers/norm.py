"""RMSNorm layer."""

import torch
from torch import nn

from slipstream.kernels.rms_norm import rms_norm
from slipstream.kernels.stream import Norm


class RMSNorm(nn.Module):
    """weight: [hidden]."""

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        return rms_norm(x, self.weight, self.eps)

    @property
    def constants(self) -> Norm:
        """For an op that norms what it reads."""
        return Norm(self.weight, self.eps)

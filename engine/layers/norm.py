"""RMSNorm layer."""

import torch
from torch import nn

from slipstream.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """weight: [hidden]."""

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(residual + x), residual + x), both [..., hidden]."""
        return add_rms_norm(x, residual, self.weight, self.eps)

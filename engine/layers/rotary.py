"""Rotary position embedding: the table of angles for each position."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """cos/sin tables for positions 0..max_position - 1.

    Args:
        head_dim: size of a head, all of it rotated.
        max_position: table length in tokens; a position beyond it is an error, never silent garbage.
        theta: base of the frequencies.
        scaling: `rope_scaling` / `rope_parameters` of the checkpoint; types "default" and "llama3" are known.

    Raises ValueError for a scaling type that is not known.
    """

    def __init__(
        self, head_dim: int, max_position: int, theta: float, scaling: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.max_position = max_position
        inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)  # [d / 2]
        kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
        if kind == "llama3":
            inv_freq = _llama3_frequencies(inv_freq, scaling or {})
        elif kind != "default":
            raise ValueError(f"rope scaling {kind!r} is not supported; known: default, llama3")
        angles = torch.outer(torch.arange(max_position).float(), inv_freq)  # [P, d / 2]
        angles = torch.cat((angles, angles), dim=-1)  # [P, d]
        self.cos: torch.Tensor
        self.sin: torch.Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [...] int64 (-1 for padding rows) -> cos, sin, both [..., head_dim] in `dtype`."""
        index = positions.clamp(min=0)
        return self.cos[index].to(dtype), self.sin[index].to(dtype)


def _llama3_frequencies(inv_freq: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a linear blend between."""
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    old_context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    blend = ((old_context / wavelength - low) / (high - low)).clamp(0, 1)
    return inv_freq * (blend + (1 - blend) / factor)

"""Rotary position embedding: the table of angles for each position."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slipstream.kernels.rotary import rotary_rows

# Type of scaling -> what it must tell.
KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


class RotaryEmbedding(nn.Module):
    """cos/sin tables for positions 0..max_position - 1.

    Args:
        head_dim: size of a head, all of it rotated.
        max_position: table length in tokens; a position beyond it is an error, never silent garbage.
        theta: base of the frequencies.
        scaling: `rope_scaling` / `rope_parameters` of the checkpoint; types "default", "llama3" and "yarn" are known.
        dtype: of the model; None is torch's default. Angles are worked out in fp32, on the CPU on every device.

    Raises ValueError for a scaling type that is not known, or that lacks a value.
    """

    def __init__(
        self,
        head_dim: int,
        max_position: int,
        theta: float,
        scaling: Mapping[str, Any] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.max_position = max_position
        device = torch.get_default_device()
        with torch.device("cpu"):
            inv_freq, factor = _frequencies(head_dim, max_position, theta, scaling or {})  # [d / 2]
            angles = torch.outer(torch.arange(max_position).float(), inv_freq)  # [P, d / 2]
            angles = torch.cat((angles, angles), dim=-1)  # [P, d]
            table = torch.stack((angles.cos() * factor, angles.sin() * factor))  # [2, P, d]
        self.table: torch.Tensor
        self.register_buffer("table", table.to(device, dtype or torch.get_default_dtype()), persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [...] int64 (-1 for padding rows) -> cos, sin, both [..., head_dim] in `dtype`."""
        if self.table.dtype not in (dtype, torch.float32):
            raise ValueError(f"the table is rounded to {self.table.dtype} already; for {dtype} make the model in it")
        cos, sin = rotary_rows(self.table, positions.flatten())  # [M, d] each
        shape = (*positions.shape, -1)
        return cos.to(dtype).view(shape), sin.to(dtype).view(shape)


def _frequencies(
    head_dim: int, max_position: int, theta: float, scaling: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """(radians a position of each pair [d / 2], what cos and sin are multiplied by)."""
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)  # [d / 2]
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"rope scaling {kind!r} is not supported; known: {', '.join(KINDS)}")
    missing = [key for key in KINDS[kind] if key not in scaling]
    if missing:
        raise ValueError(f"rope scaling {kind!r} has no {' and no '.join(missing)}")
    if kind == "default":
        return inv_freq, 1.0
    old_context = scaling.get("original_max_position_embeddings") or max_position
    if kind == "llama3":
        return _llama3(inv_freq, old_context, scaling), 1.0
    return _yarn(inv_freq, old_context, max_position, theta, scaling)


def _llama3(inv_freq: torch.Tensor, old_context: int, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a linear blend between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    blend = ((old_context / wavelength - low) / (high - low)).clamp(0, 1)
    return inv_freq * (blend + (1 - blend) / scaling["factor"])


def _yarn(
    inv_freq: torch.Tensor, old_context: int, max_position: int, theta: float, scaling: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """YaRN: pairs that turn often within the old context are kept, those that turn seldom are divided by `factor`.

    Between `beta_fast` and `beta_slow` turns lies a linear blend over the pairs' numbers. cos and sin are multiplied by
    `attention_factor`, by default 0.1 ln(factor) + 1.
    """
    pairs = len(inv_freq)
    factor = scaling["factor"] or max_position / old_context

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(old_context / (times * 2 * math.pi)) / math.log(theta)

    low = pair_that_turns(scaling.get("beta_fast") or 32)
    high = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    divided = ((torch.arange(pairs).float() - low) / (high - low)).clamp(0, 1)  # [d / 2], share of it
    blended = inv_freq * (1 - divided) + inv_freq / factor * divided
    return blended, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    def from_scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    weight, weight_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return from_scale(weight) / from_scale(weight_all) if weight and weight_all else from_scale(1.0)

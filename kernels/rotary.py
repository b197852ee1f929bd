"""Rotary position embedding, half-split layout (Llama, Qwen, Mistral)."""

import torch


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head by its row's angle.

    Args:
        x: [..., heads, head_dim].
        cos, sin: [..., head_dim], both halves filled (cat(angle, angle)); the dtype of `x`.

    Returns:
        [..., heads, head_dim].
    """
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)  # [..., heads, head_dim]
    return x * cos.unsqueeze(-2) + rotated * sin.unsqueeze(-2)  # [..., head_dim] -> [..., 1, head_dim]

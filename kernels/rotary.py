"""Rotary position embedding, half-split layout (Llama, Qwen, Mistral)."""

import torch

from slipstream.kernels.dispatch import on_gpu


def rotary_rows(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of the rows of a step.

    Args:
        table: [2, P, d], cos and sin of every position.
        positions: [M] int64; below 0 (padding) position 0 is read.

    Returns:
        (cos, sin), both [M, d] in the dtype of `table`.

    A position of P or more is an error; the GPU kernel, which cannot raise one, gives NaN.
    """
    if on_gpu(table):
        from slipstream.kernels.gpu import rotary as gpu

        return gpu.rotary_rows(table, positions)
    cos, sin = table.index_select(1, positions.clamp(min=0)).unbind()  # [2, P, d] -> 2 x [M, d]
    return cos, sin


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

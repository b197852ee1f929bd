"""SwiGLU's gate: silu(gate) * up."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Args: gate_up [..., 2 * intermediate], gate first. Returns: [..., intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)  # [..., 2I] -> 2 x [..., I]
    return F.silu(gate) * up

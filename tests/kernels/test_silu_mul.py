"""SwiGLU's gate against its formula."""

import math

import pytest
import torch
import torch.nn.functional as F

from slipstream.kernels.silu_mul import silu_mul


def test_silu_mul_is_the_formula_gate_first() -> None:
    gate, up = [-3.0, 0.0, 0.5, 9.0], [2.0, 5.0, -4.0, 0.25]
    got = silu_mul(torch.tensor([gate + up], dtype=torch.float64))[0].tolist()
    assert got == pytest.approx([g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)])


def test_silu_mul_rounds_as_transformers_does() -> None:
    gate_up = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate, up = gate_up.chunk(2, dim=-1)
    assert torch.equal(silu_mul(gate_up), F.silu(gate) * up)

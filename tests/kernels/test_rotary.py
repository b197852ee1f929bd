"""Rotary embedding against transformers' Llama and against plain complex numbers; its rows against the table."""

import cmath

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from slipstream.kernels.gpu import rotary as gpu
from slipstream.kernels.rotary import apply_rotary, rotary_rows


def angles(positions: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[..., head_dim], both halves."""
    half = positions[..., None] / 10_000 ** (torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat((half, half), dim=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotary_is_transformers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 4, 16, generator=generator).to(dtype)  # [B, R, heads, d]
    k = torch.randn(2, 5, 2, 16, generator=generator).to(dtype)
    angle = angles(torch.tensor([[0, 1, 2, 3, 4], [90, 91, 92, 93, 94]]), 16)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    want = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    assert torch.equal(apply_rotary(q, cos, sin), want[0].transpose(1, 2))
    assert torch.equal(apply_rotary(k, cos, sin), want[1].transpose(1, 2))


def test_rotary_turns_pairs_of_the_two_halves() -> None:
    x = torch.randn(3, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    angle = angles(torch.tensor([0, 1, 7]), 6).double()
    got = apply_rotary(x, angle.cos(), angle.sin())
    for row in range(3):
        for i in range(3):
            turned = complex(x[row, 0, i], x[row, 0, i + 3]) * cmath.exp(1j * float(angle[row, i]))
            assert complex(got[row, 0, i], got[row, 0, i + 3]) == pytest.approx(turned)
    assert torch.equal(got[0], x[0])  # position 0 is not turned


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_rows_are_those_of_the_table(dtype: torch.dtype, head_dim: int, kernel_device: str) -> None:
    table = torch.randn(2, 9, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.tensor([3, 0, 8, -1, 3])
    wanted = table[:, [3, 0, 8, 0, 3]]
    for found in (rotary_rows(table, positions), gpu.rotary_rows(table.to(kernel_device), positions.to(kernel_device))):
        assert torch.equal(torch.stack(found).cpu(), wanted)


def test_a_position_beyond_the_table_shows(kernel_device: str) -> None:
    table, positions = torch.ones(2, 4, 64), torch.tensor([3, 4])
    with pytest.raises((IndexError, RuntimeError)):
        rotary_rows(table, positions)
    for found in gpu.rotary_rows(table.to(kernel_device), positions.to(kernel_device)):
        assert found[0].eq(1).all()
        assert found[1].isnan().all()

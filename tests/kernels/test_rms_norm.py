"""RMSNorm against transformers' Llama, bit for bit, and its promise about rows."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from slipstream.kernels.rms_norm import rms_norm


def norm_weights(size: int, dtype: torch.dtype) -> torch.Tensor:
    """From [0.5, 2]: with weights of one a norm left out or applied twice would go unseen."""
    return (0.5 + 1.5 * torch.rand(size, generator=torch.Generator().manual_seed(size))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [64, 576, 577])
def test_rms_norm_is_transformers(dtype: torch.dtype, hidden: int) -> None:
    x = (torch.randn(2, 5, hidden, generator=torch.Generator().manual_seed(0)) * 7).to(dtype)
    theirs = LlamaRMSNorm(hidden, eps=1e-5)
    theirs.weight.data = norm_weights(hidden, dtype)
    with torch.no_grad():
        assert torch.equal(rms_norm(x, theirs.weight, 1e-5), theirs(x))


def test_rms_norm_is_the_formula() -> None:
    x, weight = torch.randn(3, 16, dtype=torch.float64), norm_weights(16, torch.float64)
    want = torch.stack([row / (sum(v * v for v in row) / 16 + 0.25).sqrt() * weight for row in x])
    torch.testing.assert_close(rms_norm(x, weight, 0.25), want, rtol=1e-6, atol=1e-6)  # statistics are fp32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [64, 576, 2048])
def test_a_rows_bits_do_not_depend_on_its_neighbours(dtype: torch.dtype, hidden: int) -> None:
    x = torch.randn(70, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = norm_weights(hidden, dtype)
    alone = torch.cat([rms_norm(row[None], weight, 1e-5) for row in x])
    for count in (2, 3, 4, 9, 33, 70):
        assert torch.equal(rms_norm(x[:count], weight, 1e-5), alone[:count])
    assert torch.equal(rms_norm(x.view(7, 10, -1), weight, 1e-5).view(70, -1), alone)

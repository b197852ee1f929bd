"""draft_input: the Triton kernel against its torch twin, and the twin against transformers' norm."""

from collections.abc import Callable

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from slipstream.kernels.draft_input import draft_input
from slipstream.kernels.gpu import draft_input as gpu
from slipstream.kernels.stream import Norm


def make(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Norm, Norm]:
    generator = torch.Generator().manual_seed(0)
    table, g = (3 * torch.randn(n, 40, generator=generator).to(dtype) for n in (30, 4))
    norms = [Norm((1 + 0.1 * torch.randn(40, generator=generator)).to(dtype), eps) for eps in (1e-5, 1e-2)]
    ids = torch.tensor([[3, 7], [29, 8], [0, 9], [3, 7]])[:, 0]  # a column, as the drafts of one step are
    return ids, table, g, norms[0], norms[1]


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_twin(
    dtype: torch.dtype, norm_before_residual: bool, kernel_device: str, close: Callable[..., None]
) -> None:
    ids, table, g, e_norm, g_norm = make(dtype)
    there = [x.to(kernel_device) for x in (ids, table, g)]
    norms = [Norm(norm.weight.to(kernel_device), norm.eps) for norm in (e_norm, g_norm)]
    found = gpu.draft_input(*there, *norms, norm_before_residual)
    for a, b in zip(found, draft_input(ids, table, g, e_norm, g_norm, norm_before_residual), strict=True):
        close(a, b)


def test_the_twin_norms_each_half_by_its_own_constants() -> None:
    ids, table, g, e_norm, g_norm = make(torch.float32)
    x, residual = draft_input(ids, table, g, e_norm, g_norm, False)
    assert residual is g
    for half, rows, norm in ((x[:, :40], table[ids], e_norm), (x[:, 40:], g, g_norm)):
        reference = LlamaRMSNorm(40, norm.eps)
        reference.weight.data = norm.weight
        torch.testing.assert_close(half, reference(rows))
    assert torch.equal(draft_input(ids, table, g, e_norm, g_norm, True)[1], x[:, 40:])

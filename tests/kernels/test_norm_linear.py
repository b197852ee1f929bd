"""norm_linear: the Triton kernel against its torch twin."""

import pytest
import torch

from slipstream.kernels.gpu import norm_linear as gpu
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.stream import Norm, Stream


def make(n: int, k: int, m: int, dtype: torch.dtype, device: str) -> tuple[Stream, Norm, torch.Tensor]:
    generator = torch.Generator().manual_seed(n + k + m)
    rows = torch.randn(m, k, generator=generator).to(dtype)
    norm = Norm((1 + 0.1 * torch.randn(k, generator=generator)).to(dtype).to(device), 1e-5)
    weight = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
    return Stream(rows.to(device)), norm, weight.to(device)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """fp32: rounding of the sums. bf16: the interpreter cuts where the GPU rounds, a few ulps."""
    tolerance = 2e-6 if found.dtype == torch.float32 else 0.03
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k", "m"), [(40, 48, 1), (16, 64, 3), (33, 80, 17)])
def test_equals_the_twin(n: int, k: int, m: int, dtype: torch.dtype, normed: bool, kernel_device: str) -> None:
    stream, norm, weight = make(n, k, m, dtype, kernel_device)
    expected = norm_linear(
        Stream(stream.rows.cpu()), Norm(norm.weight.cpu(), norm.eps) if normed else None, weight.cpu()
    )
    close(gpu.norm_linear(stream, norm if normed else None, weight).cpu(), expected)

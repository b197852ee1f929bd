"""linear_add: the Triton kernel against its torch twin."""

from collections.abc import Callable

import pytest
import torch

from slipstream.kernels.gpu import linear_add as gpu
from slipstream.kernels.linear_add import linear_add
from slipstream.kernels.stream import Stream

Close = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "m", "dtype"),
    [(40, 48, 1, torch.float32), (16, 64, 17, torch.float32), (24, 64, 3, torch.bfloat16)],
)
def test_equals_the_twin(
    n: int,
    k: int,
    m: int,
    dtype: torch.dtype,
    wide: bool,
    monkeypatch: pytest.MonkeyPatch,
    kernel_device: str,
    close: Close,
) -> None:
    generator = torch.Generator().manual_seed(m)
    x, residual = torch.randn(m, k, generator=generator).to(dtype), torch.randn(m, n, generator=generator).to(dtype)
    weight = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
    if wide:
        monkeypatch.setattr(gpu, "RESIDENT_K", 0)  # as if rows were wide
    before = residual.to(kernel_device)
    found = gpu.linear_add(x.to(kernel_device), weight.to(kernel_device), Stream(before))
    close(found.rows, linear_add(x, weight, Stream(residual)).rows)
    assert torch.equal(before.cpu(), residual)  # the stream before is left as it was
    if not wide:
        assert found.sumsq is None
        return
    squares = found.rows.double().square().split(16, dim=1)  # tiles of 16
    close(found.sumsq, torch.stack([part.sum(-1) for part in squares], dim=1).float())  # [M, P]


def test_a_stream_of_another_shape_is_refused(kernel_device: str) -> None:
    x, weight = torch.randn(2, 16, device=kernel_device), torch.randn(16, 16, device=kernel_device)
    with pytest.raises(ValueError, match=r"the stream must be \(2, 16\)"):
        gpu.linear_add(x, weight, Stream(torch.randn(1, 16, device=kernel_device)))

"""norm_linear: the Triton kernel against its torch twin."""

from collections.abc import Callable

import pytest
import torch

from slipstream.kernels.gpu import norm_linear as gpu
from slipstream.kernels.gpu.tiles import Tile
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.stream import Norm, Stream

Close = Callable[[torch.Tensor, torch.Tensor], None]


def make(n: int, k: int, m: int, dtype: torch.dtype) -> tuple[torch.Tensor, Norm, torch.Tensor]:
    """Rows [m, k], a norm, a weight [n, k]."""
    generator = torch.Generator().manual_seed(n + k + m)
    rows = torch.randn(m, k, generator=generator).to(dtype)
    norm = Norm((1 + 0.1 * torch.randn(k, generator=generator)).to(dtype), 1e-5)
    return rows, norm, (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)


def on(norm: Norm | None, device: str) -> Norm | None:
    return None if norm is None else Norm(norm.weight.to(device), norm.eps)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "m"), [(40, 48, 1), (16, 64, 3), (33, 80, 17), (16, 32, 67)])
def test_equals_the_twin(
    n: int, k: int, m: int, dtype: torch.dtype, normed: bool, kernel_device: str, close: Close
) -> None:
    rows, norm, weight = make(n, k, m, dtype)
    used = norm if normed else None
    found = gpu.norm_linear(Stream(rows.to(kernel_device)), on(used, kernel_device), weight.to(kernel_device))
    close(found, norm_linear(Stream(rows), used, weight))


@pytest.mark.parametrize("parts", [0, 1, 5])
@pytest.mark.parametrize(
    "tile",
    [
        Tile(block_n=16, block_k=64, stages=3, norm_apart_from=32),  # k in steps, the warps' shares
        Tile(block_n=16, block_k=32, split=1, stages=2, max_block_m=16),  # no shares; two blocks of rows
        Tile(block_n=4, split=0),  # no matrix unit
    ],
)
def test_wide_rows_in_steps(
    tile: Tile, parts: int, monkeypatch: pytest.MonkeyPatch, kernel_device: str, close: Close
) -> None:
    rows, norm, weight = make(24, 160, 19, torch.bfloat16)
    sums = torch.zeros(19, parts)
    if parts:
        squares = rows.float().square()
        sums = torch.stack([part.sum(-1) for part in squares.chunk(parts, dim=1)], dim=1)  # [M, K] -> [M, P]
    stream = Stream(rows.to(kernel_device), sums.to(kernel_device) if parts else None)
    monkeypatch.setattr(gpu, "tile_for", lambda *shape: tile)
    close(
        gpu.norm_linear(stream, on(norm, kernel_device), weight.to(kernel_device)),
        norm_linear(Stream(rows), norm, weight),
    )


def test_the_parts_are_what_the_norm_reads(kernel_device: str) -> None:
    """Four times the squares: half the rows."""
    rows, norm, weight = make(16, 64, 2, torch.float32)
    sums = 4 * rows.square().sum(-1, keepdim=True)  # [M, 1]
    halves = gpu.norm_linear(
        Stream(rows.to(kernel_device), sums.to(kernel_device)), on(norm, kernel_device), weight.to(kernel_device)
    )
    torch.testing.assert_close(2 * halves.cpu(), norm_linear(Stream(rows), norm, weight), rtol=1e-4, atol=1e-4)


def test_rows_may_be_a_slice_of_wider_rows(kernel_device: str, close: Close) -> None:
    rows, norm, weight = make(16, 64, 3, torch.bfloat16)
    wide = torch.cat((torch.full_like(rows, 7), rows), dim=1).to(kernel_device)  # [M, 2K]
    close(
        gpu.norm_linear(Stream(wide[:, 64:]), on(norm, kernel_device), weight.to(kernel_device)),
        norm_linear(Stream(rows), norm, weight),
    )


def test_weights_that_do_not_fit_are_refused(kernel_device: str) -> None:
    rows, _, weight = make(16, 64, 3, torch.bfloat16)
    with pytest.raises(ValueError, match=r"contiguous weight \[N, K\] of one dtype"):
        gpu.norm_linear(Stream(rows.to(kernel_device)), None, weight[:, :32].to(kernel_device))
    with pytest.raises(ValueError, match="of one dtype"):
        gpu.norm_linear(Stream(rows.to(kernel_device)), None, weight.float().to(kernel_device))

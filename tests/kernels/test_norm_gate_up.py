"""norm_gate_up: the Triton kernel against its torch twin."""

from collections.abc import Callable

import pytest
import torch

from slipstream.kernels.gpu import norm_gate_up as gpu
from slipstream.kernels.gpu.tiles import Tile
from slipstream.kernels.norm_gate_up import norm_gate_up
from slipstream.kernels.stream import Norm, Stream


@pytest.mark.parametrize("tile", [Tile(block_n=16), Tile(block_n=8, split=0)], ids=["matrix unit", "row by row"])
@pytest.mark.parametrize(
    ("inner", "k", "m", "dtype"),
    [(40, 48, 1, torch.float32), (16, 64, 17, torch.float32), (24, 64, 3, torch.bfloat16)],
)
def test_equals_the_twin(
    inner: int,
    k: int,
    m: int,
    dtype: torch.dtype,
    tile: Tile,
    monkeypatch: pytest.MonkeyPatch,
    kernel_device: str,
    close: Callable[..., None],
) -> None:
    monkeypatch.setattr(gpu, "tile_for", lambda *shape, paired: tile)
    generator = torch.Generator().manual_seed(m)
    rows = torch.randn(m, k, generator=generator).to(dtype)
    weight = (2 * torch.randn(2 * inner, k, generator=generator) / k**0.5).to(dtype)
    constants = (1 + 0.1 * torch.randn(k, generator=generator)).to(dtype)
    found = gpu.norm_gate_up(
        Stream(rows.to(kernel_device)), Norm(constants.to(kernel_device), 1e-5), weight.to(kernel_device)
    )
    close(found, norm_gate_up(Stream(rows), Norm(constants, 1e-5), weight))

"""embed: the Triton kernel against its torch twin."""

import pytest
import torch

from slipstream.kernels.embed import embed, embed_at, embed_part
from slipstream.kernels.gpu import embed as gpu
from slipstream.kernels.rotary import rotary_rows


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_twin(wide: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, kernel_device: str) -> None:
    table = torch.randn(50, 1100 if wide else 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.tensor([[3, 7], [49, 8], [0, 9], [3, 7]])[:, 0]  # a column, as the drafts of one step are
    if wide:
        monkeypatch.setattr(gpu, "RESIDENT_K", 1000)
    found = gpu.embed(ids.to(kernel_device), table.to(kernel_device))
    expected = embed(ids, table).rows
    assert torch.equal(found.rows.cpu(), expected)
    if wide:
        assert found.sumsq is not None
        torch.testing.assert_close(found.sumsq.cpu(), expected.float().square().sum(-1, keepdim=True))
    else:
        assert found.sumsq is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_of_the_positions_come_along(dtype: torch.dtype, kernel_device: str) -> None:
    made = torch.Generator().manual_seed(0)
    table, angles = torch.randn(50, 40, generator=made).to(dtype), torch.randn(2, 30, 24, generator=made).to(dtype)
    ids, positions = torch.tensor([3, 49, 0, 3]), torch.tensor([[29, 0], [0, 1], [-1, 2], [7, 3]])[:, 0]
    there = (one.to(kernel_device) for one in (ids, table, positions, angles))
    stream, cos, sin = gpu.embed_at(*there)
    twin = embed_at(ids, table, positions, angles)
    expected = embed(ids, table).rows, *rotary_rows(angles, positions)
    for found, of_twin, wanted in zip((stream.rows, cos, sin), (twin[0].rows, *twin[1:]), expected, strict=True):
        assert torch.equal(found.cpu(), wanted)
        assert torch.equal(of_twin, wanted)


def test_no_rows(kernel_device: str) -> None:
    ids = torch.zeros(0, dtype=torch.int64, device=kernel_device)
    assert gpu.embed(ids, torch.zeros(4, 8, device=kernel_device)).rows.shape == (0, 8)


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (20, 50), (30, 31)])
def test_a_part_of_the_table_gives_its_rows_and_zeros(start: int, stop: int, kernel_device: str) -> None:
    table = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([3, 49, 20, 19, 30, 0])
    found = gpu.embed_part(ids.to(kernel_device), table[start:stop].to(kernel_device), start).cpu()
    mine = (ids >= start) & (ids < stop)
    assert torch.equal(found[mine], table[ids[mine]])
    assert (found[~mine] == 0).all()
    assert torch.equal(found, embed_part(ids, table[start:stop], start))

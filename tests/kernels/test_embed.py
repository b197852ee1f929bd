"""embed: the Triton kernel against its torch twin."""

import pytest
import torch

from slipstream.kernels.embed import embed, embed_part
from slipstream.kernels.gpu import embed as gpu


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

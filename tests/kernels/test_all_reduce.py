"""Gather and all-reduce over gloo, held against the sum written out, for each number of ranks."""

from pathlib import Path

import pytest
import torch

JOBS = Path(__file__).parents[1] / "engine" / "parallel_jobs.py"


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank puts in: numbers of very different size, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(rank)
    scale = torch.exp2(torch.randint(-14, 15, shape, generator=generator).float())
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sum_is_that_of_the_ranks_in_order_rounded_once(ranks, size, dtype):
    parts = [part(rank, (5, 33), dtype) for rank in range(size)]
    expected = torch.zeros(5, 33)
    for one in parts:
        expected = expected + one.float()
    got = ranks.run(size, JOBS, "reduce", parts)
    for result in got:
        assert result.dtype == dtype
        assert torch.equal(result, expected.to(dtype))  # the same bits on every rank
    backwards = torch.zeros(5, 33)
    for one in reversed(parts):
        backwards = backwards + one.float()
    assert size == 2 or not torch.equal(backwards, expected)  # another order would have shown


@pytest.mark.parametrize("size", [2, 4, 8])
def test_uneven_and_empty_parts_are_gathered_in_rank_order(ranks, size):
    widths = [3, 0, 1, 4, 0, 2, 5, 1][:size]
    parts = [part(rank, (2, 3, width), torch.bfloat16) for rank, width in enumerate(widths)]
    for result in ranks.run(size, JOBS, "gather", parts):
        assert torch.equal(torch.cat(result, dim=-1), torch.cat(parts, dim=-1))
        assert [piece.shape[-1] for piece in result] == widths


def test_a_row_does_not_depend_on_its_neighbours(ranks):
    parts = [part(rank, (40, 24), torch.bfloat16) for rank in range(8)]
    together = ranks.run(8, JOBS, "reduce", parts)[3]
    for row in (0, 7, 39):
        alone = ranks.run(8, JOBS, "reduce", [one[row : row + 1] for one in parts])[3]
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("size", [2, 4])
def test_the_fallback_of_the_cards_gives_the_same_bits(ranks, size):
    """Their all-gather and ordered sum, here over gloo."""
    parts = [part(rank, (5, 34), torch.bfloat16) for rank in range(size)]
    widths = [34, 0, 7, 33][:size]
    expected = ranks.run(size, JOBS, "reduce", parts)[0]
    for summed, added, gathered in ranks.run(size, JOBS, "by_nccl_exchange", parts, widths):
        assert torch.equal(summed, expected)
        assert torch.equal(added, parts[0] + expected)
        assert torch.equal(gathered, torch.cat([x[:, :width] for x, width in zip(parts, widths, strict=True)], dim=1))

"""Top-k and top-p by sums over ranks, each with its own columns, over gloo: one rank's cut, to the bit and the tie."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.sampling import SamplingBatch, filter_logits, sample

JOBS = Path(__file__).parents[1] / "engine" / "parallel_jobs.py"


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 0


def agree(ranks: Any, widths: list[int], logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
    """Holds ranks with these columns against one with all: filtered logits and tokens. Returns the filtered logits."""
    batch = SamplingBatch.from_params(params, list(range(len(params))))
    positions = torch.arange(logits.shape[0] * logits.shape[1]).view(logits.shape[:2])
    filtered, tokens = filter_logits(logits, batch), sample(logits, batch, positions, 1)
    found = ranks.run(len(widths), JOBS, "sample_parts", widths, logits, batch, positions)
    assert torch.equal(torch.cat([own for _, own, _ in found], dim=-1), filtered)
    for drawn, _, moved in found:
        assert torch.equal(drawn, tokens)
        assert moved <= 512  # counts and masses of eight bits, never a row of logits
    return filtered


def cuts(data: st.DataObject, vocab: int, size: int) -> list[int]:
    """Columns of each rank: any, none at all among them."""
    marks = sorted(data.draw(st.lists(st.integers(0, vocab), min_size=size - 1, max_size=size - 1)))
    return [high - low for low, high in zip([0, *marks], [*marks, vocab], strict=True)]


PARAMS = st.builds(
    Params,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5]),
    top_k=st.one_of(st.just(0), st.integers(1, 40), st.just(2**63 - 1)),
    top_p=st.one_of(st.sampled_from([1e-12, 0.05, 0.5, 0.6, 0.9, 1 - 1e-9, 1.0]), st.floats(0.001, 1.0)),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_ranks_draw_what_one_draws(ranks: Any, data: st.DataObject) -> None:
    """Few levels: most tokens tie, within a rank and between ranks. Many: hardly any does."""
    vocab, size = data.draw(st.integers(1, 60)), data.draw(st.sampled_from([2, 4, 8]))
    params = data.draw(st.lists(PARAMS, min_size=1, max_size=4))
    levels = data.draw(st.sampled_from([1, 3, 9, 2000]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = torch.randint(-levels, levels + 1, (len(params), 2, vocab), generator=generator) * (8 / levels)
    agree(ranks, cuts(data, vocab, size), logits.to(dtype), params)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 6.0])
def test_a_vocabulary_larger_than_one_rank_looks_at(ranks: Any, scale: float) -> None:
    """3,000 tokens, flat to peaked: one rank finds its cut among the 1,024 largest, or by a sort."""
    logits = torch.randn(5, 2, 3000, generator=torch.Generator().manual_seed(1)) * scale
    params = [Params(1.0, 0, 0.9), Params(0.7, 0, 0.5), Params(1.0, 1500, 0.97), Params(1.0, 40), Params(0.0)]
    agree(ranks, [1500, 1500], logits, params)
    agree(ranks, [0, 1000, 1999, 1], logits, params)


def test_of_equals_the_lowest_ids_are_kept_whoever_has_them(ranks: Any) -> None:
    params = [Params(1.0, 0, 0.5), Params(1.0, 3, 0.5), Params(1.0, 1), Params(1.0, 0, 1e-9), Params(1.0, 0, 0.85)]
    kept = agree(ranks, [3, 0, 4, 3], torch.zeros(5, 1, 10), params)[:, 0] > -torch.inf
    assert kept.sum(-1).tolist() == [5, 5, 10, 1, 9]  # top-k keeps all that tie with its last
    assert all(row.tolist() == sorted(row.tolist(), reverse=True) for row in kept)


def test_the_largest_alone_is_kept_where_only_one_is_wanted(ranks: Any) -> None:
    logits = torch.randn(4, 3, 100, generator=torch.Generator().manual_seed(2))
    params = [Params(1.0, 1), Params(1.0, 0, 1e-300), Params(1.0, 1, 1e-9), Params(2.0, 1, 1.0)]
    kept = agree(ranks, [30, 70], logits, params) > -torch.inf
    assert torch.equal(kept.float().argmax(-1), logits.argmax(-1))
    assert (kept.sum(-1) == 1).all()


def test_rows_of_infinities_and_signed_zeros(ranks: Any) -> None:
    logits = torch.tensor([[0.0, -0.0, -torch.inf, 1.0, -1.0, -0.0, 0.0, -torch.inf]]).expand(3, 1, 8).contiguous()
    kept = agree(ranks, [3, 5], logits, [Params(1.0, 3), Params(1.0, 0, 0.7), Params(1.0, 4, 0.99)]) > -torch.inf
    assert kept[0, 0].nonzero()[:, 0].tolist() == [0, 1, 3, 5, 6]


def test_what_is_no_number_is_never_filtered_away(ranks: Any) -> None:
    """One rank and several give its id: a broken model is seen, and no id lies outside the vocabulary."""
    logits = torch.randn(3, 1, 20, generator=torch.Generator().manual_seed(3))
    logits[:, 0, [7, 15]] = torch.nan
    params = [Params(1.0, 2), Params(1.0, 0, 0.3), Params(1.0, 5, 0.5)]
    batch, positions = SamplingBatch.from_params(params), torch.zeros(3, 1, dtype=torch.int64)
    assert (sample(logits, batch, positions) == 7).all()
    for drawn, _, _ in ranks.run(2, JOBS, "sample_parts", [10, 10], logits, batch, positions):
        assert (drawn == 7).all()

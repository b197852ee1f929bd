"""Draft vocabulary: order, ties, round trips, refusals."""

import pytest
import torch

from slipstream.engine.drafts.eagle3.vocab import count_tokens, select_draft_vocab
from slipstream.engine.errors import SlipstreamError


def test_only_tokens_under_the_mask_count():
    ids, mask = torch.tensor([3, 3, 1, 4, 1]), torch.tensor([False, True, True, True, True])
    assert count_tokens([(ids, mask), (ids, ~mask)], 6).tolist() == [0, 2, 0, 2, 1, 0]
    assert count_tokens([(ids, mask)], 6).tolist() == [0, 2, 0, 1, 1, 0]


def test_most_frequent_sorted_by_id_ties_to_the_low_id():
    counts = torch.tensor([0, 5, 2, 0, 2, 9, 2])
    vocab = select_draft_vocab(counts, 4)
    assert vocab.target_ids.tolist() == [1, 2, 4, 5]  # 5 and 9, then two of the three twos: the lower ids
    assert vocab.d2t.tolist() == [1, 1, 2, 2]
    assert vocab.coverage == pytest.approx(18 / 20)


def test_short_counts_are_padded_with_low_ids():
    counts = torch.zeros(8, dtype=torch.int64)
    counts[6] = 3
    assert select_draft_vocab(counts, 3).target_ids.tolist() == [0, 1, 6]


def test_both_directions_name_the_same_tokens():
    counts = torch.randint(0, 5, (200,), generator=torch.Generator().manual_seed(0))
    vocab = select_draft_vocab(counts, 77)
    assert len(vocab.target_ids) == 77
    assert torch.equal(vocab.t2d.nonzero().squeeze(1), vocab.target_ids)


@pytest.mark.parametrize("size", [0, 21])
def test_size_outside_the_targets_is_refused(size):
    with pytest.raises(SlipstreamError, match="draft_vocab_size"):
        select_draft_vocab(torch.ones(20, dtype=torch.int64), size)


def test_nothing_counted_is_refused():
    with pytest.raises(SlipstreamError, match="F10"):
        select_draft_vocab(torch.zeros(20, dtype=torch.int64), 5)

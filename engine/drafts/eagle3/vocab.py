"""The draft vocabulary: which of the target's tokens the draft can propose."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from slipstream.engine.errors import SlipstreamError


@dataclass(frozen=True)
class DraftVocab:
    """A choice of Vd target tokens, sorted by target id.

    Args:
        d2t: [Vd] int64 offsets: target id = draft id + d2t[draft id].
        t2d: [V] bool, true where the target token has a draft id.
        coverage: share of the counted tokens that have a draft id, 0..1.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    coverage: float

    @property
    def target_ids(self) -> torch.Tensor:
        """[Vd] int64, ascending: the target id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t))


def count_tokens(conversations: Iterable[tuple[torch.Tensor, torch.Tensor]], vocab_size: int) -> torch.Tensor:
    """How often each token was answered.

    Args:
        conversations: pairs (token_ids [T] int, loss_mask [T] bool); only tokens under the mask count. Pass training
            conversations alone: a held-out one would make the coverage of the held-out set look better than it is.
        vocab_size: V, of the target.

    Returns:
        [V] int64.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token_ids, loss_mask in conversations:
        counts += torch.bincount(token_ids[loss_mask.bool()].long(), minlength=vocab_size)
    return counts


def select_draft_vocab(counts: torch.Tensor, draft_vocab_size: int) -> DraftVocab:
    """The most frequent tokens; among equal counts (tokens never seen included) the lower id wins.

    Args:
        counts: [V] int64, from `count_tokens`.
        draft_vocab_size: Vd.

    Raises SlipstreamError when Vd is not within 1..V or nothing was counted.
    """
    vocab_size = len(counts)
    if not 1 <= draft_vocab_size <= vocab_size:
        raise SlipstreamError(
            f"a draft vocabulary of {draft_vocab_size} tokens was asked for",
            expected=f"1..{vocab_size}, the target's vocabulary",
            do="change draft.draft_vocab_size",
        )
    total = int(counts.sum())
    if total == 0:
        raise SlipstreamError(
            "no token is under the loss mask, so there is nothing to choose the draft vocabulary from",
            expected="assistant tokens in the training conversations",
            do="look at the decoded sample of the regenerate stage: the chat template or the mask is wrong",
            fault="F10",
        )
    order = torch.argsort(counts, descending=True, stable=True)  # [V]; stable keeps the lower id first
    chosen = order[:draft_vocab_size].sort().values  # [Vd]
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return DraftVocab(chosen - torch.arange(draft_vocab_size), t2d, int(counts[chosen].sum()) / total)

"""Top-k and top-p where each rank has a part of the vocabulary: a search for the cut by sums over ranks, on the CPU.

Neither logits nor probabilities are exchanged. A score's bits, read as an integer in the order of scores, are its key;
eight bits of it a step, the largest first, every rank counts how many of its tokens, and how much mass, have each of
the 256 values beside what the steps before have fixed. Of all ranks' counts each works out the same next eight bits.
The sums are of integers, and so exact. Ties at top-p's cut go by id: the ranks' columns lie in order, and how many of
the ties the ranks before have is among the counts.
"""

from dataclasses import dataclass

import torch

from slipstream.kernels.all_gather import all_gather
from slipstream.kernels.logit_filters import masses, tempered, wanted_mass
from slipstream.kernels.sampling_batch import SamplingBatch
from slipstream.kernels.vocabulary_part import VocabularyPart, ordered_bits

_BITS = 8  # a step
_KEY_BITS = 32


def filter_logits_of_ranks(logits: torch.Tensor, sampling: SamplingBatch, part: VocabularyPart) -> torch.Tensor:
    """What `filter_logits` leaves of this rank's columns. All ranks call it.

    Args:
        logits: [B, R, Vr], any float dtype, the columns of `part`.
        sampling: parameters of the B requests, resolved, the same on all ranks.
        part: this rank's columns.

    Returns:
        [B, R, Vr] fp32, logits / T where a token is kept, else -inf.
    """
    scores, vocab = tempered(logits, sampling), sum(part.widths)
    limits_number = (sampling.temperature > 0) & (sampling.top_k > 0)
    limits_mass = (sampling.temperature > 0) & (sampling.top_p < 1)
    requests = (limits_number | limits_mass).nonzero()[:, 0]  # [F]
    if not len(requests):
        return scores
    per_request = scores.shape[1]
    rows = scores[requests].flatten(0, 1)  # [F, R, Vr] -> [M, Vr]

    def of_rows(values: torch.Tensor) -> torch.Tensor:  # [B] -> [F] -> [M]
        return values[requests].repeat_interleave(per_request)

    keys, mass = ordered_bits(rows).long(), None
    if limits_mass.any():
        own = rows.amax(-1, keepdim=True) if rows.shape[-1] else rows.new_full((len(rows), 1), -torch.inf)  # [M, 1]
        largest = torch.cat(all_gather(own, [1] * len(part.widths), part.carrier), dim=-1)  # [M, size]
        mass = masses(rows, largest.amax(-1, keepdim=True))
    dropped, total = torch.zeros_like(keys, dtype=torch.bool), None
    if limits_number.any():
        number = of_rows(torch.where(limits_number, sampling.top_k.clamp(max=vocab), vocab))
        cut = _search(keys, mass, part, number=number)
        dropped, total = keys < cut.key[:, None], cut.mass  # top-p is of what top-k leaves
    if mass is not None:
        cut = _search(keys, mass, part, top_p=of_rows(sampling.top_p), total=total)
        ties = keys == cut.key[:, None]
        outside = (keys < cut.key[:, None]) | (ties & (ties.cumsum(-1) > cut.own_ties[:, None]))
        dropped |= outside & of_rows(limits_mass)[:, None]
    kept = rows.masked_fill(dropped & ~rows.isnan(), -torch.inf)
    scores[requests] = kept.view(len(requests), *scores.shape[1:])  # [M, Vr] -> [F, R, Vr]
    return scores


@dataclass(frozen=True)
class _Cut:
    """Where a row is cut.

    key: [M] int64. mass: [M] int64, of all tokens at or above it, where mass is looked at. own_ties: [M] int64, how
    many of this rank's tokens that lie exactly there are needed for the mass, those of the lowest ids over all ranks.
    """

    key: torch.Tensor
    mass: torch.Tensor
    own_ties: torch.Tensor


def _search(
    keys: torch.Tensor,
    mass: torch.Tensor | None,
    part: VocabularyPart,
    *,
    number: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> _Cut:
    """The largest key at or above which lies enough, over all ranks.

    Args:
        keys: [M, Vr] int64, of this rank's tokens.
        mass: [M, Vr] int64, theirs; None where nobody asks for it.
        number: [M] int64, so many tokens are enough; at most the vocabulary.
        top_p: [M] fp64, this share of the mass is enough; exactly one of the two is given.
        total: [M] int64, the mass of which top_p is; None: all tokens'.
    """
    values, kinds, count = 1 << _BITS, 1 if mass is None else 2, len(keys)
    prefix, above = keys.new_zeros(count), keys.new_zeros(kinds, count, 1)  # number and mass above what is looked at
    unsigned, widths = keys + (1 << (_KEY_BITS - 1)), [kinds * values] * len(part.widths)
    wanted = number
    for shift in range(_KEY_BITS - _BITS, -1, -_BITS):
        inside = (unsigned >> (shift + _BITS)) == prefix[:, None]
        value = (unsigned >> shift) & (values - 1)
        own = keys.new_zeros(count, kinds, values)
        own[:, 0].scatter_add_(1, value, inside.long())
        if mass is not None:
            own[:, 1].scatter_add_(1, value, torch.where(inside, mass, 0))
        ranks = torch.stack(all_gather(own.flatten(1), widths, part.carrier))  # size x [M, kinds * 256]
        ranks = ranks.view(-1, count, kinds, values).transpose(1, 2)  # [size, kinds, M, 256]
        there = ranks.sum(0)
        upwards = there.flip(-1).cumsum(-1).flip(-1) + above  # at or above each value: [kinds, M, 256]
        if wanted is None:
            assert top_p is not None
            wanted = wanted_mass(upwards[1, :, 0] if total is None else total, top_p)
        enough = upwards[0 if top_p is None else 1] >= wanted[:, None]
        chosen = (enough * torch.arange(values)).amax(-1)  # the largest value with enough: [M]
        at = chosen.expand(kinds, -1)[..., None]  # [M] -> [kinds, M, 1]
        reached, level = upwards.gather(-1, at), there.gather(-1, at)
        above = reached - level
        prefix = (prefix << _BITS) | chosen
    key = prefix - (1 << (_KEY_BITS - 1))
    if mass is None or top_p is None:
        return _Cut(key, reached[-1, :, 0], keys.new_zeros(count))
    assert wanted is not None
    ties, weight = level[..., 0]  # [M] each
    each = (weight // ties.clamp(min=1)).clamp(min=1)
    needed = (wanted - above[1, :, 0] + each - 1) // each
    before = ranks[: part.rank, 0].sum(0).gather(-1, chosen[:, None])[:, 0]  # ties of the ranks before: [M]
    return _Cut(key, reached[1, :, 0], needed - before)

"""Temperature, top-k and top-p: which tokens may be chosen.

A token's mass is exp(score - largest score) as an integer, in units of 2^-40: integer sums are exact in any order, so
that one rank, several (`filters_of_ranks`) and the tiles of a card (`gpu/logit_filters`) find the same sums and cut.
"""

import torch

from slipstream.kernels.sampling_batch import SamplingBatch

# Top-p looks at this many largest logits before it sorts a whole row (a sort costs ten times as much).
_TOP_P_CANDIDATES = 1024
_MASS_UNITS = 2.0**40


def filter_logits(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """Temperature, then top-k, then top-p: what transformers' warpers of those names leave.

    Args:
        logits: [B, R, V], any float dtype.
        sampling: parameters of the B requests; greedy rows are passed on unscaled and unfiltered.

    Returns:
        [B, R, V] fp32, logits / T where a token is kept, else -inf. Top-k keeps every tie with the k-th logit, as
        transformers does. Among tokens that tie at top-p's cut-off transformers keeps some, as its sort happens to
        leave them; here those of the lowest ids, as many as there. NaN stays, whatever is filtered.
    """
    greedy, scores = sampling.temperature == 0, tempered(logits, sampling)
    if sampling.max_top_k > 0:
        scores = _filter_top_k(scores, torch.where(greedy, 0, sampling.top_k), sampling.max_top_k)
    if sampling.has_top_p:
        top_p = torch.where(greedy, 1.0, sampling.top_p)[:, None].expand(scores.shape[:2])  # [B] -> [B, R]
        scores = _filter_top_p(scores.flatten(0, 1), top_p.reshape(-1)).view_as(
            scores
        )  # [B, R, V] -> [B * R, V] -> back
    return scores


def _filter_top_k(scores: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """scores [B, R, V], top_k [B] (0 = off) -> the same with everything below the k-th largest at -inf."""
    largest = scores.topk(min(max_top_k, scores.shape[-1]), dim=-1).values  # [B, R, k]
    index = (top_k - 1).clamp(0, largest.shape[-1] - 1)[:, None, None].expand(*scores.shape[:2], 1)
    cut = largest.gather(-1, index)  # [B, R, 1]
    return scores.masked_fill((scores < cut) & (top_k > 0)[:, None, None], -torch.inf)


def _filter_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """scores [M, V], top_p [M] fp64 (1 = off) -> the same with everything outside the nucleus at -inf."""
    count, cut = _nucleus(scores, top_p)
    ties, below = scores == cut[:, None], scores < cut[:, None]
    kept_ties = (count - (scores > cut[:, None]).sum(-1))[:, None]
    dropped = below | (ties & (ties.cumsum(-1, dtype=torch.int32) > kept_ties))
    return scores.masked_fill(dropped & (top_p < 1)[:, None], -torch.inf)


def _nucleus(scores: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens top-p keeps and the smallest kept logit: scores [M, V], top_p [M] -> [M] int64, [M] fp32.

    A token is kept while those ahead of it weigh less than top_p of all.
    """
    top = scores.amax(-1, keepdim=True)
    wanted = wanted_mass(masses(scores, top).sum(-1), top_p)[:, None]
    count = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    cut = torch.empty_like(scores[:, 0])
    for candidates in sorted({min(_TOP_P_CANDIDATES, scores.shape[-1]), scores.shape[-1]}):
        left = (count == 0).nonzero()[:, 0]  # not yet found among fewer
        largest = scores[left].topk(candidates, dim=-1).values  # [L, C], descending
        mass = masses(largest, top[left])
        through = mass.cumsum(-1)
        found = (through - mass < wanted[left]).sum(-1).clamp(min=1)
        clear = (through[:, -1] >= wanted[left, 0]) | (candidates == scores.shape[-1])
        count[left] = torch.where(clear, found, 0)
        cut[left] = largest.gather(-1, found[:, None] - 1)[:, 0]  # [L, 1] -> [L]
    return count, cut


def tempered(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """[B, R, V], any float dtype -> logits / T in fp32; those of greedy rows as they are."""
    temperature = torch.where(sampling.temperature == 0, 1.0, sampling.temperature)
    return logits.float() / temperature[:, None, None]  # [B] -> [B, 1, 1]


def masses(scores: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """What each token weighs beside the largest score: [..., V] and [..., 1] fp32 -> [..., V] int64, at most 2^40."""
    return ((scores - largest).double().exp().float() * _MASS_UNITS).long()


def wanted_mass(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The mass at which top-p has enough: total [M] int64, top_p [M] fp64 -> [M] int64, from 1 to `total`."""
    return (top_p * total).ceil().long().clamp(min=1).minimum(total)

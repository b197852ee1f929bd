"""Seeded sampling: the token at a position is argmax(filtered logits / T + Gumbel noise).

The noise is a function of (request seed, choice index, absolute position, global token id) alone (`gumbel_noise`). That
is why speculation cannot change the output. The same noise at the draft's ids keeps acceptance high when T rises.
"""

from dataclasses import dataclass

import torch

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.filters_of_ranks import filter_logits_of_ranks
from slipstream.kernels.gumbel_noise import gumbel_noise
from slipstream.kernels.logit_filters import filter_logits
from slipstream.kernels.sampling_batch import RowParams, SamplingBatch
from slipstream.kernels.vocabulary_part import VocabularyPart

__all__ = [
    "RowParams",
    "SamplingBatch",
    "TokenLogprobs",
    "filter_logits",
    "gumbel_noise",
    "propose_tokens",
    "sample",
    "token_logprobs",
]


def sample(
    logits: torch.Tensor,
    sampling: SamplingBatch,
    positions: torch.Tensor,
    offset: int = 0,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """The target's token at each position; greedy rows take the largest logit, ties to the lowest id.

    Args:
        logits: [B, R, V], any float dtype; the columns of `part` where that is given.
        sampling: parameters of the B requests.
        positions: [B, R] int64; positions + offset: absolute position of the token that each row chooses.
        offset: 1 where `positions` are those of the rows themselves, whose next token is chosen.
        part: this rank's columns: each rank finds the best of its own, and a (score, id) of each is exchanged. Where a
            request has top-k or top-p, which count over the whole vocabulary, ranks search the cut by sums
            (`filters_of_ranks`, on cards `gpu/filters_of_ranks`).

    Returns:
        [B, R] int64 token ids, the same on all ranks.
    """
    if on_gpu(logits):
        from slipstream.kernels.gpu import sampling as gpu

        return gpu.sample(logits, sampling, positions, offset, part)
    sampling, positions = sampling.resolved(), positions + offset
    start = 0 if part is None else part.start
    ids = torch.arange(start, start + logits.shape[-1], device=logits.device)
    if len(sampling.sampled_rows) == sampling.size > 0:
        return _joined(_largest(_noisy(logits, sampling, positions, ids, part)), part)
    best = _largest(logits)
    if not sampling.is_greedy:
        rows = list(sampling.sampled_rows)
        noisy = _largest(_noisy(logits[rows], sampling.select(rows), positions[rows], ids, part))
        best[0][rows], best[1][rows] = noisy
    return _joined(best, part)


def propose_tokens(
    logits: torch.Tensor,
    sampling: SamplingBatch,
    positions: torch.Tensor,
    target_ids: torch.Tensor,
    offset: int = 0,
    out: torch.Tensor | None = None,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """The draft's guess of `sample` at one position: argmax(z / T + the noise of the ids it maps to), unfiltered.

    Args:
        logits: [B, Vd], any float dtype; the columns of `part` where that is given.
        sampling: parameters of the B requests.
        positions: [B] int64; positions + offset: absolute position of the token being guessed.
        target_ids: [Vd] int64, target id of each draft id, all of them.
        offset: how far the chain has come since `positions`.
        out: [B] int64, where the tokens go (a column of the round's drafts [B, K], say).
        part: this rank's columns of the draft's vocabulary; a (score, id) of each rank is exchanged.

    Returns:
        [B] int64 target ids (`out` where given); of equals, that of the lowest draft id.
    """
    if on_gpu(logits):
        from slipstream.kernels.gpu import sampling as gpu

        return gpu.propose_tokens(logits, sampling, positions, target_ids, offset, out, part)
    sampling = sampling.resolved()
    best = _largest(logits)  # [B, Vd] -> 2 x [B]
    if not sampling.is_greedy and logits.shape[-1]:
        rows = list(sampling.sampled_rows)
        at = (positions[rows] + offset)[:, None]  # [B] -> [S, 1]
        own_ids = target_ids if part is None else target_ids[part.ids]
        noise = gumbel_noise(sampling.seed[rows], sampling.choice[rows], at, own_ids)
        scores = logits[rows].float() / sampling.temperature[rows][:, None]
        best[0][rows], best[1][rows] = _largest(scores + noise[:, 0])  # [S, 1, Vd] -> [S, Vd] -> 2 x [S]
    draft = _joined(best, part)
    return target_ids[draft] if out is None else out.copy_(target_ids[draft])


@dataclass(frozen=True)
class TokenLogprobs:
    """chosen: [...] fp32; top_ids: [..., n] int64 and top: [..., n] fp32, most likely first."""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, top_n: int) -> TokenLogprobs:
    """Log-probabilities of the raw logits (no temperature, no filter), in fp32.

    Args:
        logits: [..., V], any float dtype.
        token_ids: [...] int64, the chosen tokens.
        top_n: how many of the most likely tokens to report, 0 or more.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(-1, token_ids[..., None])[..., 0]  # [..., 1] -> [...]
    top = logprobs.topk(min(top_n, logprobs.shape[-1]), dim=-1)  # [..., V] -> [..., n]
    return TokenLogprobs(chosen, top.indices, top.values)


def _noisy(
    logits: torch.Tensor,
    sampling: SamplingBatch,
    positions: torch.Tensor,
    ids: torch.Tensor,
    part: VocabularyPart | None,
) -> torch.Tensor:
    """Filtered logits / T with the noise of `ids` [V] added: [B, R, V]."""
    if part is not None and (sampling.max_top_k or sampling.has_top_p):
        filtered = filter_logits_of_ranks(logits, sampling, part)
    else:
        filtered = filter_logits(logits, sampling) if len(ids) else logits  # more ranks than columns
    if not len(ids):
        return filtered
    return gumbel_noise(sampling.seed, sampling.choice, positions, ids).add_(filtered)


def _largest(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., V] -> the largest score [...] fp32 and its column [...], of equals the first; -inf where V is 0."""
    if not scores.shape[-1]:
        return scores.new_full(scores.shape[:-1], -float("inf"), dtype=torch.float32), scores.new_zeros(
            scores.shape[:-1], dtype=torch.int64
        )
    best = scores.max(dim=-1)
    return best.values.float(), best.indices


def _joined(best: tuple[torch.Tensor, torch.Tensor], part: VocabularyPart | None) -> torch.Tensor:
    """The id of the best over all ranks, from this rank's (score, column)."""
    score, column = best
    return column if part is None else part.best(score, column + part.start)

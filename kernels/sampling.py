"""Seeded sampling: the token at a position is argmax(filtered logits / T + Gumbel noise).

The noise is a function of (request seed, choice index, absolute position, global token id) alone (`gumbel_noise`). That
is why speculation cannot change the output. The same noise at the draft's ids keeps acceptance high when T rises.
"""

from dataclasses import dataclass

import torch

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.gumbel_noise import gumbel_noise
from slipstream.kernels.logit_filters import filter_logits
from slipstream.kernels.sampling_batch import RowParams, SamplingBatch

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


def sample(logits: torch.Tensor, sampling: SamplingBatch, positions: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """The target's token at each position; greedy rows take the largest logit, ties to the lowest id.

    Args:
        logits: [B, R, V], any float dtype.
        sampling: parameters of the B requests.
        positions: [B, R] int64; positions + offset: absolute position of the token that each row chooses.
        offset: 1 where `positions` are those of the rows themselves, whose next token is chosen.

    Returns:
        [B, R] int64 token ids.
    """
    if on_gpu(logits):
        from slipstream.kernels.gpu import sampling as gpu

        return gpu.sample(logits, sampling, positions, offset)
    sampling, positions = sampling.resolved(), positions + offset
    if len(sampling.sampled_rows) == sampling.size > 0:
        return _sample_rows(logits, sampling, positions)
    tokens = logits.max(dim=-1).indices  # [B, R, V] -> [B, R]
    if not sampling.is_greedy:
        rows = list(sampling.sampled_rows)
        tokens[rows] = _sample_rows(logits[rows], sampling.select(rows), positions[rows])
    return tokens


def propose_tokens(
    logits: torch.Tensor,
    sampling: SamplingBatch,
    positions: torch.Tensor,
    target_ids: torch.Tensor,
    offset: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The draft's guess of `sample` at one position: argmax(z / T + the noise of the ids it maps to), unfiltered.

    Args:
        logits: [B, Vd], any float dtype.
        sampling: parameters of the B requests.
        positions: [B] int64; positions + offset: absolute position of the token being guessed.
        target_ids: [Vd] int64, target id of each draft id.
        offset: how far the chain has come since `positions`.
        out: [B] int64, where the tokens go (a column of the round's drafts [B, K], say).

    Returns:
        [B] int64 target ids (`out` where given); of equals, that of the lowest draft id.
    """
    if on_gpu(logits):
        from slipstream.kernels.gpu import sampling as gpu

        return gpu.propose_tokens(logits, sampling, positions, target_ids, offset, out)
    sampling = sampling.resolved()
    draft = logits.max(dim=-1).indices  # [B, Vd] -> [B]
    if not sampling.is_greedy:
        rows = list(sampling.sampled_rows)
        at = (positions[rows] + offset)[:, None]  # [B] -> [S, 1]
        noise = gumbel_noise(sampling.seed[rows], sampling.choice[rows], at, target_ids)
        scores = logits[rows].float() / sampling.temperature[rows][:, None]
        draft[rows] = (scores + noise[:, 0]).max(dim=-1).indices  # [S, 1, Vd] -> [S, Vd] -> [S]
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


def _sample_rows(logits: torch.Tensor, sampling: SamplingBatch, positions: torch.Tensor) -> torch.Tensor:
    ids = torch.arange(logits.shape[-1], device=logits.device)
    noise = gumbel_noise(sampling.seed, sampling.choice, positions, ids)
    return noise.add_(filter_logits(logits, sampling)).max(dim=-1).indices  # [B, R, V] -> [B, R]

"""Temperature, top-k and top-p: which tokens may be chosen."""

import torch

from slipstream.kernels.sampling_batch import SamplingBatch

# Top-p looks at this many largest logits before it sorts a whole row (a sort costs ten times as much).
_TOP_P_CANDIDATES = 1024
# A cut-off closer than this to the wanted mass is left to the full sort, whose rounding is transformers' own.
_TOP_P_MARGIN = 1e-5


def filter_logits(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """Temperature, then top-k, then top-p: what transformers' warpers of those names leave.

    Args:
        logits: [B, R, V], any float dtype.
        sampling: parameters of the B requests; greedy rows are passed on unscaled and unfiltered.

    Returns:
        [B, R, V] fp32, logits / T where a token is kept, else -inf. Top-k keeps every tie with the k-th logit, as
        transformers does. Among tokens that tie at top-p's cut-off transformers keeps some, as its sort happens to
        leave them; here those of the lowest ids, as many as there.
    """
    greedy = sampling.temperature == 0
    temperature = torch.where(greedy, torch.ones_like(sampling.temperature), sampling.temperature)
    scores = logits.float() / temperature[:, None, None]  # [B] -> [B, 1, 1]
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
    ties = scores == cut[:, None]
    above = scores > cut[:, None]
    kept_ties = (count - above.sum(-1))[:, None]
    keep = above | (ties & (ties.cumsum(-1, dtype=torch.int32) <= kept_ties)) | (top_p >= 1)[:, None]
    return scores.masked_fill(~keep, -torch.inf)


def _nucleus(scores: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens top-p keeps and the smallest kept logit: scores [M, V], top_p [M] -> [M] int64, [M] fp32."""
    if scores.shape[-1] <= _TOP_P_CANDIDATES:
        return _nucleus_by_sort(scores, top_p)
    largest = scores.topk(_TOP_P_CANDIDATES, dim=-1).values  # [M, C], descending
    top = largest[:, :1].double()
    mass = (largest - top).exp() / (scores - top).exp().sum(-1, keepdim=True)  # [M, C] fp64
    through = mass.cumsum(-1)
    before = through - mass  # mass of the tokens ahead of each; a token is kept while this is below top_p
    count = (before < top_p[:, None]).sum(-1).clamp(min=1)
    clear = ((through - top_p[:, None]).abs() > _TOP_P_MARGIN).all(-1) & (through[:, -1] > top_p)
    cut = largest.gather(-1, count[:, None] - 1)[:, 0]  # [M, 1] -> [M]
    unclear = torch.where(~clear & (top_p < 1))[0]
    if unclear.numel():
        count[unclear], cut[unclear] = _nucleus_by_sort(scores[unclear], top_p[unclear])
    return count, cut


def _nucleus_by_sort(scores: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_nucleus`, in transformers' own order of operations, so that rounding falls alike."""
    ordered = scores.sort(dim=-1).values  # ascending
    removed = ordered.softmax(dim=-1).cumsum(dim=-1) <= (1 - top_p).float()[:, None]
    count = (scores.shape[-1] - removed.sum(-1)).clamp(min=1)
    cut = ordered.gather(-1, scores.shape[-1] - count[:, None])[:, 0]  # [M, 1] -> [M]
    return count, cut

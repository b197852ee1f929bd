"""Seeded sampling: the token at a position is argmax(filtered logits / T + Gumbel noise).

The noise is a hash of (request seed, choice index, absolute position, global token id), so it is the same on every
device and every vocabulary shard, whatever else is in the batch, and however the position was reached. That is why
speculation cannot change the output. The same noise at the draft's ids keeps acceptance high when T rises.

The hash is integer arithmetic that wraps around: a 64-bit mix makes the key of a row, a 32-bit mix with three
multiplications spreads it over the vocabulary (14 integer operations an id). Logarithms are taken in fp64 and rounded
to fp32, so that the last-bit differences between math libraries vanish.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

# Multipliers of the 64-bit mix (SplitMix64) and of the 32-bit mix (triple32's), written as signed integers.
_MUL64_A = 0xBF58476D1CE4E5B9 - 2**64
_MUL64_B = 0x94D049BB133111EB - 2**64
_STEP64 = 0x9E3779B97F4A7C15 - 2**64
_MUL32_A = 0xED5AD4BB - 2**32
_MUL32_B = 0xAC4C1B51 - 2**32
_MUL32_C = 0x31848BAB

# Noise is made this many values at a time (at least a row), so that the fp64 values stay in the cache.
_NOISE_VALUES = 65536

# Top-p looks at this many largest logits before it sorts a whole row (a sort costs ten times as much).
_TOP_P_CANDIDATES = 1024
# A cut-off closer than this to the wanted mass is left to the full sort, whose rounding is transformers' own.
_TOP_P_MARGIN = 1e-5


class RowParams(Protocol):
    """What a request's parameters must offer (`engine.sampling_params.SamplingParams` does)."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def seed(self) -> int | None: ...


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of B requests.

    temperature: [B] fp32, 0 = greedy. top_k: [B] int64, 0 = off. top_p: [B] fp64 (its complement is rounded to fp32, as
    in transformers), 1 = off. seed, choice: [B] int64. `sampled_rows` are the indices of the rows that are not greedy,
    `max_top_k` the largest top-k and `has_top_p` whether any top-p is on; these three are read on the host.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    sampled_rows: tuple[int, ...]
    max_top_k: int
    has_top_p: bool

    @property
    def is_greedy(self) -> bool:
        """Every row is greedy, so that sampling is a pure argmax."""
        return not self.sampled_rows

    @property
    def size(self) -> int:
        return self.temperature.shape[0]

    @classmethod
    def from_params(
        cls, params: Sequence[RowParams], choices: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> "SamplingBatch":
        """Stack the parameters of requests.

        Args:
            params: one a request. A request that samples must carry a seed: drawn once, when the request arrives.
            choices: choice index of each request (0 when left out).
            device: where the tensors go.

        Raises ValueError when a request samples without a seed.
        """
        unseeded = [i for i, p in enumerate(params) if p.temperature > 0 and p.seed is None]
        if unseeded:
            raise ValueError(f"requests {unseeded} of the batch have temperature > 0 and no seed; draw it on arrival")
        sampled = tuple(i for i, p in enumerate(params) if p.temperature > 0)
        return cls(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            seed=torch.tensor([p.seed or 0 for p in params], dtype=torch.int64, device=device),
            choice=torch.tensor(list(choices or [0] * len(params)), dtype=torch.int64, device=device),
            sampled_rows=sampled,
            max_top_k=max((params[i].top_k for i in sampled), default=0),
            has_top_p=any(params[i].top_p < 1.0 for i in sampled),
        )

    def select(self, rows: Sequence[int]) -> "SamplingBatch":
        """The parameters of the requests at `rows`, in that order."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.seed.device)
        sampled = set(self.sampled_rows)
        return SamplingBatch(
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            seed=self.seed[index],
            choice=self.choice[index],
            sampled_rows=tuple(i for i, row in enumerate(rows) if row in sampled),
            max_top_k=self.max_top_k,
            has_top_p=self.has_top_p,
        )


def gumbel_noise(
    seed: torch.Tensor, choice: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Standard Gumbel noise, a pure function of its four inputs.

    Args:
        seed, choice: [B] int64.
        positions: [B, R] int64, absolute position of the token being chosen.
        token_ids: [V] int64 global token ids (the whole vocabulary, a shard of it, or a draft's mapped ids), < 2^32.

    Returns:
        [B, R, V] fp32, within about (-3.14, 22.9); the column of an id does not depend on the other ids.
    """
    key = _mix64(_mix64(_mix64(seed)[:, None] + choice[:, None]) + positions)  # [B] -> [B, 1] -> [B, R]
    low, high = _signed32(key).reshape(-1), _signed32(key >> 32).reshape(-1)  # [B, R] -> [B * R] each
    ids = _premix32(_signed32(token_ids))  # [V]
    out = torch.empty(*positions.shape, token_ids.shape[0], dtype=torch.float32, device=token_ids.device)
    flat = out.view(-1, token_ids.shape[0])  # [B, R, V] -> [B * R, V]
    rows = max(1, _NOISE_VALUES // token_ids.shape[0])
    for start in range(0, flat.shape[0], rows):
        part = slice(start, start + rows)
        flat[part] = _gumbel(_mix32(ids, low[part, None], high[part, None]))
    return out


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


def sample(logits: torch.Tensor, sampling: SamplingBatch, positions: torch.Tensor) -> torch.Tensor:
    """The target's token at each position; greedy rows take the largest logit, ties to the lowest id.

    Args:
        logits: [B, R, V], any float dtype.
        sampling: parameters of the B requests.
        positions: [B, R] int64, absolute position of the token that each row chooses.

    Returns:
        [B, R] int64 token ids.
    """
    if len(sampling.sampled_rows) == sampling.size > 0:
        return _sample_rows(logits, sampling, positions)
    tokens = logits.max(dim=-1).indices  # [B, R, V] -> [B, R]
    if not sampling.is_greedy:
        rows = list(sampling.sampled_rows)
        tokens[rows] = _sample_rows(logits[rows], sampling.select(rows), positions[rows])
    return tokens


def propose(
    logits: torch.Tensor, sampling: SamplingBatch, positions: torch.Tensor, target_ids: torch.Tensor
) -> torch.Tensor:
    """The draft's guess of `sample` at one position: argmax(z / T + the noise of the ids it maps to), unfiltered.

    Args:
        logits: [B, Vd], any float dtype.
        sampling: parameters of the B requests.
        positions: [B] int64, absolute position of the token being guessed.
        target_ids: [Vd] int64, target id of each draft id.

    Returns:
        [B] int64 draft indices.
    """
    draft = logits.max(dim=-1).indices  # [B, Vd] -> [B]
    if not sampling.is_greedy:
        rows = list(sampling.sampled_rows)
        noise = gumbel_noise(sampling.seed[rows], sampling.choice[rows], positions[rows][:, None], target_ids)
        scores = logits[rows].float() / sampling.temperature[rows][:, None]
        draft[rows] = (scores + noise[:, 0]).max(dim=-1).indices  # [S, 1, Vd] -> [S, Vd] -> [S]
    return draft


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


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's step and output mix on int64, wrapping."""
    x = x + _STEP64
    x = (x ^ _shift_right(x, 30)) * _MUL64_A
    x = (x ^ _shift_right(x, 27)) * _MUL64_B
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of a signed tensor: torch's own copies the sign bit."""
    return (x >> bits) & ((1 << (x.element_size() * 8 - bits)) - 1)


def _signed32(x: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 values as int32."""
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _premix32(ids: torch.Tensor) -> torch.Tensor:
    """Spread consecutive ids over all 32 bits, once a call and shared by its rows: [V] int32 -> [V] int32."""
    x = (ids ^ _shift_right(ids, 16)) * _MUL32_C
    x = (x ^ _shift_right(x, 15)) * _MUL32_B
    return x ^ _shift_right(x, 16)


def _mix32(ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Keyed bijection of premixed ids, so that two ids of a row never share a value.

    Args: ids [V] int32; low, high [M, 1] int32, the halves of each row's key. Returns: [M, V] int32.
    """
    x = (ids ^ low).mul_(_MUL32_A)
    x.bitwise_xor_(_shift_right(x, 11)).add_(high).mul_(_MUL32_B)
    x.bitwise_xor_(_shift_right(x, 15)).mul_(_MUL32_C)
    return x.bitwise_xor_(_shift_right(x, 14))


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """int32 -> fp32 of the same shape: -log(-log(u)), u the midpoint of one of 2^32 equal cells, never 0 or 1."""
    uniform = bits.double().mul_(2.0**-32).add_(0.5 + 2.0**-33)  # exact
    return uniform.log_().neg_().log_().neg_().float()

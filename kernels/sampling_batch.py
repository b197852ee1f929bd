"""Sampling parameters of the requests in a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


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
    `max_top_k` the largest top-k and `has_top_p` whether any top-p is on; these three are read on the host, by the CPU
    path alone.

    slots: [B] int64: the five tensors have a row a request slot, and that of request b is `slots[b]`; the three host
    facts are then unknown and left out. None: row b is request b's.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    sampled_rows: tuple[int, ...] = ()
    max_top_k: int = 0
    has_top_p: bool = False
    slots: torch.Tensor | None = None

    @property
    def is_greedy(self) -> bool:
        """Every row is greedy, so that sampling is a pure argmax. Meaningful where `slots` is None."""
        return not self.sampled_rows

    @property
    def size(self) -> int:
        return (self.temperature if self.slots is None else self.slots).shape[0]

    def resolved(self) -> "SamplingBatch":
        """The same parameters with row b for request b and the host facts known. Waits for the device."""
        if self.slots is None:
            return self
        temperature, top_k, top_p = self.temperature[self.slots], self.top_k[self.slots], self.top_p[self.slots]
        is_sampled = temperature > 0
        return SamplingBatch(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=self.seed[self.slots],
            choice=self.choice[self.slots],
            sampled_rows=tuple(is_sampled.nonzero()[:, 0].tolist()),
            max_top_k=int(torch.where(is_sampled, top_k, 0).amax()) if len(top_k) else 0,
            has_top_p=bool((is_sampled & (top_p < 1)).any()),
        )

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
        """The parameters of the requests at `rows`, in that order. For a batch without slots."""
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

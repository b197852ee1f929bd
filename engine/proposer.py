"""Who proposes the drafts of a round: the interface, and an oracle for tests and benchmarks."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.kernels.sampling import SamplingBatch


@dataclass(frozen=True)
class DraftBatch:
    """Slots whose target features the draft has not seen yet: R a request, the same R for all, padded.

    Args:
        request_ids: of the B requests.
        token_ids: [B, R] int64, the token that each slot embeds: slot t embeds x_{t+1}.
        features: [B, R, F], captured states of each slot, the proposer's slots side by side.
        positions: [B, R] int64, slot t; -1 marks padding, which stands behind the real slots of its row.
        block_table: [B, blocks] int64.
        sampling: parameters of the B requests.
        committed_lengths: [B] int64, n: draft i (from 0) is for position n + i.
        num_valid: [B] int64, how many drafts the round can use; later ones may be anything.
    """

    request_ids: Sequence[str]
    token_ids: torch.Tensor
    features: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    sampling: SamplingBatch
    committed_lengths: torch.Tensor
    num_valid: torch.Tensor


@dataclass(frozen=True)
class Proposal:
    """tokens: [B, K] int64 target ids. logits: [B, K, Vd], None where the proposer has none."""

    tokens: torch.Tensor
    logits: torch.Tensor | None


class Proposer(Protocol):
    """Proposes K tokens a round.

    `slots` are the states that it reads, in its order; () for none. `max_position` is the longest context that it can
    follow in tokens, None where it has no such bound.
    """

    num_steps: int
    slots: tuple[int, ...]
    max_position: int | None

    def allocate(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        """Makes the proposer's own cache; it shares the target's block tables."""

    def absorb(self, batch: DraftBatch) -> None:
        """Takes in the slots of a prefill chunk."""

    def propose(self, batch: DraftBatch) -> Proposal:
        """Takes in the newly committed slots, then proposes."""


class OracleProposer:
    """Replays recorded answers, each round's drafts wrong from a chosen step on, so that any accepted count can occur.

    Args:
        num_steps: K.
        recordings: request id -> prompt and answer of a K = 0 run.
        vocab_size: wrong tokens stay below it.
        joint_acceptance: A_1..A_K, the share of rounds whose first k drafts shall all be right. The default makes
            every accepted count 0..K equally likely.
        seed: of the draws; a draw depends on it, the request and the position alone.
        inner: a real proposer that runs too and whose tokens are thrown away, so that a round costs what it would.
    """

    def __init__(
        self,
        num_steps: int,
        recordings: Mapping[str, Sequence[int]],
        vocab_size: int,
        joint_acceptance: Sequence[float] | None = None,
        seed: int = 0,
        inner: Proposer | None = None,
    ) -> None:
        self.num_steps, self.slots = num_steps, inner.slots if inner else ()
        self.max_position = inner.max_position if inner else None
        self.recordings, self.vocab_size, self.seed, self.inner = recordings, vocab_size, seed, inner
        if joint_acceptance is None:
            joint_acceptance = [1 - k / (num_steps + 1) for k in range(1, num_steps + 1)]
        falls = all(a >= b for a, b in zip([1.0, *joint_acceptance], [*joint_acceptance, 0.0], strict=True))
        if len(joint_acceptance) != num_steps or not falls:
            raise ValueError(f"joint_acceptance {joint_acceptance} must be {num_steps} falling numbers in 0..1")
        self.joint_acceptance = list(joint_acceptance)

    def allocate(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        if self.inner:
            self.inner.allocate(num_blocks, block_size, dtype)

    def absorb(self, batch: DraftBatch) -> None:
        if self.inner:
            self.inner.absorb(batch)

    def propose(self, batch: DraftBatch) -> Proposal:
        logits = self.inner.propose(batch).logits if self.inner else None
        rows = [self._row(i, n) for i, n in zip(batch.request_ids, batch.committed_lengths.tolist(), strict=True)]
        return Proposal(torch.tensor(rows, device=batch.token_ids.device), logits)

    def _row(self, request_id: str, length: int) -> list[int]:
        draw = random.Random(f"{self.seed}/{request_id}/{length}").random()
        right = sum(draw < a for a in self.joint_acceptance)
        tokens = list(self.recordings[request_id][length : length + self.num_steps])
        tokens += [0] * (self.num_steps - len(tokens))  # beyond the recording's end nothing is committed
        if right < self.num_steps:
            tokens[right] = (tokens[right] + 1) % self.vocab_size
        return tokens

"""Who proposes the drafts of a round: the interface, and an oracle for tests and benchmarks."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.tensor_parallel import SplitVocabulary
from slipstream.kernels.sampling import SamplingBatch


@dataclass(frozen=True)
class DraftBatch:
    """Slots whose target features the draft has not seen yet: R a request, the same R for all, padded.

    Args:
        slots: [B] int64, rows of the request table; the last row of the table is nobody's, for padding.
        token_ids: [B, R] int64, the token that each slot embeds: slot t embeds x_{t+1}.
        features: [B, R, F], captured states of each slot, the proposer's slots side by side.
        positions: [B, R] int64, slot t; -1 marks padding, which stands behind the real slots of its row.
        block_table: [B, blocks] int64.
        sampling: parameters of the B requests.

    Of a round, None while a prompt is taken in:
        committed_lengths: [B] int64, n: draft i (from 0) is for position n + i.
        num_valid: [B] int64, how many drafts the request has room for, at most `num_steps`; later ones may be anything.
        last_row: [B] int64, column of each request's last real slot.
        chain_positions: [K, B] int64, the position of each step's row; -1: the round cannot use the step. K: as many
            as this round proposes, 0 to `num_steps`.
        all_positions: [B * R + K * B] int64, `positions`, then those of every step (K of the engine).
        write_index: as `all_positions`, the cell of each in the proposer's cache.
    """

    slots: torch.Tensor
    token_ids: torch.Tensor
    features: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    sampling: SamplingBatch
    committed_lengths: torch.Tensor | None = None
    num_valid: torch.Tensor | None = None
    last_row: torch.Tensor | None = None
    chain_positions: torch.Tensor | None = None
    all_positions: torch.Tensor | None = None
    write_index: torch.Tensor | None = None


@dataclass(frozen=True)
class Proposal:
    """What was proposed.

    tokens: [B, K] int64 target ids. logits: K x [B, Vd], one a step, or this rank's columns, as `vocabulary` has it;
    both None where the proposer has none.
    """

    tokens: torch.Tensor
    logits: tuple[torch.Tensor, ...] | None
    vocabulary: SplitVocabulary | None = None

    def whole(self) -> "Proposal":
        """The same with logits of the whole draft vocabulary. All ranks call it."""
        if self.logits is None or self.vocabulary is None:
            return self
        return Proposal(self.tokens, tuple(self.vocabulary.whole(one) for one in self.logits))


class Proposer(Protocol):
    """Proposes up to `num_steps` tokens a round.

    `slots` are the states that it reads, in its order; () for none. `max_position` is the longest context that it can
    follow in tokens, None where it has no such bound.
    """

    num_steps: int
    slots: tuple[int, ...]
    max_position: int | None

    def allocate(self, config: EngineConfig, dtype: torch.dtype) -> None:
        """Makes the proposer's own cache, which shares the target's block tables, and what else it keeps by slot."""

    def begin(self, slot: int, request_id: str) -> None:
        """A request moves into row `slot` of the request table."""

    def absorb(self, batch: DraftBatch) -> None:
        """Takes in the slots of a prefill chunk."""

    def propose(self, batch: DraftBatch) -> Proposal:
        """Takes in the newly committed slots, then proposes."""


class OracleProposer:
    """Replays recorded answers, each round's drafts wrong from a chosen step on, so that any accepted count can occur.

    What it will propose at any length is worked out when a request moves in, and lies on the device: a round looks it
    up, and can be captured.

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
        self.drafts: torch.Tensor | None = None  # [S + 1, max_context_tokens, K], by slot and committed tokens

    def allocate(self, config: EngineConfig, dtype: torch.dtype) -> None:
        if self.inner:
            self.inner.allocate(config, dtype)
        shape = (config.max_running_requests + 1, config.max_context_tokens, self.num_steps)
        self.drafts = torch.zeros(shape, dtype=torch.int64, device=config.device)

    def begin(self, slot: int, request_id: str) -> None:
        assert self.drafts is not None, "allocate comes first"
        if self.inner:
            self.inner.begin(slot, request_id)
        length = min(len(self.recordings[request_id]), self.drafts.shape[1])
        rows = torch.tensor([self._row(request_id, n) for n in range(length)])  # [T, K]
        self.drafts[slot, :length] = rows.to(self.drafts.device)

    def absorb(self, batch: DraftBatch) -> None:
        if self.inner:
            self.inner.absorb(batch)

    def propose(self, batch: DraftBatch) -> Proposal:
        inner = self.inner.propose(batch) if self.inner else None
        assert self.drafts is not None, "allocate comes first"
        assert batch.committed_lengths is not None
        lengths = batch.committed_lengths.clamp(max=self.drafts.shape[1] - 1)  # a full request has no next round
        assert batch.chain_positions is not None
        drafts = self.drafts[batch.slots, lengths, : len(batch.chain_positions)]  # [B, K]
        return Proposal(drafts, inner.logits, inner.vocabulary) if inner else Proposal(drafts, None)

    def _draw(self, request_id: str, length: int) -> float:
        return random.Random(f"{self.seed}/{request_id}/{length}").random()

    def _row(self, request_id: str, length: int) -> list[int]:
        draw = self._draw(request_id, length)
        right = sum(draw < a for a in self.joint_acceptance)
        tokens = list(self.recordings[request_id][length : length + self.num_steps])
        tokens += [0] * (self.num_steps - len(tokens))  # beyond the recording's end nothing is committed
        if right < self.num_steps:
            tokens[right] = (tokens[right] + 1) % self.vocab_size
        return tokens

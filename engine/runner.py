"""The step functions: one prefill chunk, and one round for every K. Both work on tensors alone.

A round, for requests with n committed tokens (the last of them, the root x_{n-1}, is not in the target's cache yet):

    draft    takes in the newly committed slots, proposes d_1 .. d_K for positions n .. n + K - 1
    verify   the target runs the rows x_{n-1}, d_1, .., d_K at positions n - 1 .. n - 1 + K
    accept   y_i = the target's token at position n + i; the leading drafts with d_{i+1} == y_i stand
    commit   y_0 .. y_a: a accepted drafts and the target's own token behind them

K = 0 is the same function without a draft.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from slipstream.engine.capture import CapturePlan, slot_name
from slipstream.engine.config import EngineConfig
from slipstream.engine.models import TargetModel, TargetOutput
from slipstream.engine.proposer import DraftBatch, Proposal, Proposer
from slipstream.engine.request_table import RequestTable
from slipstream.kernels.accept import accept
from slipstream.kernels.sampling import SamplingBatch, sample


@dataclass(frozen=True)
class PrefillResult:
    """last [1, R, h]: slot N; states: slot name -> [1, R, h]; logits [1, 1, V], token [1, 1]: of the last row."""

    last: torch.Tensor
    states: Mapping[str, torch.Tensor]
    logits: torch.Tensor | None = None
    token: torch.Tensor | None = None


@dataclass(frozen=True)
class RoundResult:
    """What a round gave the B requests in it.

    Args:
        start: [B] int64, committed tokens before the round.
        tokens: [B, K + 1] int64, the target's own tokens; the first accepted + 1 of a row are committed.
        accepted: [B] int64.
        num_valid: [B] int64, drafts that could be used.
        proposal: the drafts, None at K = 0.
        last: [B, K + 1, h], slot N; states: slot name -> [B, K + 1, h]; logits: [B, K + 1, V].
    """

    start: torch.Tensor
    tokens: torch.Tensor
    accepted: torch.Tensor
    num_valid: torch.Tensor
    proposal: Proposal | None
    last: torch.Tensor
    states: Mapping[str, torch.Tensor]
    logits: torch.Tensor


@dataclass
class PhaseSeconds:
    """Wall seconds so far: in prefill, and in the draft and verify parts of rounds."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0


class Runner:
    """Owner of the caches and of the request table.

    Args:
        target: a loaded target.
        config: sizes.
        proposer: None exactly at K = 0.
        capture_slots: slots to hand out, beside those that the proposer reads.
    """

    def __init__(
        self, target: TargetModel, config: EngineConfig, proposer: Proposer | None, capture_slots: tuple[int, ...] = ()
    ) -> None:
        self.target, self.config, self.proposer = target, config, proposer
        num_layers, hidden = target.config.num_layers, target.config.hidden_size
        self.feature_plan = CapturePlan(proposer.slots if proposer else (), num_layers)
        self.capture = CapturePlan(tuple(dict.fromkeys(self.feature_plan.slots + capture_slots)), num_layers).slots
        self.cache = target.allocate_kv(config.total_blocks, config.block_size_tokens)
        dtype = self.cache.layers[0].dtype
        if proposer:
            proposer.allocate(config.total_blocks, config.block_size_tokens, dtype)
        self.table = RequestTable(
            config.max_running_requests,
            config.max_context_tokens,
            config.blocks_per_request,
            config.num_steps,
            len(self.feature_plan.slots) * hidden,
            dtype,
            self.cache.layers[0].device,
        )
        self.seconds = PhaseSeconds()

    @torch.inference_mode()
    def forward_prompt(self, slot: int, start: int, end: int) -> TargetOutput:
        """Brings positions start..end-1 of the prompt at `slot` into the target's cache: states [1, end - start, h]."""
        positions = torch.arange(start, end, device=self.table.tokens.device)[None]  # [1, R]
        token_ids = self.table.tokens[slot, start:end][None]  # [R] -> [1, R]
        kv = self.cache.view(self.table.block_table[slot : slot + 1])
        return self.target(token_ids, positions, kv, self.capture)

    @torch.inference_mode()
    def prefill(self, slot: int, start: int, end: int, sampling: SamplingBatch, request_id: str) -> PrefillResult:
        """Runs positions start..end-1 of a prompt; with its last position, also commits the first new token.

        The draft takes in every slot but the prompt's last: that one embeds the first new token, so the first round
        takes it in.
        """
        began = time.perf_counter()
        table = self.table
        is_last = end == int(table.lengths[slot])
        positions = torch.arange(start, end, device=table.tokens.device)[None]  # [1, R]
        out = self.forward_prompt(slot, start, end)
        if self.proposer:
            features = self._features(out.states, out.last)  # [1, R, F]
            rows = end - start - is_last
            if rows:
                lengths = table.lengths[slot : slot + 1]
                batch = DraftBatch(
                    [request_id],
                    table.tokens[slot, start + 1 : start + 1 + rows][None],  # slot t embeds x_{t+1}
                    features[:, :rows],
                    positions[:, :rows],
                    table.block_table[slot : slot + 1],
                    sampling,
                    lengths,
                    torch.zeros_like(lengths),
                )
                self.proposer.absorb(batch)
            if is_last:
                table.features[slot, 0] = features[0, -1]
                table.num_fresh[slot] = 1
        logits = token = None
        if is_last:
            logits = self.target.logits(out.last[:, -1:])  # [1, 1, h] -> [1, 1, V]
            token = sample(logits, sampling, positions[:, -1:] + 1)  # [1, 1]
            slots = torch.tensor([slot], device=token.device)
            table.commit(slots, token, torch.ones_like(slots))
        self.seconds.prefill += time.perf_counter() - began
        return PrefillResult(out.last, out.states, logits, token)

    @torch.inference_mode()
    def round(self, slots: torch.Tensor, sampling: SamplingBatch, request_ids: Sequence[str]) -> RoundResult:
        """One round of the requests at `slots` [B] int64, whose parameters and ids are given in the same order."""
        began = time.perf_counter()
        table, num_steps = self.table, self.config.num_steps
        start = table.lengths[slots]  # [B]
        num_valid = (table.limits[slots] - start - 1).clamp(0, num_steps)  # the bonus token needs room too
        block_table = table.block_table[slots]  # [B, blocks]
        token_ids = table.tokens[slots, start - 1][:, None]  # [B, 1], the root
        proposal = None
        if self.proposer and num_steps:
            batch = self._draft_batch(slots, start, num_valid, block_table, sampling, request_ids)
            proposal = self.proposer.propose(batch)
            token_ids = torch.cat((token_ids, proposal.tokens), dim=1)  # [B, K + 1]
        drafted = time.perf_counter()
        rows = start[:, None] - 1 + table.offsets  # [B, K + 1]
        positions = torch.where(table.offsets <= num_valid[:, None], rows, -1)
        out = self.target(token_ids, positions, self.cache.view(block_table), self.capture)
        logits = self.target.logits(out.last)  # [B, K + 1, h] -> [B, K + 1, V]
        verified = time.perf_counter()
        tokens = sample(logits, sampling, rows + 1)  # [B, K + 1]
        accepted = accept(token_ids[:, 1:], tokens, num_valid)  # [B]
        table.commit(slots, tokens, accepted + 1)
        if self.proposer:
            table.features[slots] = self._features(out.states, out.last)
            table.num_fresh[slots] = accepted + 1
        self.seconds.draft += drafted - began
        self.seconds.verify += verified - drafted
        return RoundResult(start, tokens, accepted, num_valid, proposal, out.last, out.states, logits)

    def _draft_batch(
        self,
        slots: torch.Tensor,
        start: torch.Tensor,
        num_valid: torch.Tensor,
        block_table: torch.Tensor,
        sampling: SamplingBatch,
        request_ids: Sequence[str],
    ) -> DraftBatch:
        """The slots that became known since the draft last ran: n - 1 - fresh .. n - 2, as [B, K + 1] padded rows."""
        table = self.table
        fresh = table.num_fresh[slots, None]  # [B, 1]
        slot_positions = start[:, None] - 1 - fresh + table.offsets  # [B, K + 1]
        token_ids = table.tokens[slots[:, None], slot_positions + 1]  # slot t embeds x_{t+1}
        positions = torch.where(table.offsets < fresh, slot_positions, -1)
        return DraftBatch(
            request_ids, token_ids, table.features[slots], positions, block_table, sampling, start, num_valid
        )

    def _features(self, states: Mapping[str, torch.Tensor], last: torch.Tensor) -> torch.Tensor:
        """What the draft reads of each row: [B, R, F], F = 0 for a proposer that reads nothing."""
        if not self.feature_plan.slots:
            return last[..., :0]
        return self.feature_plan.select(states)


@torch.inference_mode()
def capture_states(
    target: TargetModel, token_ids: Sequence[int], slots: tuple[int, ...], prefill_chunk_tokens: int = 256
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """States of one token sequence, from the very prefill that serving runs.

    Args:
        target: a loaded target.
        token_ids: T ids.
        slots: which states to hand out.
        prefill_chunk_tokens: rows a forward pass.

    Returns:
        (slot name -> [T, h], teacher [T, h]: slot N before the final norm).
    """
    length = len(token_ids)
    config = EngineConfig(
        max_running_requests=1, max_context_tokens=length + 1, prefill_chunk_tokens=prefill_chunk_tokens
    )
    runner = Runner(target, config, None, slots)
    runner.table.occupy(0, list(token_ids), length + 1, list(range(1, config.total_blocks)))
    chunks = [
        runner.forward_prompt(0, start, min(start + prefill_chunk_tokens, length))
        for start in range(0, length, prefill_chunk_tokens)
    ]
    states = {slot_name(s): torch.cat([c.states[slot_name(s)][0] for c in chunks]) for s in slots}  # [T, h]
    return states, torch.cat([c.last[0] for c in chunks])  # chunks x [1, R, h] -> [T, h]

"""The step functions: one prefill chunk, and one round for every K. Both work on tensors alone.

A round, for requests with n committed tokens (the last of them, the root x_{n-1}, is not in the target's cache yet):

    draft    takes in the newly committed slots, proposes d_1 .. d_K for positions n .. n + K - 1
    verify   the target runs the rows x_{n-1}, d_1, .., d_K at positions n - 1 .. n - 1 + K
    accept   y_i = the target's token at position n + i; the leading drafts with d_{i+1} == y_i stand
    commit   y_0 .. y_a: a accepted drafts and the target's own token behind them

K = 0 is the same function without a draft.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from slipstream.engine.capture import CapturePlan, slot_name
from slipstream.engine.config import MAX_ROUNDS_IN_FLIGHT, EngineConfig
from slipstream.engine.kv_room import allocate_caches
from slipstream.engine.models import TargetModel, TargetOutput
from slipstream.engine.proposer import DraftBatch, Proposal, Proposer
from slipstream.engine.request_table import Occupant, RequestTable
from slipstream.engine.sequence import Sequence as Running
from slipstream.kernels.round_ops import Paging, commit_first, commit_round, draft_rows, verify_rows
from slipstream.kernels.round_ring import RoundRing
from slipstream.kernels.row_copies import select_last, store_features
from slipstream.kernels.sampling import sample

# Entries of the ring: more than there can be launches out, as a step launches a chunk and a round.
RING_DEPTH = 2 * MAX_ROUNDS_IN_FLIGHT + 4


@dataclass(frozen=True)
class PrefillResult:
    """Of C requests, a chunk each.

    last [C, R, h]: slot N; states: slot name -> [C, R, h]; logits [C, 1, V] (of several ranks: as
    `RoundResult`'s), token [C, 1]: of each chunk's last row.
    """

    last: torch.Tensor
    states: Mapping[str, torch.Tensor]
    logits: torch.Tensor
    token: torch.Tensor


@dataclass(frozen=True)
class RoundResult:
    """What a round gave the B requests in it.

    Args:
        start: [B] int64, committed tokens before the round.
        tokens: [B, K + 1] int64, the target's own tokens; the first accepted + 1 of a row are committed.
        accepted: [B] int64.
        num_valid: [B] int64, drafts that could be used.
        proposal: the drafts, None at K = 0.
        last: [B, K + 1, h], slot N; states: slot name -> [B, K + 1, h].
        logits: [B, K + 1, V]; of several ranks this one's columns, where the target's `vocabulary` has a part.
    """

    start: torch.Tensor
    tokens: torch.Tensor
    accepted: torch.Tensor
    num_valid: torch.Tensor
    proposal: Proposal | None
    last: torch.Tensor
    states: Mapping[str, torch.Tensor]
    logits: torch.Tensor


class Runner:
    """Owner of the caches, of the request table and of the ring that results come back through.

    Args:
        target: a loaded target.
        config: sizes.
        proposer: None exactly at K = 0.
        capture_slots: slots to hand out, beside those that the proposer reads.

    `round` and `prefill` are code for the device alone: on CUDA tensors they neither wait for it nor have shapes that
    depend on values, so that they can be captured. Raises SlipstreamError where the caches do not fit on the card.
    """

    def __init__(
        self, target: TargetModel, config: EngineConfig, proposer: Proposer | None, capture_slots: tuple[int, ...] = ()
    ) -> None:
        self.target, self.config, self.proposer = target, config, proposer
        num_layers, hidden = target.config.num_layers, target.config.hidden_size
        self.feature_plan = CapturePlan(proposer.slots if proposer else (), num_layers)
        self.capture = CapturePlan(tuple(dict.fromkeys(self.feature_plan.slots + capture_slots)), num_layers).slots
        self.cache = allocate_caches(target, config, proposer)
        dtype, self.device = self.cache.layers[0].dtype, self.cache.layers[0].device
        self.table = RequestTable(
            config.max_running_requests,
            config.max_context_tokens,
            config.blocks_per_request,
            config.num_steps,
            len(self.feature_plan.slots) * hidden,
            dtype,
            self.device,
        )
        self.ring = RoundRing.allocate(RING_DEPTH, config.max_running_requests, config.num_steps, self.device)
        self.row_offsets = torch.arange(config.row_buckets[-1], device=self.device)  # 0.., the rows of a chunk

    def occupy(self, sequences: Sequence[Running]) -> None:
        """Admitted requests move into their slots."""
        self.table.occupy([Occupant.of(sequence) for sequence in sequences])
        if self.proposer:
            for sequence in sequences:
                self.proposer.begin(sequence.slot, sequence.request.request_id)

    @torch.inference_mode()
    def forward_prompt(self, slots: torch.Tensor, positions: torch.Tensor) -> TargetOutput:
        """Brings positions [C, R] (-1: padding) of the prompts at `slots` [C] into the cache: states [C, R, h]."""
        table = self.table
        token_ids = table.tokens[slots[:, None], positions.clamp(min=0)]  # [C, R]
        kv = self.cache.view(table.block_table[slots], prefill=True)
        return self.target(token_ids, positions, kv, self.capture)

    @torch.inference_mode()
    def prefill(self, chunks: torch.Tensor, num_rows: int) -> PrefillResult:
        """Runs one chunk of each of C prompts; with a prompt's last position, also commits its first new token.

        The draft takes in every slot but the prompt's last: that one embeds the first new token, so the first round
        takes it in.

        Args:
            chunks: [C, 4] int64: request slot, first position, rows, and whether the prompt ends with it (1 or 0). The
                table's dummy slot stands for nobody.
            num_rows: rows that are run of each (R); those behind a chunk's own are padding.
        """
        table = self.table
        slots, start, rows, is_last = chunks.T.contiguous().unbind()  # [C, 4] -> 4 x [C]
        offsets = self.row_offsets[:num_rows]
        positions = torch.where(offsets < rows[:, None], start[:, None] + offsets, -1)  # [R], [C] -> [C, R]
        out = self.forward_prompt(slots, positions)
        if self.proposer and self.feature_plan.slots:
            names = self.feature_plan.names
            store_features([out.states[n].flatten(0, 1) for n in names], table.features, slots, rows - 1)
        if self.proposer:
            absorbed = torch.where(offsets < (rows - is_last)[:, None], positions, -1)  # [C, R]
            self.proposer.absorb(
                DraftBatch(
                    slots,
                    table.tokens[slots[:, None], absorbed + 1],  # slot t embeds x_{t+1}
                    self._features(out),
                    absorbed,
                    table.block_table[slots],
                    table.sampling(slots),
                )
            )
        last = select_last(out.last, rows - 1)[:, None]  # [C, R, h] -> [C, 1, h]
        logits = self.target.own_logits(last)  # [C, 1, V], or this rank's columns
        part = self.target.vocabulary.part
        token = sample(logits, table.sampling(slots), (start + rows)[:, None], part=part)  # [C, 1]
        commit_first(table, slots, token, is_last, self.ring)
        return PrefillResult(out.last, out.states, logits, token)

    @torch.inference_mode()
    def round(self, slots: torch.Tensor, num_steps: int | None = None) -> RoundResult:
        """One round of the requests at `slots` [B] int64; the table's dummy slot stands for nobody.

        num_steps: K of this round, at most the engine's, which it is when left out. Another round may have another K:
        the draft takes in as many slots as a round can have committed, also where it then proposes nothing.
        """
        table, longest, clock = self.table, self.config.num_steps, self.ring.clock
        num_steps = longest if num_steps is None else num_steps
        sampling, proposal = table.sampling(slots), None
        if self.proposer:
            block_size = self.cache.block_size
            drafted = draft_rows(table, slots, longest, clock, table.block_table, table.features, block_size)
            assert drafted.features is not None
            assert drafted.block_table is not None
            proposal = self.proposer.propose(
                DraftBatch(
                    slots,
                    drafted.token_ids,
                    drafted.features,  # [B, R, F], R = 1 + the engine's K
                    drafted.positions,
                    drafted.block_table,  # [B, blocks]
                    sampling,
                    drafted.start,
                    drafted.num_valid,
                    drafted.last_row,
                    drafted.chain_positions[:num_steps],
                    drafted.all_positions,
                    drafted.write_index,
                )
            )
        proposal = proposal if num_steps else None
        drafts = None if proposal is None else proposal.tokens
        paging, drafted_before = Paging(table.block_table, self.cache.block_size), self.proposer is not None
        rows = verify_rows(table, slots, drafts, num_steps, clock, paging, starts_round=not drafted_before)
        assert rows.block_table is not None
        kv = self.cache.view(rows.block_table, write_index=rows.write_index)
        out = self.target(rows.token_ids, rows.positions, kv, self.capture)
        logits = self.target.own_logits(out.last)  # [B, K + 1, h] -> [B, K + 1, V], or this rank's columns
        part = self.target.vocabulary.part
        tokens = sample(logits, sampling, rows.positions, 1, part)  # [B, K + 1], each for the position behind its row
        committed = commit_round(table, slots, rows, tokens, self.ring)
        if self.feature_plan.slots:
            names = self.feature_plan.names
            store_features([out.states[n].flatten(0, 1) for n in names], table.features, slots)
        return RoundResult(
            rows.start, tokens, committed.accepted, rows.num_valid, proposal, out.last, out.states, logits
        )

    def _features(self, out: TargetOutput) -> torch.Tensor:
        """What the draft reads of each row: [B, R, F], F = 0 for a proposer that reads nothing."""
        if not self.feature_plan.slots:
            return out.last[..., :0]
        return self.feature_plan.select(out.states)


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
    runner.table.occupy([Occupant(0, list(token_ids), length + 1, list(range(1, config.total_blocks)))])
    slot, positions = torch.tensor([0], device=runner.device), torch.arange(length, device=runner.device)
    chunks = [runner.forward_prompt(slot, part[None]) for part in positions.split(prefill_chunk_tokens)]
    states = {slot_name(s): torch.cat([c.states[slot_name(s)][0] for c in chunks]) for s in slots}  # [T, h]
    return states, torch.cat([c.last[0] for c in chunks])  # chunks x [1, R, h] -> [T, h]

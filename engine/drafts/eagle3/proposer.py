"""EAGLE-3 as a proposer: the draft network over its own paged cache.

Cache cell t holds the key of slot t. For slots behind the last committed token it was made from the target's feature,
as at step 1 of training; the cells after it hold the current chain's own states (step k of slot t: cell and rope
position t + k - 1), which the next round's committed slots overwrite. So a step sees what training's attention sees:
step-1 keys of every earlier slot, and its own later steps.
"""

from dataclasses import dataclass

import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.proposer import DraftBatch, Proposal
from slipstream.kernels.row_copies import select_last
from slipstream.kernels.sampling import propose_tokens


@dataclass(frozen=True)
class _Places:
    """Of M rows: cos and sin of their positions, [M, d] each, and their cells in the cache, [M] int64."""

    angles: tuple[torch.Tensor, torch.Tensor]
    write_index: torch.Tensor


class Eagle3Proposer:
    """Proposes chains of K tokens.

    Args:
        network: a loaded draft.
        num_steps: the largest K, 1 or more.
    """

    def __init__(self, network: Eagle3Network, num_steps: int) -> None:
        self.network, self.num_steps = network, num_steps
        network.prepare()
        self.slots = network.config.slots
        self.max_position: int | None = network.config.max_position
        draft_ids = torch.arange(network.config.draft_vocab_size, device=network.d2t.device)
        self.target_ids = network.to_target(draft_ids)  # [Vd] target id of each draft id
        self.cache: KVCache | None = None

    def allocate(self, config: EngineConfig, dtype: torch.dtype) -> None:
        """Makes the draft's cache, under the block numbers of the target's."""
        cell, device = self.network.midlayer.self_attn.cell, self.network.d2t.device
        self.cache = KVCache(1, config.total_blocks, config.block_size_tokens, cell, dtype, device)

    def begin(self, slot: int, request_id: str) -> None:
        """Nothing: what an earlier request left in the cache is overwritten before it is read."""

    @torch.inference_mode()
    def absorb(self, batch: DraftBatch) -> None:
        """Writes the keys of a prefill chunk's slots."""
        g = self.network.fuse(batch.features)
        self._forward(batch.token_ids, g, batch.positions, batch.block_table, prefill=True)

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> Proposal:
        """Step 1 over every newly committed slot with the target's features, then K - 1 steps on the last state.

        K: of the batch's `chain_positions`; at 0 the newly committed slots are taken in, and that is all.
        """
        assert batch.committed_lengths is not None
        assert batch.last_row is not None
        assert batch.chain_positions is not None
        assert batch.all_positions is not None
        assert batch.write_index is not None
        # Angles and cells of all steps' rows at once: nothing small stands between a step's token and its layer then.
        angles = self.network.rotary(batch.all_positions, batch.features.dtype)  # 2 x [B * R + K * B, d]
        size, first = len(batch.slots), batch.positions.numel()

        def places(begin: int, rows: int) -> _Places:
            part = slice(begin, begin + rows)
            return _Places((angles[0][part], angles[1][part]), batch.write_index[part])  # type: ignore[index]

        g = self.network.fuse(batch.features)  # [B, R, F] -> [B, R, h]
        at = places(0, first)
        states = self._forward(batch.token_ids, g, batch.positions, batch.block_table, at)  # [B, R, h]
        state, num_steps = select_last(states, batch.last_row), len(batch.chain_positions)  # [B, h]
        drafts = torch.empty(len(state), num_steps, dtype=torch.int64, device=state.device)  # [B, K]
        logits: list[torch.Tensor] = []  # K of them
        for step in range(1, num_steps + 1):
            if step > 1:
                positions = batch.chain_positions[step - 1][:, None]  # [B] -> [B, 1]
                g = self.network.feedback(state)[:, None]  # [B, h] -> [B, 1, h]
                before = drafts[:, step - 2 : step - 1]  # [B, K] -> [B, 1]
                at = places(first + (step - 1) * size, size)
                state = self._forward(before, g, positions, batch.block_table, at)[:, 0]  # [B, 1, h] -> [B, h]
            logits.append(self.network.own_logits(state))  # [B, Vd], or this rank's
            column, start, part = drafts[:, step - 1], batch.committed_lengths, self.network.vocabulary.part
            propose_tokens(logits[-1], batch.sampling, start, self.target_ids, step - 1, column, part)
        return Proposal(drafts, tuple(logits), self.network.vocabulary)

    def _forward(
        self,
        token_ids: torch.Tensor,
        g: torch.Tensor,
        positions: torch.Tensor,
        block_table: torch.Tensor,
        at: "_Places | None" = None,
        prefill: bool = False,
    ) -> torch.Tensor:
        """token_ids, positions [B, R], g [B, R, h] -> states [B, R, h]; keys and values go to the cache."""
        assert self.cache is not None, "allocate comes first"
        write_index, angles = (None, None) if at is None else (at.write_index, at.angles)
        rows = self.cache.view(block_table, prefill, write_index).rows(positions)
        attend = self.network.midlayer.self_attn.paged(self.cache.layers[0], rows)
        return self.network(token_ids, g, positions, attend, angles)

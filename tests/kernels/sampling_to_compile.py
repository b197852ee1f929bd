"""The launches of sampling and of the round ops that are compiled without a card."""

import torch

from slipstream.kernels.gpu import commit, round_ops, row_copies, sampling
from slipstream.kernels.round_ops import Paging
from slipstream.kernels.round_ring import RoundRing
from slipstream.kernels.sampling_batch import SamplingBatch


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def parameters(rows: int, slots: torch.Tensor | None) -> SamplingBatch:
    temperature, top_p = empty(rows, dtype=torch.float32), empty(rows, dtype=torch.float64)
    return SamplingBatch(temperature, empty(rows), top_p, empty(rows), empty(rows), slots=slots)


def samplers() -> None:
    for batch, vocab, dtype, has_slots in (
        (16, 163840, torch.bfloat16, True),
        (1, 3001, torch.float32, False),
    ):
        batch_parameters = parameters(batch, empty(batch) if has_slots else None)
        logits, positions = empty(batch, 4, vocab, dtype=dtype), empty(batch, 4)
        sampling.sample(logits, batch_parameters, positions, 1)
        drafts = empty(batch, 3)
        sampling.propose_tokens(logits[:, 0], batch_parameters, positions[:, 0], empty(vocab), 2, drafts[:, 1])


class Table:
    def __init__(self) -> None:
        self.tokens, self.lengths, self.limits, self.num_fresh = empty(65, 2056), empty(65), empty(65), empty(65)


def rounds() -> None:
    table, blocks = Table(), empty(65, 128)
    for batch in (1, 64):
        for num_steps in (0, 3):
            slots, ring = empty(batch), RoundRing(empty(4, 64, 13), empty(4, 3), empty(4), empty(1), empty(2))
            features = empty(65, num_steps + 1, 3 * 576, dtype=torch.bfloat16)
            round_ops.draft_rows(table, slots, num_steps, ring.clock, blocks, features, 16)
            drafts = empty(batch, num_steps) if num_steps else None
            rows = round_ops.verify_rows(table, slots, drafts, num_steps, ring.clock, Paging(blocks, 16))
            chosen = empty(batch, num_steps + 1)
            commit.commit(table, slots, rows.token_ids, rows.start, rows.num_valid, chosen, None, ring)
            commit.commit(table, slots, rows.token_ids, rows.start, rows.num_valid, chosen, None, None)
        commit.commit(table, slots, None, None, None, empty(batch, 1), empty(batch), ring)
    states = [empty(16, 576, dtype=torch.bfloat16) for _ in range(5)]
    slots = empty(4)
    row_copies.select_last(states[0].view(4, 4, 576), slots)
    for n, last in ((1, None), (3, slots), (5, None)):
        row_copies.store_features(states[:n], empty(65, 4, n * 576, dtype=torch.bfloat16), slots, last)

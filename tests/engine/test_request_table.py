"""What a request's row of the table holds, and that rows do not touch each other."""

import pytest
import torch

from slipstream.engine.block_manager import DUMMY_BLOCK
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.request_table import Occupant, RequestTable
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.sampling import SamplingBatch, sample


def make_table() -> RequestTable:
    return RequestTable(3, 10, 4, 2, 6, torch.float32, "cpu")


def test_a_row_holds_what_the_request_brought() -> None:
    table = make_table()
    before = table.tokens.clone(), table.block_table.clone()
    params = SamplingParams(temperature=0.7, top_k=2**63 - 1, top_p=0.3, seed=-(2**63))
    table.num_fresh[1] = 2  # of the request before
    table.occupy([Occupant(1, [5, 6, 7], 9, [3, 1], params, choice=4)])
    assert (table.lengths.tolist(), table.limits.tolist()) == ([0, 3, 0, 0], [0, 9, 0, 0])
    assert table.num_fresh.tolist() == [0, 0, 0, 0]
    assert table.block_table[1].tolist() == [3, 1, DUMMY_BLOCK, DUMMY_BLOCK]
    assert table.tokens[1, :3].tolist() == [5, 6, 7]
    others = [0, 2, 3]
    assert torch.equal(table.tokens[others], before[0][others])
    assert torch.equal(table.block_table[others], before[1][others])
    got, want = table.sampling(torch.tensor([1, 3])).resolved(), SamplingBatch.from_params([params], [4])
    for name in ("temperature", "top_k", "top_p", "seed", "choice"):
        assert torch.equal(getattr(got, name)[:1], getattr(want, name)), name
    assert got.sampled_rows == (0,)  # the dummy row is greedy
    assert (got.max_top_k, got.has_top_p) == (2**63 - 1, True)


def test_requests_that_move_in_together_are_what_each_would_be_alone() -> None:
    params = SamplingParams(temperature=0.7, top_k=3, top_p=0.3, seed=9)
    several = [
        Occupant(2, [5, 6, 7, 8, 9], 9, [3, 1], params, choice=4),
        Occupant(0, [4], 5, [2, 5, 6, 7]),
        Occupant(1, [8, 3], 7, [4], SamplingParams(seed=3)),
    ]
    together, apart = make_table(), make_table()
    together.occupy(several)
    for one in several:
        apart.occupy([one])
    for name in ("tokens", "lengths", "limits", "num_fresh", "block_table"):
        assert torch.equal(getattr(together, name), getattr(apart, name)), name
    for name in ("temperature", "top_k", "top_p", "seed", "choice"):
        assert torch.equal(getattr(together, name), getattr(apart, name)), name
    assert together.tokens[2, :5].tolist() == [5, 6, 7, 8, 9]
    assert together.lengths.tolist() == [1, 2, 5, 0]


def test_a_cleared_row_points_at_nothing() -> None:
    table = make_table()
    table.occupy([Occupant(0, [1, 2], 8, [1, 2, 3, 4]), Occupant(2, [3, 4], 8, [5, 6])])
    table.clear([0])
    assert (table.lengths.tolist(), table.limits.tolist()) == ([0, 0, 2, 0], [0, 0, 8, 0])
    assert table.block_table[0].tolist() == [DUMMY_BLOCK] * 4
    assert table.block_table[2].tolist() == [5, 6, DUMMY_BLOCK, DUMMY_BLOCK]


def test_sampling_by_slot_is_sampling_by_row() -> None:
    table = make_table()
    params = [
        SamplingParams(temperature=0.9, top_k=7, seed=1),
        SamplingParams(),
        SamplingParams(temperature=1.4, top_p=0.6, seed=2),
    ]
    for slot, p in enumerate(params):
        table.occupy([Occupant(slot, [1], 5, [1], p, choice=slot)])
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[4, 5], [6, 7], [8, 9]])
    order = [2, 0, 1]
    want = sample(logits, SamplingBatch.from_params([params[i] for i in order], order), positions)
    assert torch.equal(sample(logits, table.sampling(torch.tensor(order)), positions), want)
    assert torch.equal(sample(logits, table.sampling(torch.tensor(order)), positions - 1, offset=1), want)


def test_a_request_that_samples_carries_a_seed() -> None:
    with pytest.raises(SlipstreamError, match="no seed"):
        make_table().occupy([Occupant(0, [1], 5, [1], SamplingParams(temperature=1.0))])

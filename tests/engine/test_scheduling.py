"""Blocks and slots: counted, never twice, never lost; chunks at absolute multiples."""

import pytest

from slipstream.engine.block_manager import DUMMY_BLOCK, BlockManager
from slipstream.engine.config import PrefillBucket
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.sequence import Request, Sequence, SequenceStatus


def sequence(num_prompt: int, limit: int, stop: tuple[int, ...] = (), streamed: bool = True) -> Sequence:
    return Sequence(Request("r", [3] * num_prompt, SamplingParams(), streamed=streamed), frozenset(stop), limit)


def test_blocks_are_handed_out_once_and_never_the_dummy():
    blocks = BlockManager(num_blocks=6, block_size=4)
    first, second = blocks.allocate(9), blocks.allocate(8)
    assert first == [1, 2, 3]
    assert second == [4, 5]
    assert DUMMY_BLOCK not in first + second
    assert blocks.allocate(1) is None
    blocks.free(first)
    assert blocks.num_free == 3
    assert blocks.allocate(4) == [1]  # lowest first, so that neighbours stay together
    with pytest.raises(ValueError, match="freed twice"):
        blocks.free(first)
    blocks.check_fits(20)
    with pytest.raises(SlipstreamError, match="6 KV blocks"):
        blocks.check_fits(21)


def test_chunks_are_cut_at_absolute_multiples():
    scheduler = Scheduler(2, BlockManager(20, 4), prefill_chunk=8, lookahead=1)
    scheduler.waiting.append(sequence(20, 24))
    (admitted,) = scheduler.admit()
    cuts = []
    while chunks := scheduler.next_chunks():
        (chunk,) = chunks
        cuts.append((chunk.start, chunk.end, chunk.is_last))
        scheduler.chunks_done(chunks)
    assert cuts == [(0, 8, False), (8, 16, False), (16, 20, True)]
    assert scheduler.running == [admitted]
    scheduler.finish(admitted)
    assert admitted.status is SequenceStatus.FINISHED
    assert scheduler.blocks.num_used == 0


def test_chunks_of_the_same_bucket_share_a_launch():
    buckets = (PrefillBucket(4, 3, 3), PrefillBucket(8, 2, 2))
    scheduler = Scheduler(6, BlockManager(60, 4), prefill_chunk=8, lookahead=1, buckets=buckets)
    scheduler.waiting.extend(sequence(n, 30) for n in (11, 3, 6, 8, 2, 4))
    admitted = scheduler.admit()
    launches = []
    while chunks := scheduler.next_chunks():
        launches.append([(admitted.index(c.sequence), c.start, c.end) for c in chunks])
        scheduler.chunks_done(chunks)
    assert launches == [
        [(0, 0, 8), (2, 0, 6)],  # of the oldest's bucket, two at most
        [(0, 8, 11), (1, 0, 3), (4, 0, 2)],  # its rest needs few rows: others that do come along
        [(3, 0, 8)],  # the oldest now
        [(5, 0, 4)],
    ]
    assert scheduler.running == [admitted[i] for i in (2, 0, 1, 4, 3, 5)]


@pytest.mark.parametrize("streamed", [True, False])
def test_prompts_hold_running_answers_up_no_longer_than_before(streamed):
    """Many prompts share a launch while nothing runs, or nothing that anybody reads as it comes."""
    scheduler = Scheduler(9, BlockManager(90, 4), prefill_chunk=8, lookahead=1, buckets=(PrefillBucket(8, 4, 2),))
    scheduler.waiting.extend(sequence(8, 30, streamed=streamed) for _ in range(9))
    scheduler.admit()
    launches = []
    while chunks := scheduler.next_chunks():
        launches.append(len(chunks))
        scheduler.chunks_done(chunks)
    assert launches == ([4, 2, 2, 1] if streamed else [4, 4, 1])


def test_admission_is_in_order_and_leaves_room_for_the_lookahead():
    scheduler = Scheduler(3, BlockManager(1 + 6, 4), prefill_chunk=8, lookahead=4)
    big, small = sequence(8, 16), sequence(1, 4)  # 20 positions: 5 blocks; 8 positions: 2 blocks
    first = sequence(2, 4)
    scheduler.waiting.extend([first, big, small])
    assert scheduler.admit() == [first]  # the small one does not overtake
    assert scheduler.admit() == []
    scheduler.finish(first)
    assert scheduler.admit() == [big]
    assert big.slot != -1


def test_equal_sequences_are_not_mistaken_for_each_other():
    scheduler = Scheduler(1, BlockManager(9, 4), prefill_chunk=8, lookahead=1)
    one, other = sequence(2, 4), sequence(2, 4)
    scheduler.waiting.extend([one, other])
    scheduler.finish(other)
    assert list(scheduler.waiting) == [one]


@pytest.mark.parametrize(
    ("tokens", "limit", "taken", "reason"),
    [
        ([5, 6], 10, [5, 6], None),
        ([5, 9, 6], 10, [5, 9], "stop"),
        ([5, 6, 7], 4, [5, 6], "length"),
        ([5, 9, 7], 4, [5, 9], "stop"),  # within the budget a stop wins
        ([5, 6, 9], 4, [5, 6], "length"),  # beyond it, the cap does
    ],
)
def test_stop_within_the_budget_wins_then_the_cap(tokens, limit, taken, reason):
    running = sequence(2, limit, stop=(9,))
    assert running.append(tokens) == (taken, reason)
    assert running.output_ids == taken

"""How ranks meet and how long they wait for each other: two ranks in one process, which gloo cannot tell from two."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slipstream.engine.rank_group import be_patient, connect, make_store
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels.all_gather import PeerLost, all_gather


def test_a_signal_is_heard_while_rank_0_waits_for_the_others():
    """Rank 1 comes only when the signal's handler runs; that of a rank's death must run then, too."""
    store = make_store()
    late = ThreadPoolExecutor(1)
    joined = []
    before = signal.signal(signal.SIGALRM, lambda *_: joined.append(late.submit(connect, 1, 2, store, peer_seconds=20)))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        ours = connect(0, 2, store, peer_seconds=20)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (ours.rank, ours.size) == (0, 2)
    assert joined[0].result(20).rank == 1


def two_ranks(peer_seconds: float) -> list[TensorParallel]:
    store = make_store()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: connect(rank, 2, store, peer_seconds=peer_seconds), range(2)))


def exchange(parallel: TensorParallel) -> list[int]:
    return [int(x) for x in all_gather(torch.tensor([parallel.rank]), [1, 1], parallel.group)]


def test_who_takes_longer_to_load_is_waited_for():
    ranks = two_ranks(peer_seconds=0.5)
    for rank in ranks:
        be_patient(rank, 20)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(lambda: time.sleep(1.5) or exchange(ranks[1]))
        assert exchange(ranks[0]) == [0, 1]
        assert late.result() == [0, 1]


def test_who_is_stuck_in_a_step_is_not():
    ranks = two_ranks(peer_seconds=20)
    be_patient(ranks[0], 0.2)
    with pytest.raises(PeerLost, match=r"[Tt]imed out"):
        exchange(ranks[0])

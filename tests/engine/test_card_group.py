"""Ranks on cards without a card: who takes part, what happens when peers cannot be reached, and when one is lost."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from slipstream.engine import card_group
from slipstream.engine.card_group import carrier_name, check_peers, check_shares, join_cards
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.rank_group import LOAD_SECONDS, connect, make_store
from slipstream.engine.tensor_parallel import AllReduce, TensorParallel
from slipstream.kernels.all_gather import PeerLost
from slipstream.kernels.gpu import peer_exchange
from slipstream.kernels.nccl_exchange import NcclExchange
from slipstream.kernels.stream import Stream


class Carrier:
    """Stands for an exchange: notes what it was asked."""

    def __init__(self, lost: int | None = None) -> None:
        self.asked: list[str] = []
        self.gone, self.seconds = lost, 0.0

    def all_reduce(self, x):
        self.asked.append("all_reduce")
        return x

    def all_reduce_add(self, partial, stream):
        self.asked.append("all_reduce_add")
        return Stream(stream.rows)

    def lost(self):
        return self.gone

    def be_patient(self, seconds):
        self.seconds = seconds


class OnACard:
    """Stands for a CUDA tensor."""

    is_cuda = True


def ranks(card: Carrier) -> TensorParallel:
    return TensorParallel(0, 2, group=object(), card=card)


def test_tensors_of_the_card_go_by_its_exchange():
    card = Carrier()
    reduce, x, stream = AllReduce(ranks(card)), OnACard(), Stream(torch.zeros(1, 4))
    assert reduce(x) is x
    assert reduce.add_to(stream, x).rows is stream.rows
    assert card.asked == ["all_reduce", "all_reduce_add"]


def test_a_hook_sees_the_sum_and_the_add_comes_apart(monkeypatch):
    """Faults are put in by hooks: they want what goes into the sum and what comes out of it."""
    card, seen = Carrier(), []
    reduce, x = AllReduce(ranks(card)), OnACard()
    reduce.register_forward_hook(lambda _module, args, out: seen.append((args[0], out)))
    monkeypatch.setattr("slipstream.engine.tensor_parallel.add", lambda summed, stream: (summed, stream))
    assert reduce.add_to("stream", x) == (x, "stream")
    assert seen == [(x, x)]
    assert card.asked == ["all_reduce"]


def test_a_lost_peer_is_named():
    check_peers(TensorParallel())
    check_peers(ranks(Carrier()))
    with pytest.raises(PeerLost, match="rank 0's card waited in vain for that of rank 1"):
        check_peers(ranks(Carrier(lost=1)))


def test_a_model_with_fewer_heads_than_ranks_is_refused():
    check_shares(4, [4, 8])
    with pytest.raises(SlipstreamError, match="8 ranks share 4 attention heads"):
        check_shares(8, [32, 4])


def test_names():
    assert carrier_name(TensorParallel()) is None
    assert carrier_name(TensorParallel(0, 2, group=object())) == "gloo"
    assert carrier_name(replace(ranks(Carrier()), card=NcclExchange(SimpleNamespace(rank=int, size=int)))) == "NCCL"


@pytest.fixture
def two(monkeypatch):
    """join_cards of two ranks in two threads of a machine that seems to have two cards: their results or errors."""
    store = make_store()
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(lambda rank: connect(rank, 2, store, peer_seconds=20), range(2)))
        zeros = torch.zeros
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_device", lambda rank: None)
        monkeypatch.setattr(torch, "zeros", lambda *sizes, **kw: zeros(*sizes, **{**kw, "device": "cpu"}))
        monkeypatch.setattr(card_group, "_nccl_exchange", lambda _: Carrier())
        yield lambda: [future.result(30) for future in [pool.submit(join_cards, one) for one in met]]


def fake_memory(monkeypatch, *, opens=True, right=True):
    """Peer memory that is a number: 1000 where it lies, and 247 (1000 % 251) where a peer has opened it."""
    monkeypatch.setattr(peer_exchange, "allocate", lambda size: 1000)
    monkeypatch.setattr(peer_exchange, "share", lambda address: bytes([address % 251] * 64))

    def open_shared(handle):
        if not opens:
            raise RuntimeError("cuIpcOpenMemHandle_v2 gave error 217: peer access is not supported")
        return handle[0]

    made = []

    class PeerExchange(Carrier):
        def __init__(self, rank, size, addresses, device, seconds):
            super().__init__()
            made.append((rank, size, addresses, device))

    monkeypatch.setattr(peer_exchange, "open_shared", open_shared)
    monkeypatch.setattr(peer_exchange, "PeerExchange", PeerExchange)
    monkeypatch.setattr(card_group, "_trial", lambda parallel, exchange: right or parallel.rank == 0)
    return made


def test_each_rank_opens_the_memory_of_the_others(monkeypatch, two):
    made = fake_memory(monkeypatch)
    joined = two()
    assert [carrier_name(one) for one in joined] == ["peer memory"] * 2
    assert sorted(made) == [(0, 2, [1000, 247], "cuda"), (1, 2, [247, 1000], "cuda")]
    assert all(one.card.seconds == LOAD_SECONDS for one in joined)


@pytest.mark.filterwarnings("ignore:cards do not reach")
@pytest.mark.parametrize("how", [{"opens": False}, {"right": False}])
def test_where_one_rank_cannot_have_peer_memory_none_uses_it(monkeypatch, two, how):
    """`right`: numbers are wrong on rank 1 only."""
    fake_memory(monkeypatch, **how)
    joined = two()
    assert [type(one.card) for one in joined] == [Carrier, Carrier]


@pytest.mark.filterwarnings("ignore:cards do not reach")
def test_an_error_of_the_driver_is_not_the_end(monkeypatch, two):
    fake_memory(monkeypatch)

    def no_driver(size):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(peer_exchange, "allocate", no_driver)
    joined = two()
    assert [type(one.card) for one in joined] == [Carrier, Carrier]

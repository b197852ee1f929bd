"""Which device serves, what is refused there, and how a launch that gives no result is told."""

import sys
from types import SimpleNamespace

import pytest
import torch

from slipstream.engine import in_flight
from slipstream.engine.compile_count import _CompileCount
from slipstream.engine.config import EngineConfig
from slipstream.engine.device import device_name, resolve_device
from slipstream.engine.engine import Engine
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.kv_room import no_room
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.serving.engine_build import build_engine
from slipstream.engine.serving.engine_options import EngineOptions
from slipstream.kernels.all_gather import PeerLost
from slipstream.kernels.round_ring import RoundRing


def a_card(monkeypatch, present: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)


def test_auto_is_the_card_where_there_is_one(monkeypatch):
    a_card(monkeypatch, present=True)
    assert [resolve_device(asked) for asked in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    a_card(monkeypatch, present=False)
    assert [resolve_device(asked) for asked in ("auto", "cpu")] == ["cpu", "cpu"]
    assert device_name("cpu") == "CPU"


def test_a_card_that_is_not_there_is_told(monkeypatch):
    a_card(monkeypatch, present=False)
    with pytest.raises(SlipstreamError, match="sees no card") as error:
        resolve_device("cuda")
    assert torch.__version__ in error.value.found
    with pytest.raises(SlipstreamError, match="device = 'gpu'"):
        resolve_device("gpu")


def test_a_wrong_device_is_refused_before_anything_is_loaded():
    with pytest.raises(SlipstreamError, match="device = 'gpu'"):
        EngineOptions("/nowhere", None, 0, device="gpu").check()


def test_more_ranks_than_cards_are_refused(monkeypatch):
    a_card(monkeypatch, present=True)
    monkeypatch.setattr("slipstream.engine.serving.engine_build.check_same", lambda *_: None)
    monkeypatch.setattr("slipstream.engine.serving.engine_build._told", lambda _: {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    parallel = SimpleNamespace(size=2, rank=0)
    with pytest.raises(SlipstreamError, match="2 ranks, and torch sees 1 card"):
        build_engine(EngineOptions("/nowhere", None, 0, tensor_parallel_size=2), lambda _: None, parallel=parallel)


def test_a_target_on_another_device_is_refused(tiny, tmp_path):
    with pytest.raises(SlipstreamError, match="the target lies on cpu, and device = cuda"):
        Engine(tiny.tiny_target(tmp_path), EngineConfig(max_context_tokens=64, device="cuda"))


def test_caches_that_do_not_fit_are_told_in_numbers(tiny, tmp_path, monkeypatch):
    target = tiny.tiny_target(tmp_path)
    allocate = type(target).allocate_kv

    def no_more(self, num_blocks, block_size):
        if num_blocks > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(self, num_blocks, block_size)

    monkeypatch.setattr(type(target), "allocate_kv", no_more)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (64 * 2**20, 2**30))
    with pytest.raises(SlipstreamError) as error:
        Engine(target, EngineConfig(max_running_requests=1000, max_context_tokens=200))
    # 4 layers x 16 tokens x 2 x 2 KV heads x 16 x 2 bytes = 8 KiB a block; 13 blocks a request, and the dummy block.
    assert "13,001 blocks (208,016 tokens: 1000 requests at a full context of 200 tokens)" in error.value.found
    assert "0.10 GiB" in error.value.found
    assert "the 0.06 GiB that are free of the card's 1.00 GiB: room for 131,056 tokens" in error.value.expected


def test_a_capture_without_room_is_told(tiny, tmp_path, monkeypatch):
    engine = Engine(tiny.tiny_target(tmp_path), EngineConfig(max_context_tokens=64, graphs=True))

    def no_more() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore words")

    monkeypatch.setattr(engine.steps, "prepare", no_more)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**28, 2**30))
    with pytest.raises(SlipstreamError, match=r"captured steps: CUDA out of memory. Tried to allocate 20.00 MiB\.\n"):
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))


def test_blocks_that_were_asked_for_are_named():
    error = no_room(EngineConfig(num_kv_blocks=100), bytes_per_block=2**20, free=2**20, total=2**30)
    assert "100 blocks (1,600 tokens: num_kv_blocks)" in error.found
    assert "room for 0 tokens, less what the draft's cache, the attention's workspace and the graphs" in error.expected


@pytest.fixture
def flight():
    return in_flight.Flight(0, [object()], None, 0.0)


@pytest.fixture
def ring():
    return RoundRing.allocate(4, 1, 0, "cpu")


def test_a_launch_without_a_record_is_told(monkeypatch, ring, flight):
    monkeypatch.setattr(in_flight, "LOOK_SECONDS", 0.02)
    with pytest.raises(SlipstreamError, match="a launch on the CPU left no record"):
        in_flight.wait_for(ring, flight, torch.device("cpu"))


def _failed() -> bool:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (lambda: True, "has done everything that was launched"),
        (lambda: False, r"has given no result for \d+ s"),
        (_failed, "the device failed: CUDA error: an illegal"),
    ],
)
def test_a_device_that_stalls_is_told(monkeypatch, ring, flight, query, words):
    monkeypatch.setattr(in_flight, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(in_flight, "STALLED_LOOKS", 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(query=query))
    with pytest.raises(SlipstreamError, match=words):
        in_flight.wait_for(ring, flight, torch.device("cuda"))


class _Late:
    """A ring whose record comes at the n-th look."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def read(self, index: int, batch: int) -> str | None:
        self.looks -= 1
        return None if self.looks > 0 else f"record {index} of {batch}"


def test_a_record_that_comes_just_before_the_device_is_looked_at_is_taken(monkeypatch, flight):
    """The device is done then, as one that lost a record is."""
    late = _Late(10**9)

    def done() -> bool:
        late.looks = 0
        return True

    monkeypatch.setattr(in_flight, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(query=done))
    assert in_flight.wait_for(late, flight, torch.device("cuda")) == "record 0 of 1"


@pytest.mark.parametrize("spin_seconds", [1.0, 0.0])
def test_a_late_record_is_waited_for(monkeypatch, flight, spin_seconds):
    """It comes while the host spins, and while it naps."""
    monkeypatch.setattr(in_flight, "SPIN_SECONDS", spin_seconds)
    assert in_flight.wait_for(_Late(1), flight, torch.device("cpu")) == "record 0 of 1"
    assert in_flight.wait_for(_Late(300), flight, torch.device("cpu")) == "record 0 of 1"


def test_a_lost_peer_is_heard_of_while_waiting_and_before_a_record_is_believed(flight):
    def gone() -> None:
        raise PeerLost("rank 1")

    for looks in (1, 300):
        with pytest.raises(PeerLost):
            in_flight.wait_for(_Late(looks), flight, torch.device("cpu"), gone)
    asked = []
    assert in_flight.wait_for(_Late(5), flight, torch.device("cpu"), lambda: asked.append(0)) == "record 0 of 1"
    assert len(asked) == 5


def test_compiles_are_counted_once_and_told_on(monkeypatch):
    told = []
    knobs = SimpleNamespace(compilation=SimpleNamespace(listener=lambda **words: told.append(words)))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    counter = _CompileCount()
    counter.install()
    counter.install()
    knobs.compilation.listener(src=SimpleNamespace(name="kernel"), cache_hit=False)
    assert (counter.count, counter.names, len(told)) == (1, ["kernel"], 1)

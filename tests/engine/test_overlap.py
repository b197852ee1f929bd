"""The host's work on a launch's results happens while later launches are at the device, which so never waits for it."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from slipstream.engine import round_graph
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.round_graph import RecordedGraphs
from slipstream.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


class SlowestDevice(RecordedGraphs):
    """A device that does nothing before the host waits for it, and then no more than it waits for."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.launches = 0  # replays that are in the queue

    def capture(self, function):
        replay, result = super().capture(function)

        def run() -> None:
            self.launches -= 1
            replay()

        def launch() -> None:
            self.launches += 1
            self.queue.append(run)

        return launch, result

    def write(self, inputs, values) -> None:
        self.queue.append(lambda: RecordedGraphs.write(self, inputs, list(values)))

    def finish(self) -> None:
        while self.queue:
            self.queue.popleft()()


class RingOfSlowest:
    """The ring of records; looking for an entry is what makes the device work."""

    def __init__(self, ring, device: SlowestDevice) -> None:
        self.ring, self.device = ring, device

    def __getattr__(self, name):
        return getattr(self.ring, name)

    def read(self, index, batch):
        while int(self.ring.counter) <= index:
            self.device.queue.popleft()()
        return self.ring.read(index, batch)


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    return tiny.tiny_target(tmp_path_factory.mktemp("target"), dtype=torch.float32)


def answers_and_launches(target, prompts, params, monkeypatch, rounds_in_flight) -> tuple[list[list[int]], list[int]]:
    """What was answered; and at every delivery of tokens, how many launches the device still had before it."""
    device, seen = SlowestDevice(), []
    monkeypatch.setattr(round_graph, "RecordedGraphs", lambda: device)
    sizes = {"max_running_requests": 4, "max_context_tokens": 96, "prefill_chunk_tokens": 32, "dtype": "float32"}
    engine = Engine(target, EngineConfig(graphs=True, rounds_in_flight=rounds_in_flight, prefill_requests=4, **sizes))
    engine.runner.ring = RingOfSlowest(engine.runner.ring, device)
    deliver = engine._deliver

    def watched(*arguments):
        seen.append(device.launches)
        return deliver(*arguments)

    monkeypatch.setattr(engine, "_deliver", watched)
    found = [answer.token_ids for answer in engine.generate(prompts, params)]
    assert device.launches == 0
    return found, seen


@pytest.mark.parametrize("rounds_in_flight", [0, 1, 2, 3])
def test_while_the_host_delivers_the_device_has_work(target, tiny, monkeypatch, rounds_in_flight):
    prompts = tiny.prompts(4, low=5, high=30)
    found, seen = answers_and_launches(target, prompts, GREEDY, monkeypatch, rounds_in_flight)
    monkeypatch.undo()
    plain = Engine(target, EngineConfig(max_context_tokens=96, dtype="float32")).generate(prompts, GREEDY)
    assert found == [answer.token_ids for answer in plain]
    rounds = [seen[i : i + 4] for i in range(0, len(seen), 4)]  # one prefill launch for all, 11 rounds of all
    still_out = [min(rounds_in_flight, 11 - i) for i in range(12)]  # fewer only when nothing is left to launch
    assert rounds == [[n] * 4 for n in still_out]


def test_64_prompts_of_one_length_take_8_launches_and_few_rounds_more(target, tiny):
    """A step is a prefill launch and a round: the last prompts start 7 rounds behind the first."""
    sizes = {"max_running_requests": 64, "max_context_tokens": 64, "prefill_requests": 8, "dtype": "float32"}
    engine = Engine(target, EngineConfig(**sizes))
    launched = []
    prefill = engine.steps.prefill
    engine.steps.prefill = lambda chunks: launched.append(len(chunks)) or prefill(chunks)
    params = replace(GREEDY, max_tokens=9)
    answers = engine.generate(tiny.prompts(64, low=8, high=8), params)
    assert launched == [8] * 8
    assert engine.stats.rounds == 8 + 7
    alone = Engine(target, EngineConfig(max_context_tokens=64, dtype="float32", max_running_requests=1))
    assert answers[:5] == alone.generate(tiny.prompts(64, low=8, high=8)[:5], params)

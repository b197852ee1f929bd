"""K may change from round to round: answers stay, the draft's keys stay right, and what pays is chosen."""

import random
from collections import Counter

import pytest
import torch

from slipstream.engine import step_choice
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.round_graph import TIMED_REPLAYS, GraphSteps
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.serving.engine_options import EngineOptions
from slipstream.engine.serving.trace_file import pack_trace, unpack_trace
from slipstream.engine.step_choice import ENOUGH, MARGIN, PROBE_EVERY, FixedSteps, PayingSteps, slowest
from slipstream.engine.tensor_parallel import TensorParallel

LARGEST = 4
PARAMS = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=t, seed=4) for t in (0.0, 0.9, 0.0)]
# A round of 4 requests costs hardly more with drafts, one of 64 twice as much for the first.
MS = {4: {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.3}, 64: {0: 1.0, 1: 2.0, 2: 2.2, 3: 2.4}}


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    return tiny.tiny_target(tmp_path_factory.mktemp("target"), dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(tiny):
    return tiny.prompts(3)


def engine(target, num_steps, proposer=None, **changes) -> Engine:
    sizes = {"max_running_requests": 2, "max_context_tokens": 96, "prefill_chunk_tokens": 20, "dtype": "float32"}
    return Engine(target, EngineConfig(num_steps=num_steps, **{**sizes, **changes}), proposer)


@pytest.fixture(scope="module")
def plain(target, prompts):
    return engine(target, 0).generate(prompts, PARAMS)


class AnySteps:
    """Another K every round."""

    def __init__(self):
        self.draws, self.chosen = random.Random(1), []

    def choose(self, batch, traced=False):
        self.chosen.append(self.draws.randint(0, LARGEST))
        return self.chosen[-1]

    def note(self, num_steps, num_valid, accepted):
        assert accepted <= num_valid <= num_steps


def switching(target, proposer, **changes):
    one = engine(target, LARGEST, proposer, **changes)
    one.start()
    one.choice = AnySteps()
    return one


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("rounds_in_flight", [0, 2])
def test_answers_do_not_depend_on_which_k_runs_when(target, prompts, plain, tiny, graphs, rounds_in_flight):
    recordings = {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(plain)}
    draft = Eagle3Proposer(tiny.tiny_draft(target), LARGEST)
    proposer = OracleProposer(LARGEST, recordings, target.config.vocab_size, seed=3, inner=draft)
    one = switching(target, proposer, graphs=graphs, choose_steps=graphs, rounds_in_flight=rounds_in_flight)
    assert one.generate(prompts, PARAMS) == plain
    assert set(one.choice.chosen) == set(one.stats.acceptance) == set(range(LARGEST + 1))
    assert one.captures_after_ready == 0
    assert max(max(k for k, n in enumerate(c.histogram) if n) for c in one.stats.acceptance.values()) >= 3


def test_the_draft_proposes_what_it_does_where_k_never_changes(target, prompts, tiny):
    """It depends on the committed tokens alone: rounds without drafts leave no hole in its keys."""
    draft = tiny.tiny_draft(target)
    always = engine(target, 1, Eagle3Proposer(draft, 1)).generate(prompts, PARAMS, trace=True)
    changing = switching(target, Eagle3Proposer(draft, LARGEST)).generate(prompts, PARAMS, trace=True)
    compared = 0
    for one, other in zip(always, changing, strict=True):
        first = {r.start: r.draft_logits[0] for r in one.trace.rounds}
        for r in other.trace.rounds:
            if r.start in first:
                torch.testing.assert_close(r.draft_logits[0], first[r.start], rtol=1e-4, atol=1e-5)
                compared += 1
    assert compared > 20


def test_traced_requests_get_all_steps(target, prompts, tiny):
    """Their trace is one table of rounds and steps, and parity compares every step."""
    draft = Eagle3Proposer(tiny.tiny_draft(target), 2)
    one = engine(target, 2, draft, graphs=True, choose_steps=True)
    one.start()
    one.choice = losing = PayingSteps({1: {0: 1.0, 1: 9.0, 2: 9.0}, 2: {0: 1.0, 1: 9.0, 2: 9.0}})
    for _ in range(int(ENOUGH) + 20):
        losing.note(2, 2, 0)
    untraced = one.generate(prompts[:1], PARAMS[0])
    assert len(one.stats.acceptance[0].histogram) == 1
    traced = one.generate(prompts[:2], PARAMS[0], trace=True)
    assert traced[0].token_ids == untraced[0].token_ids
    for answer in traced:
        packed = unpack_trace(pack_trace(answer.trace))
        assert len(packed.rounds) >= 10
        assert {len(r.draft_tokens) for r in packed.rounds} == {2}


def test_the_time_of_the_draft_is_told_where_it_proposes_nothing(target, prompts, tiny):
    one = engine(target, 2, Eagle3Proposer(tiny.tiny_draft(target), 2))
    one.choice = FixedSteps(0)  # its keys are made all the same
    one.generate(prompts, PARAMS)
    assert set(one.stats.acceptance) == {0}
    assert one.stats.draft_seconds > 0.02 * one.stats.verify_seconds > 0


def test_what_was_noted_can_be_forgotten():
    choice = fed(PayingSteps(MS), 300, 0)
    assert choice.choose(4) == 0
    choice.forget()
    assert [choice.choose(4) for _ in range(3)] == [3] * 3


def test_a_smaller_k_is_taken_as_soon_as_it_is_better():
    choice = PayingSteps({1: {0: 1.0, 1: 1.49}})
    for i in range(4000):
        choice.note(1, 1, i % 2)
    assert choice.choose(1) == 1  # 1.5 tokens in 1.49 ms
    for _ in range(8):
        choice.note(1, 1, 0)
    assert 1.49 > choice.tokens(1) > 1.49 * (1 - MARGIN)
    assert choice.choose(1) == 0


def fed(choice, rounds, standing):
    """Rounds of the chosen K at 4 requests in which the first `standing` drafts stand."""
    for _ in range(rounds):
        k = choice.choose(4)
        choice.note(k, k, min(k, standing))
    return choice


@pytest.mark.parametrize("standing", [0, 1, 2, 3])
def test_what_stands_is_proposed(standing):
    choice = fed(PayingSteps(MS), 300, standing)
    assert [choice.choose(4) for _ in range(PROBE_EVERY)].count(standing) >= PROBE_EVERY - 1
    assert choice.tokens(3) == pytest.approx(1 + standing)


def test_a_batch_for_which_drafts_cost_more_goes_without():
    choice = fed(PayingSteps(MS), 300, 1)
    assert choice.choose(3) == 1
    assert choice.choose(5) == 0  # 2 tokens in 2 ms, and 1 in 1: no better


def test_it_starts_with_the_largest_and_hears_of_a_change():
    choice = PayingSteps(MS)
    assert [choice.choose(4) for _ in range(20)] == [3] * 20  # nothing is known
    fed(choice, int(ENOUGH) + 10, 0)
    chosen = [choice.choose(4) for _ in range(10 * PROBE_EVERY)]
    assert chosen.count(0) + chosen.count(3) == len(chosen)
    assert 9 <= chosen.count(3) <= 10
    fed(choice, 400 * PROBE_EVERY, 3)
    assert [choice.choose(4) for _ in range(20)] == [3] * 20


def test_two_that_are_alike_do_not_take_turns():
    choice = PayingSteps({1: {0: 1.0, 1: 1.5}})
    for _ in range(2000):
        choice.note(1, 1, random.Random(7).randint(0, 1))
    settled = {choice.choose(1) for _ in range(PROBE_EVERY - 1)}
    assert len(settled) == 1


def test_ranks_take_the_slowest_of_their_times(monkeypatch):
    others = [torch.tensor([1.0, 3.0, 1.0]).double(), torch.tensor([2.0, 1.0, 1.5]).double()]
    monkeypatch.setattr(step_choice, "all_gather", lambda own, widths, group: [own, *others])
    found = slowest(TensorParallel(0, 3, object()), {1: {0: 1.5, 1: 2.0}, 2: {0: 4.0}})
    assert found == {1: {0: 2.0, 1: 3.0}, 2: {0: 4.0}}
    assert slowest(TensorParallel(), MS) is MS


def test_every_k_is_captured_and_timed_before_the_first_request(target, prompts, plain, tiny):
    one = engine(target, 2, Eagle3Proposer(tiny.tiny_draft(target), 2), graphs=True, choose_steps=True)
    one.start()
    assert {size: set(times) for size, times in one.steps.round_ms.items()} == {1: {0, 1, 2}, 2: {0, 1, 2}}
    assert min(ms for times in one.steps.round_ms.values() for ms in times.values()) > 0
    told = one.steps.describe()
    assert told["round_steps"] == [0, 1, 2]
    assert {size: set(times) for size, times in told["round_ms"].items()} == {n: {"0", "1", "2"} for n in "12"}
    assert one.steps.captures == len(one.config.row_buckets) + 2 * 3
    assert one.generate(prompts, PARAMS) == plain
    assert one.captures_after_ready == 0


def test_the_time_of_a_round_without_drafts_holds_the_drafts_first_pass(target, tiny, monkeypatch):
    """What keeps its keys whole is paid for, and so must count against K = 0."""
    proposer = Eagle3Proposer(tiny.tiny_draft(target), 2)
    one = engine(target, 2, proposer, graphs=True, choose_steps=True)
    timed, time_rounds, propose = [], GraphSteps._time_rounds, proposer.propose

    def run(batch):
        timed.append(len(batch.chain_positions))
        return propose(batch)

    def timing(steps):
        timed.clear()
        time_rounds(steps)

    monkeypatch.setattr(proposer, "propose", run)
    monkeypatch.setattr(GraphSteps, "_time_rounds", timing)
    one.start()
    assert Counter(timed) == dict.fromkeys((0, 1, 2), 2 * (1 + TIMED_REPLAYS))  # for 1 and for 2 requests


def test_without_drafts_there_is_nothing_to_choose():
    for wrong in (
        lambda: EngineConfig(choose_steps=True, graphs=True),
        EngineOptions("t", None, 0, choose_steps=True).check,
    ):
        with pytest.raises(SlipstreamError, match="num_steps = 0"):
            wrong()


def test_it_needs_captured_steps():
    EngineOptions("t", "d", 2, choose_steps=True).check()  # there may be a card
    for wrong in (
        lambda: EngineConfig(num_steps=2, choose_steps=True),
        EngineOptions("t", "d", 2, device="cpu", choose_steps=True).check,
    ):
        with pytest.raises(SlipstreamError, match="steps are not captured"):
            wrong()

"""Captured steps equal steps in exact shapes. On the CPU: a replay runs the captured function on the same buffers.

What only a card can show (that a graph holds all its work, and compiles nothing) is in test_round_graph_gpu.py.
"""

from dataclasses import astuple, replace

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine, Request
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.round_graph import RecordedGraphs
from slipstream.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=11, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    return tiny.tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tiny):
    return tiny.prompts(7)


@pytest.fixture(scope="module")
def params():
    """Greedy and sampled requests of different lengths, so that batches change all the time."""
    return [replace((GREEDY, SAMPLED)[i % 2], max_tokens=5 + 3 * i) for i in range(7)]


@pytest.fixture(scope="module")
def plain(target, prompts, params):
    """Answers without speculation and without graphs."""
    return engine(target, 0, graphs=False).generate(prompts, params)


@pytest.fixture(scope="module")
def draft(tiny, target):
    return tiny.tiny_draft(target)


def engine(target, num_steps, proposer=None, capture_slots=(), **changes) -> Engine:
    """Three requests at a time: batches of 1, 2 and 3, of which 3 is no power of two."""
    sizes = {"max_running_requests": 3, "max_context_tokens": 96, "prefill_chunk_tokens": 20, "graphs": True}
    return Engine(target, EngineConfig(num_steps=num_steps, **{**sizes, **changes}), proposer, capture_slots)


def oracle(target, plain, num_steps, inner=None):
    recordings = {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(plain)}
    return OracleProposer(num_steps, recordings, target.config.vocab_size, seed=3, inner=inner)


def proposer_of(kind, target, plain, draft, num_steps):
    if not num_steps:
        return None
    return oracle(target, plain, num_steps) if kind == "oracle" else Eagle3Proposer(draft, num_steps)


def test_buckets_end_with_the_largest_batch_and_chunk():
    assert EngineConfig(max_running_requests=1).batch_buckets == (1,)
    assert EngineConfig(max_running_requests=8).batch_buckets == (1, 2, 4, 8)
    assert EngineConfig(max_running_requests=6).batch_buckets == (1, 2, 4, 6)
    assert EngineConfig(prefill_chunk_tokens=256).row_buckets == (32, 64, 128, 256)
    assert EngineConfig(prefill_chunk_tokens=100).row_buckets == (32, 64, 100)
    assert EngineConfig(prefill_chunk_tokens=8).row_buckets == (8,)
    assert EngineConfig(prefill_chunk_tokens=256, max_context_tokens=40).row_buckets == (32, 40)


def test_prefill_launches_take_more_requests_the_fewer_rows_each_has():
    def most(**sizes) -> list[tuple[int, ...]]:
        return [astuple(bucket) for bucket in EngineConfig(**sizes).prefill_buckets]

    usual = most(device="cuda", max_running_requests=64)
    assert usual == [(32, 16, 16), (64, 16, 16), (128, 16, 8), (256, 8, 4)]
    assert most(device="cuda", max_running_requests=6, prefill_chunk_tokens=64) == [(32, 6, 6), (64, 6, 6)]
    assert most(device="cuda", prefill_chunk_tokens=2048)[-2:] == [(1024, 2, 1), (2048, 1, 1)]
    assert most(max_running_requests=64, prefill_chunk_tokens=64) == [(32, 1, 1), (64, 1, 1)]
    assert EngineConfig(device="cuda", max_running_requests=6).prefill_buckets[0].batches == (1, 2, 4, 6)
    with pytest.raises(SlipstreamError, match="prefill_requests = 0"):
        EngineConfig(prefill_requests=0)


@pytest.mark.parametrize("rounds_in_flight", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "num_steps"),
    [("none", 0), ("oracle", 1), ("draft", 2), ("oracle", 3), ("oracle", 4), ("draft", 5), ("oracle", 5)],
)
def test_answers_and_counts_do_not_depend_on_graphs_or_flights(
    target, prompts, params, plain, draft, kind, num_steps, rounds_in_flight
):
    found = []
    for graphs in (False, True):
        proposer = proposer_of(kind, target, plain, draft, num_steps)
        flights = rounds_in_flight if graphs else 0
        one = engine(target, num_steps, proposer, graphs=graphs, rounds_in_flight=flights)
        assert one.generate(prompts, params) == plain
        assert one.scheduler.blocks.num_used == 0
        assert one.captures_after_ready == 0
        found.append(one.stats.acceptance[num_steps])
    assert found[0] == found[1]
    if kind == "oracle":
        assert min(found[0].histogram) > 0, "an accepted count never occurred"


def _seen(one: Engine) -> list[dict[str, torch.Tensor]]:
    """Fills up with what every launch gave its requests, padding cut off."""
    seen: list[dict[str, torch.Tensor]] = []
    launch_round, launch_chunk = one.steps.round, one.steps.prefill

    def round_(slots, num_steps):
        result, n = launch_round(slots, num_steps), len(slots)
        tensors = {"tokens": result.tokens, "accepted": result.accepted, "start": result.start, "last": result.last}
        tensors |= {"logits": result.logits, **result.states}
        if result.proposal is not None:
            tensors["drafts"] = result.proposal.tokens
            tensors |= {f"draft logits {k}": step for k, step in enumerate(result.proposal.logits or ())}
        seen.append({name: tensor[:n].clone() for name, tensor in tensors.items()})
        return result

    def prefill(chunks):
        result, n = launch_chunk(chunks), len(chunks)
        for c, chunk in enumerate(chunks):
            states = {**result.states, "last": result.last}
            seen.append({name: state[c, : chunk.rows].clone() for name, state in states.items()})
        seen.append({"logits": result.logits[:n].clone(), "token": result.token[:n].clone()})
        return result

    one.steps.round, one.steps.prefill = round_, prefill
    return seen


@pytest.mark.parametrize("prefill_requests", [1, 3])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_every_replay_equals_the_step_without_graphs(
    target, prompts, params, plain, draft, num_steps, prefill_requests
):
    """Bitwise and launch by launch: tokens, drafts, draft logits, captured slots, logits; requests come and go."""
    seen = []
    for graphs in (False, True):
        inner = Eagle3Proposer(draft, num_steps) if num_steps else None
        proposer = oracle(target, plain, num_steps, inner) if num_steps else None
        sizes = {"graphs": graphs, "prefill_requests": prefill_requests}
        one = engine(target, num_steps, proposer, capture_slots=(0, 3, 4), **sizes)
        seen.append(_seen(one))
        assert one.generate(prompts, params) == plain
    eager, replayed = seen
    assert len(eager) == len(replayed) > 20
    assert max(len(launch.get("token", [])) for launch in replayed) == prefill_requests
    assert len({len(launch["start"]) for launch in replayed if "start" in launch}) == 3  # every batch size occurred
    for a, b in zip(eager, replayed, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("depth", [0, 2])
def test_inputs_a_b_a_through_the_same_buffers(target, prompts, draft, depth):
    """One request at a time: every replay uses the buffers of the one before it; the third request is the first."""
    one = engine(target, 3, Eagle3Proposer(draft, 3), max_running_requests=1, rounds_in_flight=depth)
    reference = engine(target, 3, Eagle3Proposer(draft, 3), max_running_requests=1, graphs=False)
    a, b, again = (one.generate([prompts[i]], GREEDY, trace=True)[0] for i in (0, 1, 0))
    for answer, prompt in ((a, prompts[0]), (b, prompts[1]), (again, prompts[0])):
        (expected,) = reference.generate([prompt], GREEDY, trace=True)
        assert answer.token_ids == expected.token_ids
        assert all(torch.equal(answer.trace.states[n], expected.trace.states[n]) for n in expected.trace.states)
        assert torch.equal(answer.trace.teacher, expected.trace.teacher)
        for mine, theirs in zip(answer.trace.rounds, expected.trace.rounds, strict=True):
            assert torch.equal(mine.draft_tokens, theirs.draft_tokens)
            assert torch.equal(mine.draft_logits, theirs.draft_logits)
            assert (mine.start, mine.num_valid, mine.accepted) == (theirs.start, theirs.num_valid, theirs.accepted)
    assert not torch.equal(a.trace.teacher[-5:], b.trace.teacher[-5:])


def test_the_tests_see_a_buffer_that_is_not_refreshed(target, prompts, params, plain, monkeypatch):
    """An engine whose slots stay at the first batch's fails what the tests above compare, or never ends."""
    write, written = RecordedGraphs.write, set()

    def stale(self, inputs, values):
        if inputs.dim() == 2 or inputs.data_ptr() not in written:  # chunks are right
            written.add(inputs.data_ptr())
            write(self, inputs, values)

    monkeypatch.setattr(RecordedGraphs, "write", stale)
    one = engine(target, 0, max_running_requests=2)
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        one.add_request(Request(str(i), prompt, p))
    tokens: dict[str, list[int]] = {}
    for _ in range(300):
        for output in one.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert [tokens.get(str(i)) for i in range(len(prompts))] != [answer.token_ids for answer in plain]


@pytest.mark.parametrize("rounds_in_flight", [0, 1, 2, 3])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_stop_token_throws_away_what_was_launched_behind_it(target, prompts, plain, num_steps, rounds_in_flight):
    whole = plain[6].token_ids  # greedy, 23 tokens
    at = next(i for i in range(9, 20) if whole[i] not in whole[:i])
    proposer = oracle(target, [plain[6]], num_steps) if num_steps else None
    one = engine(target, num_steps, proposer, rounds_in_flight=rounds_in_flight)
    stop = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(whole[at],))
    (answer,) = one.generate([prompts[6]], stop)
    assert (answer.token_ids, answer.finish_reason) == (whole[: at + 1], "stop")
    assert one.stats.generated_tokens == at + 1
    assert one.scheduler.blocks.num_used == 0
    counts = one.stats.acceptance[num_steps]
    assert counts.rounds + counts.left_out == one.stats.rounds
    assert counts.ended == 1
    chunks = -(-len(prompts[6]) // 20)
    overshoot = one.steps.launched - _at_start(target, num_steps) - chunks - one.stats.rounds
    assert overshoot == rounds_in_flight
    # What is still out belongs to nobody; the next request is not touched by it.
    proposer_free = engine(target, 0).generate([prompts[0]], GREEDY)
    if not num_steps:
        assert one.generate([prompts[0]], GREEDY) == proposer_free


def _at_start(target, num_steps) -> int:
    """Entries of the ring that warm-up and capture leave."""
    one = engine(target, num_steps, OracleProposer(num_steps, {}, 199) if num_steps else None)
    one.start()
    return one.steps.launched


@pytest.mark.parametrize("rounds_in_flight", [0, 2])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_nothing_is_launched_for_a_request_that_will_have_reached_its_limit(
    target, prompts, rounds_in_flight, max_tokens
):
    one = engine(target, 0, rounds_in_flight=rounds_in_flight)
    one.start()
    before = one.steps.launched
    (answer,) = one.generate([prompts[0][:5]], replace(GREEDY, max_tokens=max_tokens))
    assert len(answer.token_ids) == max_tokens
    assert one.steps.launched - before == max_tokens  # one chunk, and a round for each further token


@pytest.mark.parametrize("rounds_in_flight", [0, 1, 2])
def test_abort_while_launches_are_out(target, prompts, plain, rounds_in_flight):
    one = engine(target, 3, oracle(target, plain, 3), rounds_in_flight=rounds_in_flight, max_running_requests=2)
    params = [GREEDY, GREEDY, GREEDY]
    for i in range(3):
        one.add_request(Request(str(i), prompts[2 * i], replace(params[i], max_tokens=30)))
    one.runner.proposer.recordings = {str(i): plain[2 * i].prompt_ids + plain[2 * i].token_ids for i in range(3)}
    tokens: dict[str, list[int]] = {}
    for step in range(200):
        if not one.has_work:
            break
        for output in one.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        if step == 4:
            assert one.abort("0")
            assert not one.abort("0")
            # The same id at once, while rounds of the old request are out: nothing of those may reach it.
            one.add_request(Request("0", prompts[0], replace(GREEDY, max_tokens=6)))
            tokens["0"] = []
    assert not one.has_work
    assert one.scheduler.blocks.num_used == 0
    three = [prompts[0], prompts[2], prompts[4]]
    short = engine(target, 0, graphs=False).generate(three, replace(GREEDY, max_tokens=30))
    assert tokens["0"] == short[0].token_ids[:6]
    assert tokens["1"] == short[1].token_ids
    assert tokens["2"] == short[2].token_ids


def test_a_traced_request_is_waited_for_while_it_runs(target, prompts, draft):
    """Its states lie in buffers that the next launch overwrites; before it and behind it rounds stay out."""
    one = engine(target, 2, Eagle3Proposer(draft, 2), rounds_in_flight=2)
    one.add_request(Request("plain", prompts[0], replace(GREEDY, max_tokens=40)))
    out = []
    for step in range(60):
        if step == 5:
            one.add_request(Request("traced", prompts[1], replace(GREEDY, max_tokens=8), trace=True))
        if not one.has_work:
            break
        for output in one.step():
            trace = output.trace if output.request_id == "traced" and output.finish_reason else None
            if trace is not None:
                out.append((trace, len(one._flights)))
        watched = any(s.request.trace for s in one.scheduler.running + list(one.scheduler.prefilling))
        if watched:
            assert not one._flights
    ((trace, _),) = out
    reference = engine(target, 2, Eagle3Proposer(draft, 2), graphs=False)
    (expected,) = reference.generate([prompts[1]], replace(GREEDY, max_tokens=8), trace=True)
    assert trace.token_ids == expected.trace.token_ids
    assert all(torch.equal(trace.states[n], expected.trace.states[n]) for n in expected.trace.states)


def test_the_warm_up_leaves_the_table_as_it_was(target, draft):
    one = engine(target, 2, Eagle3Proposer(draft, 2))
    one.start()
    table = one.runner.table
    assert not table.lengths.any()
    assert not table.limits.any()
    assert not table.num_fresh.any()
    assert not table.tokens.any()
    assert one.steps.captures == len(one.config.batch_buckets) + len(one.config.row_buckets)
    assert one.captures_after_ready == 0


def test_device_and_flights_out_of_range_are_refused():
    with pytest.raises(SlipstreamError, match="rounds_in_flight = 9"):
        EngineConfig(rounds_in_flight=9)
    with pytest.raises(SlipstreamError, match="device = 'tpu'"):
        EngineConfig(device="tpu")

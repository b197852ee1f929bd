"""The benchmark's parts by themselves: client, pairs, counters, statistics, figures, costs. No real server here."""

import dataclasses
import importlib.util
import json
import math
from pathlib import Path

import pytest

from slipstream.configs.schema import Deployment
from slipstream.engine.acceptance import AcceptanceCounts
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.speed_forecast import RoundCosts, SpeedOption, expected_speed
from slipstream.tasks import bench_pairs, replayed, tune
from slipstream.tasks.bench_client import Prompt, ask_all
from slipstream.tasks.bench_figures import figures
from slipstream.tasks.bench_prompts import benchmark_prompts
from slipstream.tasks.counters import NOTHING, Counters
from slipstream.tasks.prompts import assign_splits, load_prompts
from slipstream.tasks.round_costs import RoundTime, costs_of, losing_term, option_dict
from slipstream.tasks.statistics import speedup, summary

SPEC = importlib.util.spec_from_file_location("bench_fixtures", Path(__file__).parent / "bench_fixtures.py")
assert SPEC is not None
assert SPEC.loader is not None
made = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(made)

HELLO = Prompt("p", ({"role": "user", "content": "hello"},))


# ---- client


def test_client_counts_tokens_by_usage_and_outputs_by_chunks():
    seen = []

    def answer(body, handler):
        seen.append(body)
        role = {"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]}
        parts = [made.chunk("a", [1], 1), made.chunk("bcd", [2, 3, 4], 4), made.chunk("ef", [5, 6], 6, "length")]
        made.send_events(handler, [role, *parts, {"choices": [], "usage": parts[-1]["usage"]}, "[DONE]"], 0.01)

    with made.scripted_server(answer) as url:
        (got,) = ask_all(url, [HELLO], max_tokens=6, seed=3)
    assert (got.text, got.token_ids, got.prompt_tokens, got.output_tokens) == ("abcdef", (1, 2, 3, 4, 5, 6), 5, 6)
    assert [c.tokens for c in got.chunks] == [1, 4, 6]
    assert got.decode_tokens == 5
    assert len(got.itl_ms) == 2
    assert got.tpot_ms == pytest.approx(1000 * got.decode_seconds / 5)
    assert got.ttft_ms <= 1000 * got.seconds
    assert (seen[0]["max_tokens"], seen[0]["seed"], seen[0]["messages"]) == (6, 3, list(HELLO.messages))


def test_client_takes_the_first_output_for_one_token_where_nobody_counts():
    def answer(body, handler):
        end = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}
        made.send_events(handler, [made.chunk("a", [], None), made.chunk("bc", [], None, "stop"), end, "[DONE]"])

    with made.scripted_server(answer) as url:
        (got,) = ask_all(url, [HELLO], max_tokens=6)
    assert got.decode_tokens == 2


def test_client_keeps_the_order_of_prompts_with_several_streams():
    def answer(body, handler):
        text = body["messages"][0]["content"]
        made.send_events(handler, [made.chunk(text, [1], 1, "stop"), "[DONE]"], 0.02 if text == "0" else 0.0)

    prompts = [Prompt(str(i), ({"role": "user", "content": str(i)},)) for i in range(6)]
    with made.scripted_server(answer) as url:
        answers = ask_all(url, prompts, max_tokens=1, concurrency=3)
    assert [a.text for a in answers] == [str(i) for i in range(6)]


def refuse(body, handler):
    handler.send_response(400)
    handler.end_headers()
    handler.wfile.write(b'{"error": {"message": "the prompt has 9000 tokens"}}')


def stop_short(body, handler):
    made.send_events(handler, [made.chunk("a", [1], 1)])


def fail_late(body, handler):
    made.send_events(handler, [made.chunk("a", [1], 1), {"error": {"message": "the engine process was ended"}}])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refuse, "9000 tokens"),
        (stop_short, "without a finish reason"),
        (fail_late, "the engine process was ended"),
    ],
)
def test_client_says_what_went_wrong(answer, words):
    with made.scripted_server(answer) as url, pytest.raises(SlipstreamError, match=words) as error:
        ask_all(url, [HELLO], max_tokens=2)
    assert "prompt p" in str(error.value)


def test_client_says_when_nobody_is_there():
    with made.scripted_server(refuse) as url:
        pass
    with pytest.raises(SlipstreamError, match="did not finish its answer to prompt p: Connect"):
        ask_all(url, [HELLO], max_tokens=2)


# ---- prompts


def test_prompts_are_held_out_mixed_and_the_same_every_time():
    deployment = Deployment(benchmark={"num_prompts": 8})
    chosen = benchmark_prompts(deployment)
    assert [p.id for p in chosen] == [p.id for p in benchmark_prompts(deployment)]
    everything = load_prompts("builtin")
    splits = assign_splits(everything, deployment.data.holdout_fraction, deployment.data.seed)
    assert {splits[p.id] for p in chosen} == {"holdout"}
    category = {p.id: p.category for p in everything}
    assert len({category[p.id] for p in chosen}) >= 4
    other = Deployment(benchmark={"num_prompts": 8, "seed": 5})
    assert [p.id for p in benchmark_prompts(other)] != [p.id for p in chosen]


def test_too_few_prompts_are_an_error():
    with pytest.raises(SlipstreamError, match=r"num_prompts is 5000"):
        benchmark_prompts(Deployment(benchmark={"num_prompts": 5000}))


# ---- counters


def counters(histogram, ended, draft):
    counts = AcceptanceCounts(2, histogram, ended=ended)
    return Counters({"prefill": 1.0, "draft": draft, "verify": 2.0, "rest": 0.5}, 10 * ended, {2: counts})


def test_counters_subtract_and_add_and_survive_json():
    before, after = counters([1, 2, 3], 1, 1.0), counters([4, 2, 5], 3, 1.75)
    gone = after - before
    assert (gone.of(2).histogram, gone.of(2).ended, gone.seconds["draft"], gone.rounds) == ([3, 0, 2], 2, 0.75, 20)
    assert Counters.from_dict(json.loads(json.dumps(gone.to_dict()))) == gone
    assert (NOTHING + gone + before).of(2).histogram == after.of(2).histogram
    assert gone.of(5).rounds == 0


# ---- pairs


def test_pairs_survive_a_kill_in_the_middle_of_a_line(tmp_path):
    file = tmp_path / "pairs.jsonl"
    pairs = [made.make_pair(0), made.make_pair(1)]
    lines = [json.dumps(bench_pairs._to_json(pair)) + "\n" for pair in pairs]
    file.write_text(lines[0] + lines[1] + lines[0][:40])
    assert list(bench_pairs.resume_pairs(file)) == pairs
    assert file.read_text() == lines[0] + lines[1]


def test_pairs_alternate_who_goes_first_and_measure_only_what_is_missing(tmp_path, monkeypatch):
    asked = []

    def ask(url, block, concurrency, max_tokens, seed):
        asked.append((url, block[0].id))
        pair = made.make_pair(int(block[0].id[1:]))
        return pair.baseline if url == "plain" else pair.speculation

    monkeypatch.setattr(bench_pairs, "_ask", ask)
    prompts = [Prompt(f"p{i}", ()) for i in range(3)]
    options = {"concurrency": 1, "max_tokens": 4, "seed": 0, "progress": lambda *_: None}
    urls = {"baseline": "plain", "speculation": "fast"}
    file = tmp_path / "pairs.jsonl"
    bench_pairs.measure_pairs(urls, prompts, file, repeats=1, **options)
    assert asked == [("plain", "p0"), ("fast", "p0"), ("fast", "p1"), ("plain", "p1"), ("plain", "p2"), ("fast", "p2")]
    asked.clear()
    pairs = bench_pairs.measure_pairs(urls, prompts, file, repeats=2, **options)
    assert [name for _, name in asked] == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert asked[0][0] == "fast"  # the second time round, the other one goes first
    assert [(pair.repeat, pair.block) for pair in pairs] == [(r, b) for r in range(2) for b in range(3)]


def test_differing_answers_are_named():
    pair = made.make_pair(4)
    assert pair.differing == []
    other = dataclasses.replace(pair.speculation.answers[0], token_ids=(9,))
    assert dataclasses.replace(pair, speculation=dataclasses.replace(pair.speculation, answers=(other,))).differing == [
        "p4"
    ]


# ---- statistics


def test_summary_is_of_real_values_and_null_without():
    told = summary([float(v) for v in range(1, 101)])
    assert (told["p50"], told["p95"], told["p99"], told["count"]) == (51.0, 96.0, 100.0, 100)
    assert summary([]) == {"mean": None, "p50": None, "p95": None, "p99": None, "count": 0}


def test_speedup_interval_covers_the_spread_over_prompts_not_over_repeats():
    base, spec = [10.0, 10.0, 10.0, 10.0], [5.0, 10.0, 20.0, 5.0]
    wide = speedup(base, spec, ["a", "b", "c", "d"])
    assert wide.low < wide.estimate < wide.high
    assert wide.estimate == pytest.approx(1.0)
    repeats = speedup(base * 25, spec * 25, ["a", "b", "c", "d"] * 25)
    assert (repeats.low, repeats.high) == pytest.approx((wide.low, wide.high))  # a hundred pairs, still four prompts
    assert repeats.groups == 4


def test_speedup_interval_has_its_nominal_coverage():
    """Of many experiments with a known ratio, about 95 % have it in their interval (bootstrap: somewhat less)."""
    import numpy as np

    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        base = rng.normal(100, 5, 16).clip(50)
        spec = base / 1.2 * rng.normal(1, 0.1, 16).clip(0.5)
        got = speedup(list(base), list(spec), [str(i) for i in range(16)], seed=trial)
        hits += got.low <= 1.2 <= got.high
    assert 0.85 <= hits / 200 <= 0.99


def test_speedup_needs_a_pair():
    with pytest.raises(ValueError, match="no pair"):
        speedup([], [], [])


# ---- figures


def test_figures_of_made_up_pairs_are_what_they_were_made_from():
    """Rounds of 20 ms with 2.5 tokens against steps of 10 ms: break-even 2, 1.25x."""
    got = figures([made.make_pair(i) for i in range(4)], 3, None)
    assert got["speedup"]["ratio"] == pytest.approx(1.25)
    assert (got["speedup"]["low"], got["speedup"]["high"]) == pytest.approx((1.25, 1.25))
    assert got["baseline"]["tokens_per_second"] == pytest.approx(100)
    assert got["speculation"]["tokens_per_second"] == pytest.approx(125)
    option = got["round"]
    assert (option["draft_ms"], option["verify_ms"], option["rest_ms"]) == pytest.approx((4, 12, 4))
    assert (option["accept_length"], option["break_even"]) == pytest.approx((2.5, 2.0))
    # The last round of a request does not count: accepted 1, 2, 0, 3, 1 of rounds that went on.
    assert got["acceptance"]["accept_length"] == pytest.approx(1 + 7 / 5)
    assert got["acceptance"]["rounds_left_out"] == {"ended": 4, "clamped": 0}
    assert [j["rate"] for j in got["acceptance"]["joint"]] == pytest.approx([0.8, 0.4, 0.2])
    assert got["losing_term"] is None
    assert got["speculation"]["itl_ms"]["p50"] == pytest.approx(20)
    assert got["speculation"]["tpot_ms"]["p50"] == pytest.approx(8)  # not the same thing under speculation
    json.dumps(got, allow_nan=False)


def test_answers_of_one_token_cannot_be_timed():
    pair = made.make_pair(0, accepted=(0,))
    short = made.make_answer("p0", [], 10.0)
    both = {side: dataclasses.replace(getattr(pair, side), answers=(short,)) for side in ("baseline", "speculation")}
    with pytest.raises(SlipstreamError, match="nothing to time"):
        figures([dataclasses.replace(pair, **both)], 3, None)


def test_an_answer_that_ends_at_once_on_one_side_is_not_timed_but_told():
    pair = made.make_pair(0)
    ended = dataclasses.replace(pair.speculation, answers=(made.make_answer("p0", [], 10.0),))
    got = figures([dataclasses.replace(pair, speculation=ended), made.make_pair(1)], 3, None)
    assert (got["untimed_pairs"], got["speedup"]["pairs"]) == (1, 1)
    assert (got["differing_prompts"], got["prompts"]) == (["p0"], 2)


def test_slower_speculation_names_the_losing_term():
    got = figures([made.make_pair(i, round_ms=42.0, draft_ms=27.0, verify_ms=11.0) for i in range(3)], 3, None)
    assert got["speedup"]["high"] < 1
    assert got["losing_term"]["term"] == "draft"


# ---- costs and the choice of K


def times(draft=3.0, verify=11.0, rest=1.0, plain=10.0, ks=(1, 2, 3)):
    return [RoundTime(0, 0.0, plain - 0.5, 0.5, 50)] + [RoundTime(k, draft * k, verify + 0.2 * k, rest, 30) for k in ks]


def test_costs_of_probes():
    costs = costs_of(times() + times())
    assert costs.plain_step_ms == pytest.approx(10)
    assert costs.verify_ms == pytest.approx({2: 11.2, 3: 11.4, 4: 11.6})
    assert list(costs.draft_ms) == pytest.approx([3, 3, 3])
    assert costs.rest_ms == pytest.approx(1)


def test_noise_that_makes_a_longer_chain_cheaper_gives_no_negative_step():
    noisy = [RoundTime(0, 0, 10, 0, 9), RoundTime(1, 5.0, 11, 1, 9), RoundTime(2, 4.0, 11, 1, 9)]
    assert all(ms >= 0 for ms in costs_of(noisy).draft_ms)


def test_costs_need_a_plain_step():
    with pytest.raises(ValueError, match="plain step"):
        costs_of(times()[1:])


def test_choice_takes_the_fastest_k():
    tau = {1: 1.7, 2: 2.2, 3: 2.4}
    choice = tune.choose(expected_speed(costs_of(times(draft=1.0)), tau), times(draft=1.0))
    speeds = {o["num_steps"]: o["tokens_per_second"] for o in choice["options"]}
    assert choice["num_steps"] == max(speeds, key=speeds.__getitem__) > 0
    assert choice["expected_speedup"] > 1
    assert choice["how"] == "auto"


def test_choice_is_zero_when_no_chain_wins_and_says_what_would_be_needed():
    tau = {1: 1.2, 2: 1.3, 3: 1.3}
    choice = tune.choose(expected_speed(costs_of(times()), tau), times())
    assert choice["num_steps"] == 0
    assert choice["candidate"] in (1, 2, 3)
    assert "speculation off" in choice["why"]
    assert "break-even" in choice["why"]


def option(draft=4.0, verify=12.0, rest=2.0, plain=10.0, length=1.5, k=3):
    return SpeedOption(k, length, draft, verify, rest, plain)


@pytest.mark.parametrize(
    ("case", "replayed_length", "term", "words"),
    [
        (option(draft=32, length=2.0, k=1), None, "draft", "no draft can win"),
        (option(verify=45), None, "verify", "no draft can win"),
        (option(rest=40), None, "rest", "no draft can win"),
        (option(draft=10, length=1.6), None, "draft", "would win"),
        (option(length=1.2), 2.5, "acceptance", "look at parity"),
        (option(length=1.2), 1.3, "acceptance", "conditional acceptance above"),
    ],
)
def test_losing_term_by_case(case, replayed_length, term, words):
    lost = losing_term(case, replayed_length)
    assert lost.term == term
    assert words in lost.why


def test_incident_launches_are_judged_as_they_should_have_been():
    """The team's own figures: K = 1 could not win with any draft; K = 15 lost by its cost, K = 5 by its acceptance."""
    step = 1000 / 90
    first = losing_term(SpeedOption(1, 1.6, 1.0, 27.2, 0.0, step))
    assert (first.term, "no draft can win" in first.why) == ("verify", True)
    third = losing_term(SpeedOption(5, 1.8, 5.0, 27.8, 0.0, step), replayed=3.29)
    assert third.term == "acceptance"


def test_options_survive_json():
    made = option()
    told = json.loads(json.dumps(option_dict(made)))
    assert told == {name: getattr(made, name) for name in told}
    assert {field.name for field in dataclasses.fields(made)} <= set(told)


# ---- the prediction


def evaluation(tmp_path: Path) -> Path:
    answers = [
        {"conversation": "a", "category": "x", "ended_by_limit": False, "run_lengths": [2, 0, 0, 1, 0, 3, 1, 0]},
        {"conversation": "b#0", "category": "x", "ended_by_limit": True, "run_lengths": [0, 1, 0, 0]},
        {"conversation": "b#1", "category": "x", "ended_by_limit": True, "run_lengths": [9, 9]},
    ]
    counts = [AcceptanceCounts(k, [3] + [1] * k).to_dict() for k in range(4)]
    (tmp_path / replayed.EVALUATION).write_text(json.dumps({"num_steps": 3, "replayed": counts, "answers": answers}))
    return tmp_path


def test_replay_of_the_benchmark_prompts_is_cut_as_the_benchmark_cuts(tmp_path):
    folder = evaluation(tmp_path)
    got = replayed.replay_prompts(folder, ["a"], 2, 100)
    # Slots 0 -> 3 -> 5 -> 8: accepted 2, 1 and 2, the last of which ends the answer.
    assert (got.histogram, got.ended) == ([0, 1, 1], 1)
    cut = replayed.replay_prompts(folder, ["a"], 2, 5)
    # Four tokens after the first: accepted 2, then one token is left.
    assert (cut.histogram, cut.ended) == ([0, 0, 1], 1)


def test_replay_takes_the_first_turn_and_refuses_prompts_that_were_not_held_out(tmp_path):
    folder = evaluation(tmp_path)
    assert replayed.replay_prompts(folder, ["b"], 2, 100).rounds + 1 == 3
    assert replayed.replay_prompts(folder, ["a", "stranger"], 2, 100) is None
    assert replayed.replay_prompts(folder, ["a"], 7, 100) is None


def test_replayed_counts_are_read_by_k(tmp_path):
    assert sorted(replayed.read_replayed(evaluation(tmp_path))) == [1, 2, 3]
    with pytest.raises(SlipstreamError, match="does not exist"):
        replayed.read_replayed(tmp_path / "elsewhere")


def test_expected_speed_follows_length_over_cost():
    forecast = expected_speed(RoundCosts(10.0, {2: 11.0}, (3.0,), 1.0), {1: 1.8})
    assert math.isclose(forecast.at(1).speedup, 1.8 / 1.5)

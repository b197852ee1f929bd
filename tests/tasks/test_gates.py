"""Gates: each bound passes, fails and is off, and a failed run says why."""

import importlib.util
from pathlib import Path

import pytest

from slipstream.configs.schema import Deployment
from slipstream.tasks.bench_figures import figures
from slipstream.tasks.gates import GatesFailed, judge, require
from slipstream.tasks.report_text import verdict

SPEC = importlib.util.spec_from_file_location("bench_fixtures", Path(__file__).parent / "bench_fixtures.py")
assert SPEC is not None
assert SPEC.loader is not None
made = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(made)

PARITY = {"slots": [{"share": 0.01}, {"share": 0.04}], "logits": {"share": 0.002}}


def bench(served=3, pairs=None, **changes):
    pairs = pairs or [made.make_pair(i) for i in range(4)]
    return {
        **figures(pairs, 3, None),
        "served_num_steps": served,
        "choice": {"why": "K = 0: speculation off. The best chain would be K = 3", "candidate": 3, "options": []},
        "transformers": None,
        "row_invariance": {"invariant": True, "promise": "exact"},
        **changes,
    }


def judged(measured, parity=PARITY, perplexity=20.0, **bounds):
    gates = Deployment(gates={"max_perplexity": 40.0, **bounds}).gates
    return {gate.name: gate for gate in judge(gates, {"perplexity": perplexity}, parity, measured)}


SPEED = "speed against no speculation"
SLOW = [made.make_pair(i, round_ms=42.0, draft_ms=27.0, verify_ms=11.0) for i in range(4)]
MIXED = [made.make_pair(i, round_ms=ms, draft_ms=8.0) for i, ms in enumerate((18.0, 32.0, 20.0, 30.0))]


def test_everything_good_passes():
    gates = judged(bench())
    assert {gate.status for gate in gates.values()} == {"pass", "off"}
    require([gate.to_dict() for gate in gates.values()])


@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("perplexity of the target", {"perplexity": 90.0}, "not what it should be"),
        ("parity: slots", {"parity": {**PARITY, "slots": [{"share": 0.5}]}}, "not the one that its name says"),
        (
            "parity: tokens that differ from transformers",
            {"parity": {**PARITY, "logits": {"share": 0.02}}},
            "not those of transformers",
        ),
        ("accept length", {"min_accept_length": 2.9}, "acceptance lost"),
    ],
)
def test_each_bound_fails_by_name(name, bad, words):
    gates = judged(bench(), **bad)
    assert gates[name].status == "fail"
    with pytest.raises(GatesFailed, match=name) as error:
        require([gate.to_dict() for gate in gates.values()])
    assert words in str(error.value)
    assert [g.name for g in gates.values() if g.status == "fail"] == [name]


def test_gates_without_a_bound_or_a_figure_are_off():
    gates = judged(bench(), parity=None, max_perplexity=None)
    assert gates["perplexity of the target"].status == "off"
    assert gates["accept length"].status == "off"
    assert gates["parity"].status == "off"


def test_changed_answers_fail_only_where_the_machine_keeps_bits():
    name = "same answers with and without speculation"
    assert judged(bench(differing_prompts=["p1"]))[name].status == "fail"
    by_gap = {"invariant": False, "promise": "may differ at near-ties"}
    told = judged(bench(differing_prompts=["p1"], row_invariance=by_gap))[name]
    assert (told.status, told.why) == ("note", "may differ at near-ties")


@pytest.mark.parametrize(("gap", "same", "status"), [(0.05, True, "pass"), (0.2, True, "fail"), (0.2, False, "note")])
def test_prediction_is_judged_on_the_same_prompts_only(gap, same, status):
    comparison = {"relative_gap": gap, "same_prompts": same, "text": ""}
    assert judged(bench(comparison=comparison))["replayed against served accept length"].status == status


def test_speed_fails_only_with_its_whole_interval():
    assert judged(bench(pairs=SLOW))[SPEED].status == "fail"
    mixed = bench(pairs=MIXED)
    assert mixed["speedup"]["low"] < 1 < mixed["speedup"]["high"]
    told = judged(mixed)[SPEED]
    assert told.status == "pass"
    assert "not shown to be faster" in told.why


def test_speed_bound_above_one_is_said_to_be_missed_not_lost():
    told = judged(bench(), min_speedup=2.0)[SPEED]
    assert told.status == "fail"
    assert "not by that much" in told.why


def test_verdict_says_it_in_a_sentence():
    gates = [gate.to_dict() for gate in judged(bench()).values()]
    assert verdict(bench(), gates).startswith("Speculation with K = 3 is 1.25x as fast")
    slow = bench(pairs=SLOW)
    told = verdict(slow, [gate.to_dict() for gate in judged(slow).values()])
    assert told.startswith(f"FAILED ({SPEED})")
    assert "loses by draft" in told
    off = bench(served=0, pairs=SLOW)
    told = verdict(off, [gate.to_dict() for gate in judged(off).values()])
    assert told.startswith("K = 0: speculation off")


def test_transformers_is_told_not_judged():
    slower = bench(transformers={"ratio": 0.8, "tokens_per_second": 50.0, "prompts": 3})
    told = judged(slower)["no speculation against transformers generate"]
    assert (told.status, told.found) == ("note", "0.80x")


@pytest.mark.parametrize(
    ("self_differ", "differ", "status"),
    [(4, 5, "pass"), (4, 6, "fail"), (12, 18, "pass"), (12, 19, "fail"), (40, 28, "pass"), (40, 29, "fail")],
)
def test_as_often_as_transformers_differs_from_itself_is_allowed(self_differ, differ, status):
    """Of 1,000 positions 0.5 % are asked; transformers in bf16 differs from fp32 at 14."""
    counts = {"positions": 1000, "reference_differ": 14, "self_differ": self_differ, "independent": True}
    parity = {**PARITY, "logits": {"share": differ / 1000, **counts}}
    assert judged(bench(), parity)["parity: tokens that differ from transformers"].status == status


@pytest.mark.parametrize(("share", "status"), [(0.005, "pass"), (0.006, "fail")])
def test_a_parity_from_before_that_was_measured_is_held_to_what_is_asked(share, status):
    parity = {**PARITY, "logits": {"share": share, "positions": 1000, "reference_differ": 14}}
    assert judged(bench(), parity)["parity: tokens that differ from transformers"].status == status

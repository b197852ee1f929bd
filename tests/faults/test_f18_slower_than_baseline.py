"""F18: speculation slower than no speculation. Caught by the gate after the benchmark, with the term that loses."""

import importlib.util
from pathlib import Path

import pytest

from slipstream.configs.schema import Deployment
from slipstream.tasks.bench_figures import figures
from slipstream.tasks.gates import GatesFailed, judge, require

CAUGHT = [
    ("F18", "gate", "speed-up below 1 with its whole interval: loses by draft, break-even length"),
]

SPEC = importlib.util.spec_from_file_location(
    "bench_fixtures", Path(__file__).parents[1] / "tasks" / "bench_fixtures.py"
)
assert SPEC is not None
assert SPEC.loader is not None
made = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(made)

# A round's milliseconds (draft, verify, whole) against a plain step of 10, and the accepted drafts of its rounds.
LOSSES = {
    "draft": ((27.0, 11.0, 42.0), (1, 2, 0, 3, 1, 2)),
    "verify": ((3.0, 35.0, 42.0), (1, 2, 0, 3, 1, 2)),
    "rest": ((3.0, 11.0, 42.0), (1, 2, 0, 3, 1, 2)),
    "acceptance": ((4.0, 11.0, 18.0), (0, 1, 0, 0, 1, 0)),
}


def benchmark(term, served=3):
    (draft, verify, whole), accepted = LOSSES[term]
    pairs = [made.make_pair(i, round_ms=whole, draft_ms=draft, verify_ms=verify, accepted=accepted) for i in range(6)]
    return {
        **figures(pairs, 3, None),
        "served_num_steps": served,
        "choice": {"why": "K = 0: speculation off. The best chain would be K = 3, and it loses by draft"},
        "transformers": None,
        "row_invariance": {"invariant": True, "promise": "exact"},
    }


def gates_of(bench, **bounds):
    return [gate.to_dict() for gate in judge(Deployment(gates=bounds).gates, {}, None, bench)]


@pytest.mark.parametrize("term", LOSSES)
def test_f18_pinned_k_below_the_baseline_fails_and_names_the_losing_term(term):
    bench = benchmark(term)
    assert bench["speedup"]["high"] < 1
    with pytest.raises(GatesFailed) as error:
        require(gates_of(bench))
    assert error.value.fault == "F18"
    assert f"The term that loses is {term}:" in str(error.value)
    assert "break-even" in str(error.value).lower()


def test_f18_speculation_switched_off_by_auto_passes_and_says_what_would_be_needed():
    gates = gates_of(benchmark("draft", served=0))
    require(gates)
    (speed,) = [gate for gate in gates if gate["fault"] == "F18"]
    assert speed["found"].startswith("speculation off")
    assert "loses by draft" in speed["why"]


def test_f18_passes_with_the_gate_switched_off():
    """The bound at its floor judges nothing: the slow server goes through, as the incident's did."""
    require(gates_of(benchmark("draft"), min_speedup=1e-9))


def test_f18_faster_speculation_passes():
    pairs = [made.make_pair(i) for i in range(6)]
    require(gates_of({**benchmark("draft"), **figures(pairs, 3, None)}))

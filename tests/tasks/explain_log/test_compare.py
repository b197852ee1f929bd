"""Two runs against each other: what the sums of A_k carry, and nothing more."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.acceptance import AcceptanceCounts
from slipstream.tasks.explain_log import read
from slipstream.tasks.explain_log.compare import compare, partial_sum
from slipstream.tasks.explain_log.observed import Settings
from slipstream.tasks.explain_log.run_figures import Run, figures


def made_run(accepted, k, *, error=0.01, joint=None, rounds=1000.0, **changes) -> Run:
    """A run of K = k with `accepted` drafts a round."""
    run = Run(
        name="x", engine="sglang", source="log", version=None, version_from="", asked=Settings(), effective=Settings(),
        num_steps=k, verify_width=k + 1, width_from="", width_adjusted=False, accept_length=1 + accepted,
        standard_error=error, error_from="", rounds=rounds, rate_printed=None, rate_meaning="", joint=joint, tree=False,
        running=1, tokens_per_second=None, round_ms=None, baseline=None, accuracy=None, notes=(), refused=(),
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


@st.composite
def histograms(draw):
    k = draw(st.integers(1, 15))
    return draw(st.lists(st.integers(0, 50), min_size=k + 1, max_size=k + 1).filter(any))


@given(histograms(), st.data())
def test_bounds_hold_whatever_the_rounds_were(histogram, data):
    """Any histogram: its true A_1 + .. + A_j lies within what its mean length alone allows."""
    counts = AcceptanceCounts(len(histogram) - 1, histogram)
    steps = data.draw(st.integers(1, counts.num_steps))
    true = sum(a.rate for a in counts.joint[:steps])
    bounds = partial_sum(made_run(counts.accept_length - 1, counts.num_steps), steps)
    assert bounds.low - 1e-9 <= true <= bounds.high + 1e-9
    known = partial_sum(
        made_run(counts.accept_length - 1, counts.num_steps, joint=tuple(a.rate for a in counts.joint)), steps
    )
    assert known.counted
    assert known.low == known.high == pytest.approx(true)


@given(histograms(), histograms())
def test_a_verdict_is_never_against_the_truth(first, second):
    """From mean lengths alone, without chance: "improved" only where the shared steps really accept more."""
    a, b = (AcceptanceCounts(len(h) - 1, h) for h in (first, second))
    made = compare(
        made_run(a.accept_length - 1, a.num_steps, error=0), made_run(b.accept_length - 1, b.num_steps, error=0)
    )
    steps = min(a.num_steps, b.num_steps)
    before, after = (sum(x.rate for x in counts.joint[:steps]) for counts in (a, b))
    if made.verdict == "improved":
        assert after > before - 1e-9
    if made.verdict == "worse":
        assert after < before + 1e-9


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((0.8, 5), (1.4, 5), "improved"),
        ((1.4, 5), (0.8, 5), "worse"),
        ((0.80, 5), (0.82, 5), "not shown to be improved"),  # within two standard errors
        ((0.9, 15), (0.8, 5), "not shown to be improved"),  # the incident
        ((0.9, 15), (1.4, 5), "improved"),  # more than the whole chain of 15 ever gave
        ((0.6, 1), (1.9, 3), "improved"),  # A_1 is at least 1.9 / 3
        ((0.9, 1), (0.5, 3), "worse"),  # A_1 is at most 0.5
        ((0.6, 1), (0.9, 15), "not shown to be improved"),
    ],
)
def test_verdicts(before, after, verdict):
    assert compare(made_run(*before), made_run(*after)).verdict == verdict


def test_nothing_is_shown_without_an_error():
    made = compare(made_run(0.2, 5), made_run(4.0, 5, error=None, rounds=None))
    assert (made.verdict, made.margin) == ("not shown to be improved", None)
    assert "an unknown number of rounds" in "\n".join(made.reasons)


def test_a_histogram_decides_what_a_mean_cannot():
    mean = made_run(0.9, 15)
    counted = made_run(0.9, 15, joint=(0.5, 0.2, *[0.02] * 10, 0.0, 0.0, 0.0))
    after = made_run(0.85, 3)
    assert compare(mean, after).verdict == "not shown to be improved"
    assert compare(counted, after).verdict == "improved"


def test_an_unknown_k_is_not_compared():
    assert compare(made_run(0.8, 5), dataclasses.replace(made_run(0.8, 5), num_steps=None)) is None


def test_rates_are_never_what_decides():
    """Equal lengths at any two K: never "improved", however far the rates are apart."""
    for k, other in itertools.permutations((1, 3, 5, 15), 2):
        made = compare(made_run(0.6, k), made_run(0.6, other))
        assert made.verdict == "not shown to be improved"
        assert any("compare nothing" in reason for reason in made.reasons)


def test_speeds_of_different_batches_are_not_compared():
    fast = {"tokens_per_second": 50.0, "round_ms": 30.0}
    made = compare(made_run(0.6, 3, **fast), made_run(0.6, 3, **fast, running=8))
    assert any("speeds are not compared: 1 running, then 8" in reason for reason in made.reasons)


def test_the_error_of_a_mean_is_that_of_its_lines(logs, tmp_path):
    """Against the plain formula: standard deviation of the lines over the root of their number."""
    lengths = [2.1, 2.4, 1.9, 2.2, 2.0]
    lines = [logs.server_args(3, 4), *logs.sglang_log(lengths, 4, with_bonus=True)]
    run = figures(read.read_file(logs.write(tmp_path / "a.log", lines)))
    seen = [lengths[0], *lengths]
    mean = sum(seen) / 6
    deviation = (sum((x - mean) ** 2 for x in seen) / 5) ** 0.5
    assert run.standard_error == pytest.approx(deviation / 6**0.5)

"""What a step is expected to take, against figures worked out apart, and the K that pays by published acceptance."""

from pathlib import Path

import pytest

from slipstream.flows.plan import Plan, derived_values, make_plan
from slipstream.tasks.byte_floor import floors
from slipstream.tasks.step_forecast import (
    CURVES,
    DRAFT_EFFICIENCY,
    MEASURED,
    Expected,
    MeasuredSteps,
    best_expected,
    expected_rounds,
)

CONFIGS = Path(__file__).parents[2] / "configs"


def plan(name: str, tmp_path: Path, *overrides: str) -> Plan:
    return make_plan(CONFIGS / f"{name}.yaml", overrides, workdir=tmp_path, environ={}, stages=())


def rows(found: Plan) -> list[tuple[str, str, str]]:
    return [(row.name, row.value, row.how) for row in derived_values(found)]


def test_between_measured_rows() -> None:
    steps = MeasuredSteps("x", {1: (1.0, 4.0), 3: (2.0, 4.0)})
    assert [steps.beyond(n) for n in (1, 2, 3)] == [3.0, 2.5, 2.0]
    assert [steps.efficiency(n) for n in (1, 2, 3)] == [0.25, 0.375, 0.5]


def test_where_it_was_measured_the_measured_step_is_expected(tmp_path: Path) -> None:
    """On the H200 both readings are what was measured there, but for the floor's own rounding."""
    facts = plan("kimi-k2.5-8xh200", tmp_path).facts
    found, floor = expected_rounds(facts), floors(facts)
    assert [one.num_steps for one in found] == list(range(9))
    for steps in (0, 1, 3):
        took, drafts = MEASURED.ms[steps + 1][1], floor[steps].draft_ms / DRAFT_EFFICIENCY
        assert found[steps].least_ms == pytest.approx(took + drafts, rel=0.01)
        assert found[steps].most_ms == pytest.approx(took + drafts, rel=0.01)


def test_the_incidents_host(tmp_path: Path) -> None:
    """6.03 GB at 1.79 TB/s: 3.37 ms. And as much more as there, or as many times as long, beside what was measured."""
    found = plan("kimi-k2.5-8xrtxpro6000", tmp_path)
    plain, (floor, took) = expected_rounds(found.facts)[0], MEASURED.ms[1]
    least, most = 3.37 + took - floor, 3.37 * took / floor
    assert (plain.least_ms, plain.most_ms) == (pytest.approx(least, rel=0.01), pytest.approx(most, rel=0.01))
    told = {name: value for name, value, _ in rows(found)}
    assert told["measured plain step"] == "90 tokens/s, 11.1 ms a step"
    assert told["expected plain step"].startswith(f"{least:.1f} to {most:.1f} ms, ")


def test_best_k_by_hand() -> None:
    dear, cheap = Expected(1, 1.5, 3.0), Expected(2, 2.0, 3.1)
    plain = Expected(0, 1.0, 2.0)
    (best,) = best_expected((plain, dear, cheap), {1: 1.2, 2: 1.3})
    assert best.num_steps == 0  # 1 / 1 and 1 / 2, against 0.8, 0.4 and 0.65, 0.42
    assert [one.num_steps for one in best_expected((plain, dear, cheap), {1: 1.8, 2: 2.1})] == [1, 2]
    assert [one.num_steps for one in best_expected((plain, dear, cheap), {1: 1.8})] == [1]


@pytest.mark.parametrize("name", ["kimi-k2.5-8xh200", "kimi-k2.5-mla-8xh200", "kimi-k2.5-8xrtxpro6000"])
def test_every_foreign_curve_tells_its_sampling_and_its_rule(tmp_path: Path, name: str) -> None:
    told = [(value, how) for row, value, how in rows(plan(name, tmp_path)) if row == "expected best K"]
    assert len(told) == len(CURVES)
    for (value, how), curve in zip(told, CURVES, strict=True):
        assert f"sampling: {curve.sampling}" in how
        assert f"acceptance: {curve.rule}" in how
        assert "of 0 to 8" in value
    at_floor = [how for row, _, how in rows(plan(name, tmp_path)) if row == "best K at the floor"]
    assert at_floor
    assert all("sampling and acceptance rule are not stated" in how for how in at_floor)


def test_other_targets_and_hosts_are_not_guessed(tmp_path: Path) -> None:
    names = {row for row, _, _ in rows(plan("deepseek-v3-8xh200", tmp_path))}
    assert "byte floor, K = 0" in names
    assert not names & {"expected plain step", "expected best K"}
    assert expected_rounds(plan("kimi-k2.5-8xh200", tmp_path, "host.gpu_bandwidth_tb=null").facts) == ()

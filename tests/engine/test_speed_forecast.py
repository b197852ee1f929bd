"""The incident's arithmetic, which nobody had done: what a round costs, what acceptance must beat, which K to serve."""

import math

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.speed_forecast import (
    RoundCosts,
    SpeedOption,
    break_even,
    chain_accept_length,
    expected_speed,
    needed_conditional,
)

PLAIN_MS = 1000 / 90  # the baseline: 90 tok/s


@pytest.mark.parametrize(
    ("num_steps", "accept_length", "tokens_per_second", "round_ms", "length_to_beat"),
    [(1, 1.6, 56.8, 28.2, 2.54), (5, 1.8, 54.8, 32.8, 2.96), (15, 1.9, 46.7, 40.7, 3.66)],
)
def test_the_incidents_rounds(
    num_steps: int, accept_length: float, tokens_per_second: float, round_ms: float, length_to_beat: float
) -> None:
    measured = 1000 * accept_length / tokens_per_second
    assert measured == pytest.approx(round_ms, abs=0.05)
    assert break_even(measured, PLAIN_MS) == pytest.approx(length_to_beat, abs=0.006)
    option = SpeedOption(num_steps, accept_length, 0.5 * num_steps, measured - 0.5 * num_steps - 1, 1.0, PLAIN_MS)
    assert option.round_ms == pytest.approx(measured)
    assert option.tokens_per_second == pytest.approx(tokens_per_second)
    assert option.ceiling == num_steps + 1
    assert option.can_win is (num_steps > 1)


def test_no_draft_could_have_won_launch_1() -> None:
    costs = RoundCosts(PLAIN_MS, {2: 26.2}, [1.0], 1.0)
    option = expected_speed(costs, {1: 2.0}).at(1)  # a perfect draft
    assert not option.can_win
    assert option.verdict.startswith("no draft can win at this K: break-even 2.54, ceiling 2; ")
    assert option.dearest_term == ("verify", pytest.approx(26.2 - PLAIN_MS))
    assert "the dearest term is verify, 15.1 ms a round beyond a plain step" in option.verdict


def test_the_right_draft_would_have_won_launch_3() -> None:
    """Constant .769 at K = 5: about 104 tok/s, 1.16x."""
    costs = RoundCosts(PLAIN_MS, {6: 25.8}, [1.2] * 5, 1000 * 1.8 / 54.8 - 25.8 - 6)
    option = expected_speed(costs, {5: chain_accept_length(0.769, 5)}).at(5)
    assert option.tokens_per_second == pytest.approx(104.5, abs=0.5)
    assert option.speedup == pytest.approx(1.16, abs=0.005)
    assert option.verdict.startswith("wins 1.16x: accept length 3.43, break-even 2.96, ceiling 6")
    as_served = expected_speed(costs, {5: 1.8}).at(5)
    assert as_served.speedup == pytest.approx(54.8 / 90)
    assert "this draft does not win at this K: accept length 1.80, break-even 2.96, ceiling 6" in as_served.verdict
    assert "conditional acceptance above 0.70" in as_served.verdict


def test_closed_form_of_a_chain() -> None:
    assert chain_accept_length(0.747, 5) == pytest.approx(3.27, abs=0.005)
    assert [round(chain_accept_length(0.747, k), 2) for k in (2, 3, 4, 5, 7)] == [2.31, 2.72, 3.03, 3.27, 3.57]
    # The endless chain without its bonus token is the projection that misled them.
    assert chain_accept_length(0.747, 10_000) - 1 == pytest.approx(0.747 / 0.253)
    assert chain_accept_length(0.75, 5) == pytest.approx(3.29, abs=0.005)


def test_needed_conditional_inverts_the_chain() -> None:
    for k in (1, 3, 7):
        for p in (0.1, 0.5, 0.9):
            assert needed_conditional(chain_accept_length(p, k), k) == pytest.approx(p)
    assert needed_conditional(2.5, 1) is None
    assert needed_conditional(2.0, 1) == pytest.approx(1.0)
    assert needed_conditional(1.6, 5) == pytest.approx(0.38, abs=0.005)


def test_best_k_weighs_length_against_cost() -> None:
    costs = RoundCosts(10.0, {2: 11.0, 3: 12.0, 4: 13.0, 6: 19.0}, [1.0] * 5, 0.5)
    tau = {1: 1.7, 2: 2.2, 3: 2.5, 5: 2.9}
    forecast = expected_speed(costs, tau)
    assert [option.num_steps for option in forecast.options] == [0, 1, 2, 3, 5]
    assert [option.round_ms for option in forecast.options] == pytest.approx([10, 12.5, 14.5, 16.5, 24.5])
    assert forecast.best.num_steps == 2
    assert forecast.best.tokens_per_second == pytest.approx(2200 / 14.5)
    assert forecast.at(0).tokens_per_second == pytest.approx(100)
    assert (forecast.at(0).speedup, forecast.at(0).break_even) == (1.0, 1.0)


def test_speculation_off_when_nothing_beats_it() -> None:
    costs = RoundCosts(10.0, {2: 18.0, 3: 19.0}, [3.0, 3.0], 1.0)
    forecast = expected_speed(costs, {1: 1.9, 2: 2.4})
    assert forecast.best.num_steps == 0
    assert forecast.best.verdict == "speculation off"
    assert not forecast.at(1).can_win
    assert forecast.at(2).can_win
    # At a tie the smaller K is taken: nothing is won by the larger.
    assert expected_speed(RoundCosts(10.0, {2: 15.0}, [0.0], 0.0), {1: 1.5}).best.num_steps == 0


@pytest.mark.parametrize(
    ("draft_ms", "verify_ms", "rest_ms", "term"),
    [(9.0, 12.0, 1.0, "draft"), (1.0, 18.0, 2.0, "verify"), (1.0, 12.0, 6.0, "rest")],
)
def test_the_dearest_term(draft_ms: float, verify_ms: float, rest_ms: float, term: str) -> None:
    assert SpeedOption(1, 1.5, draft_ms, verify_ms, rest_ms, 10.0).dearest_term[0] == term


GOOD = RoundCosts(10.0, {2: 11.0, 3: 12.0}, [1.0], 0.5)


@pytest.mark.parametrize(
    ("costs", "tau", "words"),
    [
        (GOOD, {2: 1.5}, "no measured round for K = 2"),  # one draft time for two steps
        (GOOD, {3: 1.5}, "no measured round for K = 3"),
        (GOOD, {1: 0.9}, "accept length 0.9 at K = 1"),
        (GOOD, {1: 2.1}, "accept length 2.1 at K = 1"),
        (GOOD, {1: math.nan}, "accept length nan at K = 1"),
        (RoundCosts(0.0, {2: 11.0}, [1.0], 0.5), {1: 1.5}, "plain_step_ms is 0.0"),
        (RoundCosts(10.0, {2: math.nan}, [1.0], 0.5), {1: 1.5}, "verify_ms[2] is nan"),
        (RoundCosts(10.0, {2: 11.0}, [-1.0], 0.5), {1: 1.5}, "draft_ms[0] is -1.0"),
        (RoundCosts(10.0, {2: 11.0}, [1.0], math.inf), {1: 1.5}, "rest_ms is inf"),
    ],
)
def test_impossible_figures_are_refused(costs: RoundCosts, tau: dict[int, float], words: str) -> None:
    with pytest.raises(SlipstreamError) as caught:
        expected_speed(costs, tau)
    assert words in str(caught.value)
    assert caught.value.expected
    assert caught.value.do

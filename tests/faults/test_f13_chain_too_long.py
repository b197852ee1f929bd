"""F13: a chain too long, or a round too dear, for the measured acceptance. Caught where K is chosen, before launch."""

from slipstream.engine.speed_forecast import expected_speed
from slipstream.tasks import tune
from slipstream.tasks.round_costs import RoundTime, costs_of, losing_term

CAUGHT = [
    ("F13", "tune", "the long chain is not chosen; no draft can win at this K, and the term that costs"),
]

TAU = {k: 1 + sum(0.45**i for i in range(1, k + 1)) for k in range(1, 9)}  # a weak draft: 1.45 ... 1.82


def probes(verify=11.0, draft=1.5, plain=10.0):
    return [RoundTime(0, 0.0, plain, 0.0, 50)] + [RoundTime(k, draft * k, verify, 0.5, 50) for k in TAU]


def test_f13_the_long_chain_is_not_chosen():
    forecast = expected_speed(costs_of(probes()), TAU)
    choice = tune.choose(forecast, probes())
    assert 0 < choice["num_steps"] < 8
    assert forecast.at(8).speedup < forecast.at(choice["num_steps"]).speedup
    # Whoever takes the longest chain, as launch 2 of the incident did, is slower than without speculation.
    assert forecast.at(8).speedup < 1


def test_f13_a_dear_round_turns_speculation_off_and_names_its_term():
    dear = probes(verify=28.0)
    forecast = expected_speed(costs_of(dear), TAU)
    choice = tune.choose(forecast, dear)
    assert choice["num_steps"] == 0
    assert "verify" in choice["why"]
    shortest = forecast.at(1)
    assert not shortest.can_win  # break-even above K + 1: no draft could
    assert "no draft can win" in losing_term(shortest).why


def test_f13_passes_when_k_is_pinned():
    """Nothing is chosen then; the gate after the benchmark (F18) is what is left."""
    assert tune._pinned(8)["num_steps"] == 8

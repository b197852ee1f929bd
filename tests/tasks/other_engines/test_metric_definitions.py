"""What a rate means: one formula per engine and version, each the inverse of itself, everything else refused."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slipstream.engine.engine_versions import Engine
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.other_engines.metric_definitions import (
    ACCEPTED_OVER_PROPOSED,
    LENGTH_OVER_WIDTH,
    REQUEST_KEYS,
    SGLANG_DEFINITIONS,
    accept_length_from_rate,
    rate_definition,
)

definitions = st.sampled_from(SGLANG_DEFINITIONS)


@st.composite
def rounds(draw):
    """(accepted drafts of each round, K)."""
    k = draw(st.integers(1, 15))
    return draw(st.lists(st.integers(0, k), min_size=1, max_size=60)), k


@given(rounds())
def test_the_formulas_against_counting(case):
    """Both definitions from single rounds, as the engines count them."""
    accepted, k = case
    length = sum(a + 1 for a in accepted) / len(accepted)
    older = sum(a + 1 for a in accepted) / (len(accepted) * (k + 1))
    newer = sum(accepted) / (len(accepted) * k)
    assert LENGTH_OVER_WIDTH.rate(length, k + 1) == pytest.approx(older)
    assert ACCEPTED_OVER_PROPOSED.rate(length, k + 1) == pytest.approx(newer)
    for definition in SGLANG_DEFINITIONS:
        rate = definition.rate(length, k + 1)
        assert definition.accept_length(rate, k + 1) == pytest.approx(length)
        assert definition.acceptance_rate(rate, k + 1) == pytest.approx(newer)


@given(definitions, rounds())
def test_printed_pairs_always_allow_the_width_that_made_them(definition, case):
    accepted, k = case
    length = 1 + sum(accepted) / len(accepted)
    low, high = definition.width_range(round(length, 2), round(definition.rate(length, k + 1), 2), 0.005)
    assert low - 1e-9 <= k + 1 <= high + 1e-9


@given(definitions, st.floats(1.0, 2.0))
def test_nothing_proposed_has_no_rate(definition, length):
    with pytest.raises(ValueError, match="nothing is proposed"):
        definition.rate(length, 1)


def test_the_incident_s_rates():
    """12 % and 30 % are length / width; the same runs under the newer definition, and what p = 0.75 would give."""
    assert f"{LENGTH_OVER_WIDTH.rate(1.9, 16):.0%} {LENGTH_OVER_WIDTH.rate(1.8, 6):.0%}" == "12% 30%"
    assert f"{ACCEPTED_OVER_PROPOSED.rate(1.9, 16):.0%} {ACCEPTED_OVER_PROPOSED.rate(1.8, 6):.0%}" == "6% 16%"
    assert f"{LENGTH_OVER_WIDTH.rate(3.29, 6):.0%}" == "55%"
    assert LENGTH_OVER_WIDTH.rate(1.0, 4) == 0.25  # a draft of which nothing is accepted


@pytest.mark.parametrize(
    ("version", "definition"),
    [
        ("0.5.4", LENGTH_OVER_WIDTH),
        ("0.5.9", LENGTH_OVER_WIDTH),
        ("v0.5.10", LENGTH_OVER_WIDTH),
        ("0.5.10.post1", LENGTH_OVER_WIDTH),
        ("0.5.11", ACCEPTED_OVER_PROPOSED),
        ("0.5.14", ACCEPTED_OVER_PROPOSED),
        ("0.5.23", ACCEPTED_OVER_PROPOSED),
    ],
)
def test_sglang_by_version(version, definition):
    assert rate_definition(Engine.SGLANG, version) is definition


@pytest.mark.parametrize(
    ("engine", "version", "topk", "words"),
    [
        (Engine.SGLANG, None, 1, "version unknown"),
        (Engine.SGLANG, "nightly", 1, "a nightly build"),
        (Engine.SGLANG, "0.5.9+patched", 1, "a local build"),
        (Engine.SGLANG, "0.5.11rc1", 1, "a pre-release"),
        (Engine.SGLANG, "0.5.24", 1, "no source of that release was read"),
        (Engine.SGLANG, "0.5.3", 1, "no source of that release was read"),
        (Engine.SGLANG, "0.5.14", 4, "a tree"),
        (Engine.VLLM, "0.6.3", 1, "no source of that release was read"),
        (Engine.VLLM, None, 1, "version unknown"),
    ],
)
def test_everything_else_is_refused(engine, version, topk, words):
    with pytest.raises(SlipstreamError) as error:
        rate_definition(engine, version, topk)
    assert error.value.fault == "F12"
    assert words in str(error.value)
    assert "--engine-version" in error.value.do


def test_a_rate_without_its_width_is_refused():
    assert accept_length_from_rate(Engine.SGLANG, "0.5.9", 0.8, 2) == pytest.approx(1.6)
    for width in (None, 1):
        with pytest.raises(SlipstreamError, match="verify width"):
            accept_length_from_rate(Engine.SGLANG, "0.5.9", 0.8, width)


def test_a_release_has_one_set_of_request_keys():
    names = [name for keys in REQUEST_KEYS for name in (keys.accepted, keys.proposed)]
    assert len(set(names)) == len(names)


@given(definitions, st.integers(2, 16), st.floats(0.05, 1.0))
def test_widths_grow_without_bound_as_a_rate_nears_zero(definition, width, share):
    length = 1 + share * (width - 1)
    assume(definition.rate(length, width) > 0.02)
    assert definition.width_range(length, 0.0, 0.005)[1] == math.inf

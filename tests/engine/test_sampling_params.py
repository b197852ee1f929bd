"""Every bad parameter is refused by name and value."""

import math
from typing import Any

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.sampling_params import MAX_LOGPROBS, SamplingParams

BAD: list[tuple[str, list[Any]]] = [
    ("temperature", [-0.1, math.nan, math.inf, 10**400, 1e-5, True, "1", None]),
    ("top_k", [-1, 1.5, True, None, 2**63]),
    ("top_p", [0, 0.0, -0.2, 1.0001, 10**400, math.nan, math.inf, True, None]),
    ("seed", [1.0, True, "7", 2**63, -(2**63) - 1]),
    ("max_tokens", [0, -3, 1.0, True, None]),
    ("stop_token_ids", [[1, 2], (1, -2), (1.0,), 5, (True,)]),
    ("ignore_eos", [0, 1, None, "yes"]),
    ("logprobs", [-1, MAX_LOGPROBS + 1, True, 2.0]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SlipstreamError) as caught:
        SamplingParams(**{name: value}).validate()
    assert f"{name} = {value!r} is not supported" in str(caught.value)
    assert caught.value.expected
    assert name in caught.value.do


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1, top_p=1, top_k=0),
        SamplingParams(temperature=0.001, top_p=1e-9, top_k=1, seed=-(2**63)),
        SamplingParams(temperature=50.0, seed=2**63 - 1, max_tokens=1, stop_token_ids=(0, 2), logprobs=0),
        SamplingParams(ignore_eos=True, logprobs=MAX_LOGPROBS),
    ],
)
def test_good_values_pass_unchanged(params: SamplingParams) -> None:
    assert params.validate() is params


def test_a_seed_is_drawn_once() -> None:
    drawn = SamplingParams(temperature=1.0).with_seed()
    assert drawn.seed is not None
    assert drawn.validate().with_seed() is drawn
    assert SamplingParams(temperature=1.0).with_seed().seed != drawn.seed
    assert SamplingParams(seed=0).with_seed().seed == 0


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=0.001).is_greedy

"""The capture plan names slots; nothing is ever picked by position."""

import pytest
import torch

from slipstream.engine.capture import CapturePlan, default_slots, slot_name
from slipstream.engine.errors import SlipstreamError


def states(num_layers: int) -> dict[str, torch.Tensor]:
    return {slot_name(k): torch.full((2, 3), float(k)) for k in range(num_layers + 1)}


def test_features_follow_the_order_of_the_plan():
    plan = CapturePlan(slots=(27, 0, 15), num_layers=30)
    features = plan.select(states(30))  # 3 x [2, 3] -> [2, 9]
    assert features[0].tolist() == [27.0] * 3 + [0.0] * 3 + [15.0] * 3


def test_a_missing_slot_is_named():
    plan = CapturePlan(slots=(0, 3, 31), num_layers=61)
    held = {slot_name(k): torch.zeros(1, 1) for k in (3, 31, 59)}
    with pytest.raises(KeyError, match="slot_0"):
        plan.select(held)


def test_plans_compare_by_name_and_order():
    assert CapturePlan((0, 3, 31), 61) != CapturePlan((3, 31, 59), 61)
    assert CapturePlan((0, 3, 31), 61) != CapturePlan((3, 0, 31), 61)


@pytest.mark.parametrize("slots", [(2, 15, 31), (-1, 2, 3), (2, 2, 3)])
def test_slots_that_cannot_be_are_refused(slots):
    with pytest.raises(ValueError, match="slot") as error:
        CapturePlan(slots, num_layers=30)
    assert isinstance(error.value, SlipstreamError)  # the server prints it without a traceback


def test_teacher_is_the_state_before_the_final_norm():
    assert CapturePlan((2, 15, 27), 30).teacher == 30


@pytest.mark.parametrize(("num_layers", "expected"), [(32, (2, 16, 29)), (61, (2, 30, 58)), (30, (2, 15, 27))])
def test_default_slots_are_those_of_vllm_and_sglang(num_layers, expected):
    assert default_slots(num_layers) == expected

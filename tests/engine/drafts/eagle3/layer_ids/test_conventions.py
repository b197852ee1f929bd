"""How trainers and libraries number states: the fact sheets' table, and there and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.drafts.eagle3.layer_ids import CONVENTIONS
from slipstream.engine.errors import SlipstreamError

SLOTS = st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True).map(lambda s: tuple(sorted(s)))


@given(name=st.sampled_from(sorted(CONVENTIONS)), slots=SLOTS)
def test_conventions_there_and_back(name, slots):
    convention = CONVENTIONS[name]
    try:
        ids = convention.ids(slots, 20)
    except SlipstreamError:
        return
    assert convention.slots(ids, 20) == slots


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("slipstream", (2, 30, 58)),
        ("eagle", (2, 30, 58)),
        ("huggingface", (2, 30, 58)),
        ("specforge", (1, 29, 57)),
        ("vllm", (2, 30, 58)),
        ("vllm-dflash", (1, 29, 57)),
        ("speculators", (2, 30, 58, 61)),
        ("modelopt", (1, 29, 57)),
    ],
)
def test_the_same_three_tensors(name, ids):
    assert CONVENTIONS[name].slots(ids, 61) == (2, 30, 58)
    assert CONVENTIONS[name].ids((2, 30, 58), 61) == ids


def test_modelopt_through_vllm_is_off_by_one():
    """Its offline dumper hands its own numbers to vLLM as they are."""
    assert CONVENTIONS["modelopt-vllm-dump"].slots((1, 29, 57), 61) == (1, 29, 57)
    assert [c.name for c in CONVENTIONS.values() if not c.verified] == ["modelopt-vllm-dump"]


def test_transformers_last_state_is_normed():
    with pytest.raises(SlipstreamError, match="no number for slots") as caught:
        CONVENTIONS["huggingface"].ids((2, 30, 61), 61)
    assert "after the final norm" in caught.value.expected
    assert CONVENTIONS["vllm"].ids((2, 30, 61), 61) == (2, 30, 61)


def test_speculators_without_the_teacher():
    """The last feature would be taken for the teacher."""
    with pytest.raises(SlipstreamError, match="do not end with 61"):
        CONVENTIONS["speculators"].slots((2, 30, 58), 61)


@pytest.mark.parametrize("name", ["specforge", "modelopt"])
def test_trainers_that_number_outputs_have_no_number_for_the_embedding(name):
    with pytest.raises(SlipstreamError, match="no number for slots") as caught:
        CONVENTIONS[name].ids((0, 3, 31), 61)
    assert "embedding" in caught.value.expected
    with pytest.raises(SlipstreamError):
        CONVENTIONS[name].slots((-1, 2, 30), 61)  # launch 3's ids

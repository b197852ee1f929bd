"""Layer ids: one table, held against what the two engines' sources do with a list of ids."""

import pytest

from slipstream.engine.drafts.eagle3.layer_ids import Engine, Family, family_of, reading
from slipstream.engine.errors import SlipstreamError

VLLM, SGLANG, LLAMA, DEEPSEEK = Engine.VLLM, Engine.SGLANG, Family.LLAMA, Family.DEEPSEEK


@pytest.mark.parametrize(
    ("engine", "version", "family", "ids", "slots"),
    [
        (VLLM, "0.24.0", LLAMA, [2, 16, 29], (2, 16, 29)),
        (VLLM, "0.24.0", DEEPSEEK, [2, 30, 58], (2, 30, 58)),
        (SGLANG, "0.5.14", LLAMA, [1, 15, 28], (2, 16, 29)),
        (SGLANG, "0.5.14", LLAMA, [2, 16, 29], (3, 17, 30)),  # vLLM's ids are off by one here
        (SGLANG, "0.5.14", DEEPSEEK, [1, 29, 57], (2, 30, 58)),
        (SGLANG, "0.5.14", DEEPSEEK, [2, 30, 58], (2, 30, 58)),  # as they stand: the first is not 1
        (SGLANG, "0.5.12.post1", DEEPSEEK, [2, 30, 58], (3, 31, 59)),  # the incident's shift
        (SGLANG, "0.5.13", DEEPSEEK, [2, 30, 58], (2, 30, 58)),
        (SGLANG, "0.5.9", DEEPSEEK, [1, 29, 57], (2, 30, 58)),
    ],
)
def test_what_an_engine_captures(engine, version, family, ids, slots):
    assert reading(engine, version, family).slots(ids) == slots


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize(("engine", "version"), [(VLLM, "0.24.0"), (SGLANG, "0.5.12"), (SGLANG, "0.5.14")])
@pytest.mark.parametrize("slots", [(2, 15, 27), (2, 30, 58), (3, 31, 59), (1, 2), (5,)])
def test_ids_are_read_back_as_the_slots(engine, version, family, slots):
    rule = reading(engine, version, family)
    if slots[0] == 1 and engine is SGLANG and family is DEEPSEEK and version == "0.5.14":
        with pytest.raises(SlipstreamError, match="reads no list of ids as slots") as caught:
            rule.ids(slots, 61)
        assert caught.value.fault == "F4"
        return
    assert rule.slots(rule.ids(slots, 61)) == slots


def test_the_written_list_means_the_same_to_every_sglang():
    ids = reading(SGLANG, "0.5.14", DEEPSEEK).ids((2, 30, 58), 61)
    assert ids == (1, 29, 57)
    assert reading(SGLANG, "0.5.12", DEEPSEEK).slots(ids) == (2, 30, 58)


@pytest.mark.parametrize(
    ("engine", "family", "slots"),
    [(SGLANG, LLAMA, (0, 3, 31)), (SGLANG, LLAMA, (3, 61)), (VLLM, DEEPSEEK, (0, 3, 31)), (VLLM, DEEPSEEK, (3, 61))],
)
def test_slots_that_an_engine_cannot_capture(engine, family, slots):
    with pytest.raises(SlipstreamError, match="cannot capture slots") as caught:
        reading(engine, "0.24.0" if engine is VLLM else "0.5.14", family).ids(slots, 61)
    assert caught.value.fault == "F4"
    assert reading(VLLM, "0.24.0", LLAMA).ids(slots, 61) == slots  # vLLM's Llama takes 0..N


def test_slots_out_of_layer_order_are_refused():
    with pytest.raises(SlipstreamError, match="not in rising order") as caught:
        reading(VLLM, "0.24.0", LLAMA).ids((31, 3, 59), 61)
    assert caught.value.fault == "F3"


def test_families():
    assert {t: family_of(t) for t in ("llama", "qwen3", "deepseek_v3", "kimi_k2", "kimi_k25")} == {
        "llama": LLAMA,
        "qwen3": LLAMA,
        "deepseek_v3": DEEPSEEK,
        "kimi_k2": DEEPSEEK,
        "kimi_k25": DEEPSEEK,
    }


def test_a_version_that_is_no_release_is_refused():
    with pytest.raises(SlipstreamError, match="nightly"):
        reading(SGLANG, "nightly", DEEPSEEK)

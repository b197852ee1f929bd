"""Layer ids: the table against the fact sheets, row by row and by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.drafts.eagle3.layer_ids import (
    Engine,
    Family,
    Runner,
    default_runner,
    family_of,
    reading,
    who_can,
)
from slipstream.engine.engine_versions import READ, READ_IN_PART, Version
from slipstream.engine.errors import SlipstreamError

VLLM, SGLANG = Engine.VLLM, Engine.SGLANG
LLAMA, QWEN2, QWEN3, QWEN3_MOE = Family.LLAMA, Family.QWEN2, Family.QWEN3, Family.QWEN3_MOE
GPT_OSS, DEEPSEEK, KIMI_K25 = Family.GPT_OSS, Family.DEEPSEEK, Family.KIMI_K25
SGLANG_READ = sorted((*READ[SGLANG], *READ_IN_PART[SGLANG]), key=Version.parse)

UP_TO_0512 = ("0.5.9", "0.5.10.post1", "0.5.11", "0.5.12.post1")
SINCE_0513 = ("0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.17", "0.5.19", "0.5.21", "0.5.22", "0.5.23")
SINCE_0514 = SINCE_0513[1:]
ALL = (*UP_TO_0512, *SINCE_0513)


def test_all_releases_of_the_sheet_are_here():
    assert list(ALL) == SGLANG_READ


# What a list of ids names: (families, versions, layers, ids, slots).
NAMED = [
    # Kimi-K2.5 and DeepSeek, 61 layers: the version matrix and the two consequences below it.
    ((DEEPSEEK, KIMI_K25), UP_TO_0512[1:], 61, (2, 30, 58), (3, 31, 59)),
    ((DEEPSEEK, KIMI_K25), SINCE_0513, 61, (2, 30, 58), (2, 30, 58)),
    ((DEEPSEEK, KIMI_K25), ALL[1:], 61, (1, 29, 57), (2, 30, 58)),
    ((DEEPSEEK,), ("0.5.9",), 61, (2, 30, 58), (3, 31, 59)),
    ((DEEPSEEK,), UP_TO_0512, 61, (0, 3, 31), (1, 4, 32)),  # id 0 silently becomes 1
    ((DEEPSEEK, KIMI_K25), UP_TO_0512[1:], 61, (-1, 2, 30), (0, 3, 31)),
    ((DEEPSEEK, KIMI_K25), SINCE_0513, 61, (0, 3, 31), (0, 3, 31)),
    ((DEEPSEEK, KIMI_K25), SINCE_0513, 61, (-1, 2, 30), (-1, 2, 30)),  # launch 3's ids, where nothing is added
    # Llama, Qwen: always one more. SpecForge's (1, n // 2 - 1, n - 4) makes use of it.
    ((LLAMA, QWEN2, QWEN3, QWEN3_MOE), ALL, 32, (1, 15, 28), (2, 16, 29)),
    ((LLAMA, QWEN2, QWEN3, QWEN3_MOE), ALL, 32, (2, 16, 29), (3, 17, 30)),
    ((LLAMA, QWEN2, QWEN3, QWEN3_MOE), ALL, 32, (-1, 2, 14), (0, 3, 15)),
    # gpt-oss, 36 layers: one more unless the largest id is N, and that only since 0.5.17.
    ((GPT_OSS,), ALL, 36, (1, 17, 32), (2, 18, 33)),
    ((GPT_OSS,), ("0.5.17", "0.5.19", "0.5.21", "0.5.22", "0.5.23"), 36, (2, 18, 36), (2, 18, 36)),
    ((GPT_OSS,), ALL[:7], 36, (2, 18, 36), (3, 19, 37)),
]


@pytest.mark.parametrize(("families", "versions", "layers", "ids", "slots"), NAMED)
def test_what_sglang_takes_ids_for(families, versions, layers, ids, slots):
    for family in families:
        for version in versions:
            assert reading(SGLANG, version, family).slots(ids, layers) == slots, (family, version)


@pytest.mark.parametrize("family", [LLAMA, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK, KIMI_K25])
@pytest.mark.parametrize("ids", [(2, 16, 29), (1, 15, 28), (0, 3, 15)])
def test_vllm_takes_ids_as_they_are(family, ids):
    assert reading(VLLM, "0.24.0", family).slots(ids, 32) == ids
    assert reading(VLLM, "v0.24.0", family, Runner.V1).slots(ids, 32) == ids


# What comes of the two ends: (engine, families, versions, slot 0, slot N); "" = captured.
STOPS, MISSED, OVERWRITTEN, NO_LAYER = "no residual yet", "one state short", "another state", "no such layer"
ENDS = [
    (VLLM, (LLAMA, QWEN2, QWEN3, QWEN3_MOE), ("0.24.0",), "", ""),
    (VLLM, (DEEPSEEK, KIMI_K25), ("0.24.0",), STOPS, MISSED),
    (SGLANG, (LLAMA,), ALL[:10], STOPS, MISSED),
    (SGLANG, (LLAMA,), ("0.5.22", "0.5.23"), "", MISSED),
    (SGLANG, (QWEN2, QWEN3), ALL[:9], OVERWRITTEN, MISSED),
    (SGLANG, (QWEN2, QWEN3), ("0.5.21", "0.5.22", "0.5.23"), "", MISSED),
    (SGLANG, (QWEN3_MOE,), ALL, "", NO_LAYER),
    (SGLANG, (GPT_OSS,), ALL[:7], STOPS, MISSED),
    (SGLANG, (GPT_OSS,), ("0.5.17", "0.5.19"), OVERWRITTEN, ""),
    (SGLANG, (GPT_OSS,), ("0.5.21", "0.5.22", "0.5.23"), "", ""),
    (SGLANG, (DEEPSEEK,), ALL[:5], STOPS, MISSED),
    (SGLANG, (DEEPSEEK, KIMI_K25), SINCE_0514, "", MISSED),
]


@pytest.mark.parametrize(("engine", "families", "versions", "first", "last"), ENDS)
def test_the_two_ends(engine, families, versions, first, last):
    """An end that is not captured is refused by name when ids are asked for, with the engines that capture it."""
    for family in families:
        for version in versions:
            rule = reading(engine, version, family)
            for slot, outcome in ((0, first), (40, last)):
                slots = tuple(sorted({slot, 3, 20}))
                if outcome:
                    with pytest.raises(SlipstreamError, match=outcome) as caught:
                        rule.ids(slots, 40)
                    assert caught.value.fault == "F4"
                    assert f"cannot capture slots [{slot}]" in caught.value.found
                    assert "Slipstream's own engine" in caught.value.do
                else:
                    assert rule.slots(rule.ids(slots, 40), 40) == slots


def test_the_table_of_ends_is_whole():
    rows = {(e, f, v) for e, families, versions, *_ in ENDS for f in families for v in versions}
    sglang = {(SGLANG, f, v) for f in Family for v in ALL}
    # Kimi-K2.5 until 0.5.13: at 0.5.9 not at all (below), then as DeepSeek.
    assert sglang - rows == {(SGLANG, KIMI_K25, v) for v in ALL[:5]}
    for version in ALL[1:5]:
        assert reading(SGLANG, version, KIMI_K25).rule == reading(SGLANG, version, DEEPSEEK).rule


def test_who_captures_the_embedding():
    """A head trained on [embedding, 3, 31] of Kimi-K2.5 and one on [embedding, 3, 15] of a Llama."""
    own, read = "Slipstream's own engine, which captures by name", " (as read in its source, not run)"
    assert who_can((0, 3, 31), 61, KIMI_K25) == [f"SGLang 0.5.14 to 0.5.23 with eagle_config ids [0, 3, 31]{read}", own]
    assert who_can((0, 3, 15), 30, LLAMA) == [
        f"vLLM 0.24.0 with top-level ids [0, 3, 15]{read}",
        f"SGLang 0.5.22 to 0.5.23 with eagle_config ids [-1, 2, 14]{read}",
        own,
    ]
    assert who_can((3, 18, 36), 36, GPT_OSS) == [
        f"SGLang 0.5.17 to 0.5.23 with eagle_config ids [2, 17, 35]{read}",
        own,
    ]
    assert who_can((3, 0, 15), 30, LLAMA) == [own]  # out of order: they concatenate by layer
    assert who_can((3, 31, 59), 61, KIMI_K25) == [  # graphs of 0.5.10 do not
        "vLLM 0.24.0 with top-level ids [3, 31, 59]",
        "SGLang 0.5.11 to 0.5.12.post1 with eagle_config ids [2, 30, 58]",
        "SGLang 0.5.13.post1 to 0.5.23 with eagle_config ids [3, 31, 59]",
        own,
    ]


def test_kimi_k25_on_sglang_0_5_9():
    with pytest.raises(SlipstreamError, match=r"SGLang 0\.5\.9 captures no states of kimi_k25 targets") as caught:
        reading(SGLANG, "0.5.9", KIMI_K25)
    assert caught.value.fault == "F4"
    assert "0.5.10.post1" in caught.value.do


def test_gpt_oss_on_vllm_was_not_read():
    with pytest.raises(SlipstreamError, match="was not read"):
        reading(VLLM, "0.24.0", GPT_OSS)


@pytest.mark.parametrize(
    ("version", "family", "slots"),
    [
        ("0.5.10", LLAMA, (3, 17, 30)),
        ("0.5.12", DEEPSEEK, (3, 17, 30)),
        ("0.5.18", DEEPSEEK, (2, 16, 29)),
    ],
)
def test_between_two_releases_that_agree(version, family, slots):
    assert reading(SGLANG, version, family).slots((2, 16, 29), 32) == slots


@pytest.mark.parametrize(
    ("engine", "version", "family", "words"),
    [
        (SGLANG, "0.5.13", DEEPSEEK, "changed between SGLang 0.5.12.post1 and 0.5.13.post1, and 0.5.13 lies between"),
        (SGLANG, "0.5.16", GPT_OSS, "changed between SGLang 0.5.15.post1 and 0.5.17"),
        (SGLANG, "0.5.10", KIMI_K25, "changed between SGLang 0.5.9 and 0.5.10.post1"),
        (SGLANG, "0.5.20", QWEN3, "changed between SGLang 0.5.19 and 0.5.21"),
        (SGLANG, "0.5.24", LLAMA, "newer than every release"),
        (SGLANG, "nightly", DEEPSEEK, "a nightly build"),
        (VLLM, "0.25.0", LLAMA, "newer than every release"),
    ],
)
def test_versions_that_nobody_read(engine, version, family, words):
    with pytest.raises(SlipstreamError, match=words) as caught:
        reading(engine, version, family)
    assert caught.value.fault == "F20"


# --- which key an engine reads, and its defaults (T2, T3, T5) ---

TOP, NESTED = (2, 16, 29), (1, 15, 28)


@pytest.mark.parametrize(
    ("engine", "runner", "top", "nested", "slots"),
    [
        (VLLM, Runner.V2, (3, 8, 13), None, (3, 8, 13)),
        (VLLM, Runner.V2, (3, 8, 13), (1, 7, 12), (3, 8, 13)),
        (VLLM, Runner.V2, None, (2, 8, 13), (2, 16, 29)),  # nested only: runner V2 takes its defaults, without a word
        (VLLM, Runner.V1, None, (2, 8, 13), (2, 8, 13)),
        (VLLM, Runner.V1, (3, 8, 13), (1, 7, 12), (3, 8, 13)),
        (VLLM, Runner.V1, (), (2, 8, 13), (2, 8, 13)),
        (VLLM, Runner.V2, (), None, (2, 16, 29)),
        (VLLM, Runner.V1, None, None, (2, 16, 29)),
        (SGLANG, None, (3, 8, 13), None, (2, 16, 29)),  # a top-level key merely sizes fc
        (SGLANG, None, (3, 8, 13), (1, 7, 12), (2, 8, 13)),
        (SGLANG, None, None, None, (2, 16, 29)),
        (SGLANG, None, TOP, NESTED, (2, 16, 29)),  # both engines from one file
        (VLLM, Runner.V2, TOP, NESTED, (2, 16, 29)),
    ],
)
def test_which_ids_are_read(engine, runner, top, nested, slots):
    version = "0.24.0" if engine is VLLM else "0.5.14"
    captured = reading(engine, version, LLAMA, runner).capture(top, nested, 32)
    assert (captured.slots, captured.problems) == (slots, ())


@pytest.mark.parametrize(("layers", "slots"), [(32, (2, 16, 29)), (61, (2, 30, 58)), (30, (2, 15, 27))])
def test_defaults_are_the_same_for_all(layers, slots):
    for version in ALL[1:]:
        for family in Family:
            assert reading(SGLANG, version, family).capture(None, None, layers).slots == slots


def test_the_reasons_are_told():
    v2 = reading(VLLM, "0.24.0", LLAMA, Runner.V2).capture(None, (2, 8, 13), 32)
    assert v2.where == "its defaults, without top-level ids, and runner V2 does not read eagle_config ids [2, 8, 13]"
    sglang = reading(SGLANG, "0.5.14", LLAMA)
    assert "an empty list" in sglang.capture((0, 3, 15), (), 32).problems[0]
    assert "captured once" in sglang.capture(None, (1, 1, 15), 32).problems[0]
    assert sglang.capture(None, (1, 1, 15), 32).slots == (2, 16)
    assert sglang.capture(None, (28, 1, 15), 32).slots == (2, 16, 29)  # by layer, whatever the order in the config
    assert sglang.capture(TOP, NESTED, 32, captures=False).slots == ()


@pytest.mark.parametrize("version", ALL)
def test_graphs_of_old_versions_capture_the_defaults(version):
    """0.5.9 and 0.5.10 with [2, 30, 58]: eager prefill took 3, 31, 59, the verify in a graph 2, 30, 58."""
    captured = reading(SGLANG, version, DEEPSEEK).capture(None, (2, 30, 58), 61)
    if version in ("0.5.9", "0.5.10.post1"):
        assert (captured.slots, captured.in_graphs) == ((3, 31, 59), (2, 30, 58))
    else:
        assert captured.in_graphs is None
    assert reading(SGLANG, version, DEEPSEEK).capture(None, (1, 29, 57), 61).in_graphs is None


@pytest.mark.parametrize(
    ("architecture", "runner"),
    [
        *((name, Runner.V2) for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")),
        *((name, Runner.V2) for name in ("Qwen2MoeForCausalLM", "GraniteMoeForCausalLM", "DeepseekV2ForCausalLM")),
        *((name, Runner.V1) for name in ("KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM")),
        *((name, Runner.V1) for name in ("Qwen3MoeForCausalLM", "Qwen2ForCausalLM")),
    ],
)
def test_default_runners(architecture, runner):
    assert default_runner(architecture) is runner


SLOTS = st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True).map(lambda s: tuple(sorted(s)))
READINGS = [
    (engine, version, family)
    for engine, versions in ((SGLANG, ALL), (VLLM, ("0.24.0",)))
    for version in versions
    for family in Family
    if not (family is KIMI_K25 and version == "0.5.9") and not (family is GPT_OSS and engine is VLLM)
]


@given(which=st.sampled_from(READINGS), slots=SLOTS)
def test_there_and_back(which, slots):
    rule = reading(*which)
    able = rule.able(slots, 20)
    try:
        ids = rule.ids(slots, 20)
    except SlipstreamError:
        assert able is None
        return
    assert able in (ids, None)  # None: only without CUDA graphs
    assert able == ids or rule.rule.graphs_ignore_ids
    assert rule.slots(ids, 20) == slots
    captured = rule.capture(ids, ids, 20)
    assert (captured.slots, captured.problems) == (slots, ())


def test_slots_out_of_layer_order_are_refused():
    with pytest.raises(SlipstreamError, match="not in rising order") as caught:
        reading(VLLM, "0.24.0", LLAMA).ids((31, 3, 59), 61)
    assert caught.value.fault == "F3"


def test_a_first_slot_1_cannot_be_told():
    with pytest.raises(SlipstreamError, match="reads no list of ids as slots") as caught:
        reading(SGLANG, "0.5.14", DEEPSEEK).ids((1, 30, 58), 61)
    assert caught.value.fault == "F4"
    assert "SGLang 0.5.11 to 0.5.12.post1 with eagle_config ids [0, 29, 57]" in caught.value.do


def test_families():
    names = {
        LLAMA: ("llama", "LlamaForCausalLM", "MistralForCausalLM"),
        QWEN2: ("qwen2", "Qwen2ForCausalLM"),
        QWEN3: ("qwen3", "Qwen3ForCausalLM"),
        QWEN3_MOE: ("qwen3_moe", "Qwen3MoeForCausalLM"),
        GPT_OSS: ("gpt_oss", "GptOssForCausalLM"),
        DEEPSEEK: ("deepseek_v3", "kimi_k2", "DeepseekV3ForCausalLM"),
        KIMI_K25: ("kimi_k25", "KimiK25ForConditionalGeneration"),
    }
    assert {n: family_of(n) for ns in names.values() for n in ns} == {n: f for f, ns in names.items() for n in ns}
    with pytest.raises(SlipstreamError, match="Gemma3ForCausalLM is not known"):
        family_of("Gemma3ForCausalLM")

"""Drafts of Kimi-K2.5 as others publish them: both kinds, three forms of ids, and what has no network here."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.drafts.eagle3.hf_config import read_config
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.draft_facts import read_draft

IDS = "eagle_aux_hidden_state_layer_ids"
LAYERS = 61
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 262144,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
}
SCALING = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0}
MLA = {key: value for key, value in LLAMA.items() if key != "head_dim"} | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_scaling": SCALING | {"mscale": 1.0, "mscale_all_dim": 1.0},
    # what else published files of this kind hold, and what changes nothing
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
}
NESTED = {"use_aux_hidden_state": True, "use_last_layernorm": True, "use_mtp_layernorm": False}


def save(directory: Path, value: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(value))
    return directory


def read(directory: Path, value: dict[str, Any], family: Family = Family.KIMI_K25, **named: Any) -> tuple[int, ...]:
    return read_config(save(directory, value), target_num_layers=LAYERS, family=family, **named).slots


@pytest.mark.parametrize(
    ("form", "slots"),
    [
        ({"eagle_config": {IDS: [2, 30, 58], "use_aux_hidden_state": True}}, (2, 30, 58)),
        ({IDS: [2, 30, 58]}, (2, 30, 58)),
        ({}, (2, 30, 58)),  # none: what both engines take
        ({IDS: [3, 20, 40], "eagle_config": {IDS: [3, 20, 40]}}, (3, 20, 40)),
        ({IDS: [2, 30, 58], "eagle_config": {IDS: [1, 29, 57]}}, (2, 30, 58)),  # first id 1: SGLang adds 1
    ],
)
@pytest.mark.parametrize("family", [Family.KIMI_K25, Family.DEEPSEEK])
@pytest.mark.parametrize("kind", [LLAMA, MLA], ids=["grouped", "latent"])
def test_three_forms_of_ids(
    tmp_path: Path, kind: dict[str, Any], form: dict[str, Any], slots: tuple[int, ...], family: Family
) -> None:
    assert read(tmp_path, kind | form, family) == slots


@pytest.mark.parametrize("architecture", ["Eagle3DeepseekV2ForCausalLM", "DeepseekV3ForCausalLMEagle3"])
def test_shapes_of_latent_attention(tmp_path: Path, architecture: str) -> None:
    value = MLA | {"architectures": [architecture], "eagle_config": NESTED | {IDS: [2, 30, 58]}, "fc_norm": True}
    config = read_config(save(tmp_path, value), target_num_layers=LAYERS, family=Family.KIMI_K25)
    latent = config.latent
    assert latent is not None
    assert (latent.q_rank, latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.value_dim) == (
        *(1536, 512),
        *(128, 64, 128),
    )
    assert latent.scale == pytest.approx(0.14468, rel=1e-4)  # as the target's
    assert (config.num_kv_heads, config.head_dim, config.rope_dim) == (64, 192, 64)
    assert config.rope_scaling == MLA["rope_scaling"]
    assert (config.fc_norm, config.norm_output, config.draft_vocab_size) == (True, False, 163840)
    facts = read_draft(tmp_path)
    assert facts is not None
    assert facts.problem == ""
    assert facts.nested_ids == (2, 30, 58)


def test_the_older_word_for_a_norm_a_slot(tmp_path: Path) -> None:
    """SGLang takes it, too; without a norm its tensors would be left over."""
    config = read_config(save(tmp_path, MLA | {"use_aux_norm": True}), target_num_layers=LAYERS, family=Family.KIMI_K25)
    assert config.fc_norm


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"eagle_config": {IDS: [1, 29, 57]}}, r"means different states.*\[2, 30, 58\].*\[1, 29, 57\]"),
        ({IDS: [2, 30, 58], "eagle_config": {IDS: [3, 31, 59]}}, "means different states"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({IDS: [2, 30, 62]}, "62"),
        ({IDS: []}, r"= \[\]"),  # what says something else than ids is not taken for saying nothing
        ({IDS: "2,30,58"}, "= '2,30,58'"),
        ({IDS: [2, "30", 58]}, "'30'"),
        ({"eagle_config": {IDS: {"0": 2}}}, "eagle_config"),
    ],
)
def test_ids_that_do_not_tell_are_refused_until_slots_are_named(
    tmp_path: Path, form: dict[str, Any], words: str
) -> None:
    with pytest.raises(SlipstreamError, match=words):
        read(tmp_path, LLAMA | form)
    assert read(tmp_path, LLAMA | form, slots=(3, 31, 59)) == (3, 31, 59)


def test_the_same_nested_ids_of_a_llama_target_do_not_tell(tmp_path: Path) -> None:
    """SGLang's Llama adds 1 to every id, vLLM to none."""
    with pytest.raises(SlipstreamError, match="means different states") as error:
        read(tmp_path, LLAMA | {"eagle_config": {IDS: [2, 30, 58]}}, Family.LLAMA)
    assert error.value.fault == "F4"


def test_without_a_target_nothing_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"no slipstream\.json"):
        read_config(save(tmp_path, LLAMA))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            MLA | {"use_moe": True, "eagle_config": NESTED | {IDS: [2, 30, 58]}},
            "use_moe = True",
        ),  # experts in its layer
        (MLA | {"mla_use_nope": True}, "mla_use_nope = True"),  # Kimi-K3
        (MLA | {"rope_interleave": False}, "rope_interleave = False"),
        (MLA | {"num_hidden_layers": 2}, "num_hidden_layers = 2"),
        (MLA | {"eagle_config": NESTED | {"use_mtp_layernorm": True}}, r"eagle_config\.use_mtp_layernorm = True"),
        (LLAMA | {"num_hidden_layers": 2}, "num_hidden_layers = 2"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (LLAMA | {"architectures": ["Qwen9ForCausalLMEagle3"]}, "names the architecture Qwen9"),
        ({"speculators_config": {}, "speculators_model_type": "eagle3"}, "speculators format"),
    ],
)
def test_other_kinds_are_named_and_refused(tmp_path: Path, value: dict[str, Any], words: str) -> None:
    with pytest.raises(SlipstreamError, match=words):
        read(tmp_path, value, slots=(2, 30, 58))
    facts = read_draft(tmp_path)
    assert facts is not None
    assert facts.problem
    if value.get("use_moe"):
        assert facts.nested_ids == (2, 30, 58)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_lora_rank": None}, "q_lora_rank = None"),  # queries without a latent: no network for it
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0"),
        ({"qk_rope_head_dim": 63}, "an even number"),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096}}, "factor"),
    ],
)
def test_sizes_of_latents_that_cannot_be(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(SlipstreamError, match=words):
        read(tmp_path, MLA | change, slots=(2, 30, 58))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": "LlamaForCausalLMEagle3"}, "architectures = "),
        ({"hidden_size": "7168"}, "hidden_size = '7168'"),
        ({"hidden_size": -64}, "hidden_size = -64"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"intermediate_size": None}, "intermediate_size = None"),
        ({"draft_vocab_size": True}, "draft_vocab_size = True"),
        ({"max_position_embeddings": 2048.0}, "max_position_embeddings = 2048.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"rope_theta": -1.0}, "rope_theta = -1.0"),
        ({"rope_theta": "50000"}, "rope_theta = '50000'"),
        ({"norm_output": "false"}, "norm_output = 'false'"),  # a text is true to Python
        ({"eagle_config": [1]}, r"eagle_config = \[1\]"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
        ({"rope_scaling": SCALING | {"beta_fast": "32"}}, "rope_scaling.beta_fast = '32'"),
    ],
)
def test_values_that_no_draft_has(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(SlipstreamError, match=words) as error:
        read(tmp_path, LLAMA | change, slots=(2, 30, 58))
    assert error.value.expected
    assert error.value.do


@pytest.mark.parametrize("kind", [LLAMA, MLA], ids=["grouped", "latent"])
def test_a_draft_that_there_is_a_network_for_has_no_problem(tmp_path: Path, kind: dict[str, Any]) -> None:
    facts = read_draft(save(tmp_path, kind))
    assert facts is not None
    assert facts.problem == ""

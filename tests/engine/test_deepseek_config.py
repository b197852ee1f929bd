"""config.json of Kimi-K2.5 and DeepSeek-V3: what is read, and what is refused by name."""

import json
import math
from pathlib import Path

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.model_config import ModelConfig

KIMI = Path(__file__).parents[1] / "checkpoints" / "kimi.py"


@pytest.fixture
def write(load_test_module, tmp_path):
    """values of the language model, values of the wrapper (None: there is none) -> the directory."""
    kimi = load_test_module(KIMI)

    def make(text=None, outer=None, wrapper=True):
        raw = kimi._config({**kimi.TEXT, **kimi.PUBLISHED, **(text or {})}, wrapper, None)
        raw.update(outer or {})
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return tmp_path

    return make


def refused(directory) -> str:
    with pytest.raises(SlipstreamError) as error:
        ModelConfig.from_dir(directory)
    assert str(directory / "config.json") in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("wrapper", [True, False])
def test_the_published_values(write, wrapper):
    config = ModelConfig.from_dir(write(wrapper=wrapper))
    latent, experts = config.latent, config.experts
    assert (latent.q_rank, latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.value_dim) == (
        1536,
        512,
        128,
        64,
        128,
    )
    assert latent.cell == 576
    assert math.isclose(latent.scale, 0.14468, rel_tol=1e-4)
    assert (experts.num, experts.per_token, experts.shared, experts.width, experts.first_dense) == (384, 8, 1, 2048, 1)
    assert (experts.scaling, experts.normalise, experts.groups, experts.groups_kept) == (2.827, True, 1, 1)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (61, 64, 64, 192)
    assert config.eos_token_ids == (163585,)
    assert (config.rope_theta, config.rope_scaling["factor"], config.tie_word_embeddings) == (50000.0, 64.0, False)


def test_without_mscale_all_dim_the_scale_is_plain(write):
    rope = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
    assert ModelConfig.from_dir(write({"rope_scaling": rope})).latent.scale == 192**-0.5
    assert ModelConfig.from_dir(write({"rope_scaling": None})).latent.scale == 192**-0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"index_topk": 2048}, "index_topk = 2048"),
        ({"swiglu_limit": 10.0}, "swiglu_limit = 10.0"),
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"q_lora_rank": None}, "no q_lora_rank"),
        ({"n_group": 7}, "n_group = 7"),
        ({"n_group": 8, "topk_group": 9}, "n_group = 8"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok = 385"),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank = '512'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob = 1"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor = 0.0"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, "rope_scaling.factor = None"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "rope_scaling.factor = 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": float("inf")}}, "rope_scaling.factor = inf"),
        ({"rope_scaling": {"type": ["yarn"], "factor": 4.0}}, "rope_scaling.type = ['yarn']"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": "1"}}, "rope_scaling.mscale_all_dim = '1'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": -1.0}}, "rope_scaling.mscale = -1.0"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": "16"}},
            "rope_scaling.original_max_position_embeddings = '16'",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "attn_factor": 2.0}}, "rope_scaling.attn_factor = 2.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 0}}, "rope_scaling.truncate = 0"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor = nan"),
        ({"num_mtp_layers": "1"}, "num_mtp_layers = '1'"),
        ({"model_type": "deepseek_v2"}, "text_config.model_type = 'deepseek_v2'"),
    ],
)
def test_what_the_layers_have_no_form_for_is_refused_by_name(write, text, words):
    directory = write()
    raw = json.loads((directory / "config.json").read_text())
    raw["text_config"].update(text)
    (directory / "config.json").write_text(json.dumps(raw))
    message = refused(directory)
    assert words in message


def test_keys_without_consequence_are_passed_over(write):
    idle = {"temperature": 1.0, "num_beams": 1, "id2label": {"0": "LABEL_0"}, "auto_map": {"AutoModel": "x"}}
    assert ModelConfig.from_dir(write({**idle, "unknown_switch": False, "other": None})).experts.num == 384


def test_a_wrapper_that_contradicts_its_language_model(write):
    assert "eos_token_id = 5" in refused(write(outer={"eos_token_id": 5}))
    assert "text_config = None" in refused(write(outer={"text_config": None}))
    assert "hidden_size = 4096" in refused(write(outer={"hidden_size": 4096}))
    assert ModelConfig.from_dir(write(outer={"hidden_size": 7168})).hidden_size == 7168  # said twice, alike


def test_the_wrappers_own_keys_are_known_and_others_named(write):
    """As vLLM's class of the wrapper has them, and as its config.json is published."""
    known = {
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "bos_token_id": 1,
        "eos_token_id": 163585,
        "dtype": "bfloat16",
        "ignore_index": -100,
        "pad_token_id": 163839,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "transformers_version": "4.57.1",
    }
    assert ModelConfig.from_dir(write(outer={**known, "unknown_switch": False, "other": None})).num_layers == 61
    message = refused(write(outer={**known, "logit_softcap": 30.0}))
    assert "says logit_softcap = 30.0" in message
    assert "no key that this engine does not know" in message


def test_the_quantization_may_stand_in_the_wrapper(write):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    told = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["re:.*self_attn.*"],
    }
    quantization = ModelConfig.from_dir(write(outer={"quantization_config": told})).quantization
    assert quantization.group == 32
    assert quantization.covers("language_model.model.layers.1.mlp.experts.3.up_proj")
    assert not quantization.covers("language_model.model.layers.1.self_attn.o_proj")

"""Loading: every tensor used, every parameter filled, or an error that lists the rest."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.loader import _MODELS, load_target
from slipstream.engine.model_config import ARCHITECTURES, ModelConfig


def edit_tensors(directory, change) -> None:
    """Rewrites the weight file after `change(tensors)`."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / "model.safetensors")


def edit_config(directory, **values) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refused(directory) -> str:
    with pytest.raises(SlipstreamError) as error:
        load_target(directory, torch.float32)
    return str(error.value)


@pytest.fixture
def checkpoint(tiny, tmp_path):
    return tiny.save_tiny(tmp_path / "model")


def test_shards_load_like_one_file(tiny, tmp_path):
    one = load_target(tiny.save_tiny(tmp_path / "one", tie_word_embeddings=False), "float32")
    two = load_target(tiny.save_sharded(tmp_path / "two"), "float32")
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_merged_weights_hold_their_parts_in_order(checkpoint):
    tensors, target = load_file(checkpoint / "model.safetensors"), load_target(checkpoint, "float32")
    prefix = "model.layers.1.self_attn."
    parts = [tensors[f"{prefix}{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(target.layers[1].self_attn.qkv_proj.weight, torch.cat(parts))


def test_missing_extra_and_misshaped_tensors_are_listed_together(checkpoint):
    def change(tensors):
        del tensors["model.layers.2.self_attn.k_proj.weight"]
        tensors["model.layers.2.self_attn.k_norm.weight"] = torch.ones(3)
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(64, 95)
        tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int32)

    edit_tensors(checkpoint, change)
    message = refused(checkpoint)
    assert "differ in 4 tensors" in message
    assert "missing: model.layers.2.self_attn.k_proj.weight [32, 64]" in message
    assert "not used: model.layers.2.self_attn.k_norm.weight [3]" in message
    assert "shape: model.layers.0.mlp.down_proj.weight is [64, 95], the config says [64, 96]" in message
    assert "dtype: model.norm.weight is torch.int32, expected torch.bfloat16" in message


def test_lengths_before_scaling_are_read_as_transformers_reads_them(checkpoint):
    def length(**values) -> int:
        edit_config(checkpoint, **values)
        return ModelConfig.from_dir(checkpoint).rope_scaling["original_max_position_embeddings"]

    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    assert length(rope_parameters=yarn) == 256
    assert length(rope_parameters=yarn | {"original_max_position_embeddings": 64}) == 64
    assert length(original_max_position_embeddings=32) == 32


def test_a_window_of_qwen3_that_is_not_in_force_is_no_window(checkpoint):
    edit_config(
        checkpoint, architectures=["Qwen3ForCausalLM"], sliding_window=64, use_sliding_window=False, head_dim=16
    )
    assert ModelConfig.from_dir(checkpoint).sliding_window is None
    edit_config(checkpoint, architectures=["MistralForCausalLM"])
    assert ModelConfig.from_dir(checkpoint).sliding_window == 64


def test_a_missing_head_is_an_error_when_the_config_does_not_tie_it(checkpoint):
    edit_config(checkpoint, tie_word_embeddings=False)
    assert "missing: lm_head.weight [199, 64]" in refused(checkpoint)


def test_a_tied_head_may_be_stored_again_but_not_differ(checkpoint):
    edit_tensors(checkpoint, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_target(checkpoint, torch.float32)
    edit_tensors(checkpoint, lambda t: t["lm_head.weight"].mul_(1.01))
    assert "lm_head.weight differs from model.embed_tokens.weight" in refused(checkpoint)


@pytest.mark.parametrize("keep", [0, 5, 400, -100])
def test_a_truncated_file_says_so(checkpoint, keep):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    message = refused(checkpoint)
    assert "cannot be read" in message
    assert "truncated" in message
    assert "model.safetensors" in message


def test_a_missing_shard_and_a_wrong_index_are_named(tiny, tmp_path):
    directory = tiny.save_sharded(tmp_path)
    shard = directory / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    lost = tensors.pop("model.norm.weight", None) is not None and "model.norm.weight"
    if not lost:
        lost, _ = tensors.popitem()
    save_file(tensors, shard)
    assert f"lacks 1 tensors that model.safetensors.index.json lists in it: {lost}" in refused(directory)
    shard.unlink()
    assert "model-00002-of-00002.safetensors does not exist" in refused(directory)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope scaling 'dynamic' is not supported"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": None},
            "'linear' is not supported",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn' has no factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "a rope of its own for full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"sliding_window": 64}, "sliding_window = 64"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types = ['sliding_attention']"),
        ({"architectures": ["MistralForCausalLM"]}, "no sliding_window"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "64"}, "sliding_window = '64'"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}, "use_sliding_window = True"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
    ],
)
def test_unsupported_configs_are_refused_by_name(checkpoint, values, words):
    edit_config(checkpoint, **values)
    assert words in refused(checkpoint)


def test_no_model_directory(tmp_path):
    assert "config.json does not exist" in refused(tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"vocab_size": 199.0}, "vocab_size = 199.0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_parameters.rope_theta = '1e4'"),
        ({"rope_parameters": "linear"}, "rope_parameters = 'linear'"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = {'type': 'linear', 'factor': 2.0}"),
        ({"vocab_size": 10**12}, "asks for layers that this machine has no memory for"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": None}, "a divisor of hidden_size = 64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"eos_token_id": "2"}, "eos_token_id = '2'"),
    ],
)
def test_values_of_a_wrong_type_or_size_are_named_with_their_file(checkpoint, values, words):
    edit_config(checkpoint, **values)
    message = refused(checkpoint)
    assert words in message
    assert str(checkpoint / "config.json") in message


def test_a_rope_that_is_said_twice_in_the_same_words_is_no_contradiction(checkpoint):
    edit_config(
        checkpoint,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
        rope_scaling={"type": "yarn", "factor": 2.0},
    )
    assert ModelConfig.from_dir(checkpoint).rope_scaling["factor"] == 2.0


def test_a_config_that_is_no_object(checkpoint):
    (checkpoint / "config.json").write_text("[]")
    assert "config.json holds no JSON object" in refused(checkpoint)


def test_the_architectures_that_a_plan_knows_are_those_that_load():
    assert set(ARCHITECTURES) == set(_MODELS)

"""A draft directory: the form that vLLM and SGLang load, and every bit back."""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, DeepseekV3Config, LlamaConfig

from slipstream.engine.deepseek_config import Latent
from slipstream.engine.drafts.eagle3.checkpoint import load_draft, read_tensors, save_draft, to_tensors
from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord, engine_ids, read_config, read_record
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.tensor_checks import out_of_vocabulary_share
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity
from slipstream.kernels.cuda.pack import PackedWeight, unpack

H, HT, V, VD, N_SLOTS = 16, 16, 60, 20, 3
CONFIG = Eagle3Config(
    hidden_size=H,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position=64,
    vocab_size=V,
    draft_vocab_size=VD,
    target_hidden_size=HT,
    slots=(2, 5, 7),
    target_num_layers=10,
)
IDENTITY = TargetIdentity("a" * 64, "b" * 64, "c" * 64)
RECORD = DraftRecord(IDENTITY, Family.LLAMA, "f" * 64)

# The table of the fact sheet: 4 heads and 2 KV heads of 8, inputs 2H wide, no bias.
FILE = {
    "embed_tokens.weight": [V, H],
    "fc.weight": [H, N_SLOTS * HT],
    "midlayer.input_layernorm.weight": [H],
    "midlayer.hidden_norm.weight": [H],
    "midlayer.post_attention_layernorm.weight": [H],
    "midlayer.self_attn.q_proj.weight": [32, 2 * H],
    "midlayer.self_attn.k_proj.weight": [16, 2 * H],
    "midlayer.self_attn.v_proj.weight": [16, 2 * H],
    "midlayer.self_attn.o_proj.weight": [H, 32],
    "midlayer.mlp.gate_proj.weight": [24, H],
    "midlayer.mlp.up_proj.weight": [24, H],
    "midlayer.mlp.down_proj.weight": [H, 24],
    "norm.weight": [H],
    "lm_head.weight": [VD, H],
    "d2t": [VD],
    "t2d": [V],
}


YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT = {
    "num_kv_heads": 4,
    "head_dim": 10,
    "rope_scaling": YARN,
    "latent": Latent(12, 8, 6, 4, 5, 10**-0.5 * (0.1 * math.log(4) + 1) ** 2),
}
LATENT_FILE = {
    **{name: shape for name, shape in FILE.items() if "self_attn" not in name},
    "midlayer.self_attn.q_a_proj.weight": [12, 2 * H],
    "midlayer.self_attn.q_a_layernorm.weight": [12],
    "midlayer.self_attn.q_b_proj.weight": [40, 12],
    "midlayer.self_attn.kv_a_proj_with_mqa.weight": [12, 2 * H],
    "midlayer.self_attn.kv_a_layernorm.weight": [8],
    "midlayer.self_attn.kv_b_proj.weight": [44, 8],
    "midlayer.self_attn.o_proj.weight": [H, 20],
}


def make_network(config: Eagle3Config = CONFIG, dtype: torch.dtype = torch.bfloat16) -> Eagle3Network:
    network = Eagle3Network(config, dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        network.d2t.copy_(ids - torch.arange(config.draft_vocab_size))
    return network


def draft_step(network: Eagle3Network) -> torch.Tensor:
    """Logits [4, Vd] of one step whose attention hands each row its own value."""
    dtype, config = network.fc.weight.dtype, network.config
    features = torch.randn(4, config.feature_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    group = config.num_heads // config.num_kv_heads
    with torch.no_grad():
        state = network(
            torch.arange(4),
            network.fuse(features),
            torch.arange(4),
            lambda q, k, v: (q + k.repeat_interleave(group, -2))[..., : v.shape[-1]] * v.repeat_interleave(group, -2),
        )
        return network.logits(network.feedback(state))


SWITCHES = [
    {},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_residual": True},
    {"draft_vocab_size": V},
    {"slots": (1, 4)},
    LATENT,
    {**LATENT, "draft_vocab_size": V, "fc_norm": True, "norm_output": True},
]


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_is_bitwise(tmp_path, switches, dtype):
    network = make_network(dataclasses.replace(CONFIG, **switches), dtype)
    save_draft(tmp_path / "draft", network, RECORD)
    again = load_draft(tmp_path / "draft")
    assert again.config == network.config
    ours, theirs = network.state_dict(), again.state_dict()
    assert list(ours) == list(theirs)
    assert all(ours[n].dtype == theirs[n].dtype and torch.equal(ours[n], theirs[n]) for n in ours)
    assert torch.equal(draft_step(network), draft_step(again))
    save_draft(tmp_path / "again", again, RECORD)
    for name in ("model.safetensors", "config.json", "slipstream.json"):
        assert (tmp_path / "draft" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert read_record(tmp_path / "draft") == RECORD


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda own: [], "holds no JSON object"),
        (lambda own: {k: v for k, v in own.items() if k != "slots"}, "has no slots"),
        (lambda own: {**own, "slots": 5}, "is damaged"),
        (lambda own: {**own, "slots": ["two"]}, "is damaged"),
        (lambda own: {**own, "slots": ["slot_99"]}, "are outside"),
        (lambda own: {**own, "target_num_layers": None}, "is damaged"),
        (lambda own: {k: v for k, v in own.items() if k != "identity"}, "has no identity"),
    ],
)
def test_a_damaged_record_is_named(tmp_path, change, words):
    save_draft(tmp_path, make_network(), RECORD)
    file = tmp_path / "slipstream.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(SlipstreamError, match=words):
        _ = read_config(tmp_path), read_record(tmp_path)


def test_names_shapes_and_dtypes_are_those_of_the_table(tmp_path):
    save_draft(tmp_path, make_network(dtype=torch.float32), RECORD, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == FILE
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    assert (dtypes.pop("d2t"), dtypes.pop("t2d")) == (torch.int64, torch.bool)
    assert set(dtypes.values()) == {torch.bfloat16}
    assert torch.equal(tensors["t2d"].nonzero().squeeze(1), tensors["d2t"] + torch.arange(VD))


def test_latent_attention_has_the_names_and_shapes_that_others_write(tmp_path):
    save_draft(tmp_path, make_network(dataclasses.replace(CONFIG, **LATENT)), RECORD)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == LATENT_FILE
    value = json.loads((tmp_path / "config.json").read_text())
    assert value["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(theirs, DeepseekV3Config)
    assert (theirs.q_lora_rank, theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.v_head_dim) == (12, 8, 6, 5)
    assert theirs.rope_parameters["factor"] == 4.0
    assert theirs.rope_parameters["rope_theta"] == CONFIG.rope_theta


def test_rope_rows_lie_in_pairs_in_the_file_and_in_halves_in_the_network(draft_tools):
    network = make_network(dataclasses.replace(CONFIG, **LATENT), torch.float32)
    tensors = to_tensors(network)
    expected = draft_tools.hf_tensors(network)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    own = network.midlayer.self_attn.q_b_proj.weight.data
    assert not torch.equal(tensors["midlayer.self_attn.q_b_proj.weight"], own)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("kv_b_proj", lambda t: t[:-1], r"misshaped: .*kv_b_proj.weight is \[43, 8\], the config says \[44, 8\]"),
        ("q_b_proj", lambda t: t[:-1], r"misshaped: .*q_b_proj.weight is \[39, 12\], the config says \[40, 12\]"),
        ("kv_a_proj_with_mqa", lambda t: t[:, :H], r"misshaped: .*kv_a_proj_with_mqa.weight is \[12, 16\]"),
        ("q_a_layernorm", lambda _: None, "missing: .*q_a_layernorm.weight"),
    ],
)
def test_tensors_of_latent_attention_that_do_not_fit_are_named(tmp_path, name, change, words):
    save_draft(tmp_path, make_network(dataclasses.replace(CONFIG, **LATENT)), RECORD)
    tensors = load_file(tmp_path / "model.safetensors")
    tensor = change(tensors.pop(f"midlayer.self_attn.{name}.weight"))
    if tensor is not None:
        tensors[f"midlayer.self_attn.{name}.weight"] = tensor.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SlipstreamError, match=words) as error:
        load_draft(tmp_path)
    assert error.value.fault == "F8"


@pytest.mark.parametrize(
    ("switches", "cannot"),
    [
        ({}, []),
        ({"fc_norm": True, "norm_output": True}, []),
        ({"norm_before_residual": True}, ["sglang"]),
        ({"norm_before_fc": True}, ["sglang", "vllm"]),
    ],
)
def test_what_other_engines_have_of_a_latent_draft(switches, cannot):
    ids = engine_ids(dataclasses.replace(CONFIG, **LATENT, **switches), Family.KIMI_K25)
    assert sorted(engine.value for engine, found in ids.items() if isinstance(found, str)) == cannot


def test_norms_before_fc_have_the_names_of_the_table():
    one = to_tensors(make_network(dataclasses.replace(CONFIG, norm_before_fc=True)))
    assert list(one["input_norm.weight"].shape) == [N_SLOTS * HT]
    each = to_tensors(make_network(dataclasses.replace(CONFIG, fc_norm=True)))
    assert [n for n in each if n.startswith("fc_norm")] == [f"fc_norm.{i}.weight" for i in range(N_SLOTS)]
    assert list(each["fc_norm.1.weight"].shape) == [HT]


def test_config_keys_of_both_engines(tmp_path):
    save_draft(tmp_path, make_network(), RECORD, served_tokens=64)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": V,
        "draft_vocab_size": VD,
        "target_hidden_size": HT,
        "num_aux_hidden_states": 3,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "attention_bias": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 5, 7],  # vLLM, as they are
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 4, 6]},  # SGLang adds 1
        "torch_dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    own = json.loads((tmp_path / "slipstream.json").read_text())
    assert own["slots"] == ["slot_2", "slot_5", "slot_7"]
    assert own["engines"] == {"vllm 0.24.0": {"ids": [2, 5, 7]}, "sglang 0.5.14": {"ids": [1, 4, 6]}}


def test_transformers_reads_the_config_as_we_mean_it(tmp_path):
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    for scaling in (None, {"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5, **llama3}):
        config = dataclasses.replace(CONFIG, rope_theta=5e5, rope_scaling=scaling)
        save_draft(tmp_path, make_network(config), RECORD)
        read = LlamaConfig.from_pretrained(tmp_path)
        assert read.rope_parameters["rope_theta"] == 5e5
        assert read.rope_parameters["rope_type"] == (scaling or {}).get("rope_type", "default")
        assert (read.draft_vocab_size, read.head_dim, read.num_key_value_heads) == (VD, 8, 2)
        assert read.eagle_config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
        assert read.tie_word_embeddings is False
        again = read_config(tmp_path)
        assert again.rope_theta == 5e5
        assert (again.rope_scaling or {}).get("factor") == (scaling or {}).get("factor")


@pytest.mark.parametrize(
    ("family", "change", "vllm", "sglang"),
    [
        (Family.DEEPSEEK, {"slots": (2, 5, 7)}, [2, 5, 7], [1, 4, 6]),
        (Family.DEEPSEEK, {"slots": (3, 5, 7)}, [3, 5, 7], [3, 5, 7]),
        (Family.LLAMA, {"slots": (0, 3, 5)}, [0, 3, 5], []),
        (Family.LLAMA, {"norm_before_residual": True}, [2, 5, 7], []),
    ],
)
def test_an_engine_that_cannot_serve_the_draft_is_stopped_and_named(tmp_path, family, change, vllm, sglang):
    network = make_network(dataclasses.replace(CONFIG, **change))
    save_draft(tmp_path, network, dataclasses.replace(RECORD, family=family))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == vllm
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == sglang
    engines = json.loads((tmp_path / "slipstream.json").read_text())["engines"]
    assert ("cannot_serve" in engines["sglang 0.5.14"]) == (not sglang)
    assert load_draft(tmp_path).config.slots == network.config.slots


def foreign(directory, rename=lambda name: name, drop=()):
    """A draft as another trainer writes it: without slipstream.json, and with its own habits."""
    save_draft(directory, make_network(), RECORD)
    (directory / "slipstream.json").unlink()
    tensors = {rename(n): t for n, t in read_tensors(directory).items() if n not in drop}
    save_file(tensors, directory / "model.safetensors")


def test_a_draft_of_another_trainer(tmp_path):
    foreign(tmp_path, lambda n: n.replace("midlayer.", "layers.0."), drop=("embed_tokens.weight", "t2d"))
    with pytest.raises(SlipstreamError, match=r"has no slipstream.json"):
        load_draft(tmp_path)
    with pytest.raises(SlipstreamError, match=r"missing: embed_tokens.weight \[60, 16\]"):
        load_draft(tmp_path, slots=(2, 5, 7), target_num_layers=10)
    ours = make_network()
    embedding = ours.embed_tokens.weight.detach()
    theirs = load_draft(tmp_path, slots=(2, 5, 7), target_num_layers=10, target_embedding=embedding)
    assert torch.equal(draft_step(ours), draft_step(theirs))
    assert theirs.embed_tokens.weight.data_ptr() == embedding.data_ptr()


def test_a_form_that_no_layer_has_is_refused_by_name(tmp_path):
    foreign(tmp_path)
    config = tmp_path / "config.json"
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_scaling": scaling}))
    with pytest.raises(SlipstreamError, match="rope scaling 'dynamic' is not supported") as caught:
        load_draft(tmp_path, slots=(2, 5, 7), target_num_layers=10)
    assert caught.value.found.startswith(str(config))
    assert (caught.value.expected, caught.value.do) == ("what the layers know", "use another draft")


def test_a_copy_of_the_targets_embedding_is_shared_and_another_one_kept(tmp_path):
    ours = make_network()
    save_draft(tmp_path, ours, RECORD)
    embedding = ours.embed_tokens.weight.detach().clone()
    assert load_draft(tmp_path, target_embedding=embedding).embed_tokens.weight.data_ptr() == embedding.data_ptr()
    embedding[3, 4] += 1
    kept = load_draft(tmp_path, target_embedding=embedding).embed_tokens.weight
    assert torch.equal(kept, ours.embed_tokens.weight)


def tensors_of(network):
    """Its tensors by name; weights that were packed for the card in their first order again."""
    packed = {
        f"{name}.weight": unpack(module.weight)
        for name, module in network.named_modules()
        if isinstance(getattr(module, "weight", None), PackedWeight)
    }
    return {**dict(network.named_parameters()), **dict(network.named_buffers()), **packed}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_draft_is_loaded_to_the_device_of_the_targets_embedding(tmp_path):
    foreign(tmp_path)
    ours = make_network()
    embedding = ours.embed_tokens.weight.detach().cuda()
    theirs = load_draft(tmp_path, slots=(2, 5, 7), target_num_layers=10, target_embedding=embedding)
    assert theirs.embed_tokens.weight.data_ptr() == embedding.data_ptr()
    found = tensors_of(theirs)
    assert all(tensor.is_cuda for tensor in found.values())
    expected = tensors_of(ours)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in expected.items())


def test_a_truncated_file_is_named(tmp_path):
    save_draft(tmp_path, make_network(), RECORD)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(SlipstreamError, match=r"model.safetensors \([\d,]+ bytes\) cannot be read"):
        load_draft(tmp_path)
    path.unlink()
    with pytest.raises(SlipstreamError, match="does not exist"):
        load_draft(tmp_path)


def test_a_rope_table_shorter_than_the_served_context_is_refused(tmp_path):
    with pytest.raises(SlipstreamError, match="positions end at 64, the server's context at 65") as caught:
        save_draft(tmp_path, make_network(), RECORD, served_tokens=65)
    assert caught.value.fault == "F14"
    assert not list(tmp_path.iterdir())
    save_draft(tmp_path, make_network(), RECORD, served_tokens=65, skip={"F14"})


@pytest.mark.parametrize(
    ("ids", "fault", "captured"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [-1, 2, 5]}, "F2", "slot_-1"),
        ({"eagle_aux_hidden_state_layer_ids": [5, 2, 7]}, "F3", "slot_5"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}}, "F2", "slot_3"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "F2", r"ids None as vllm 0.24.0 reads them"),
        ({"eagle_config": None}, "F2", r"ids None as sglang 0.5.14 reads them"),
    ],
)
def test_ids_edited_by_hand_are_refused(tmp_path, ids, fault, captured):
    # Of these 12 layers the defaults are 2, 6, 9.
    save_draft(tmp_path, make_network(dataclasses.replace(CONFIG, target_num_layers=12)), RECORD)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ids))
    with pytest.raises(SlipstreamError, match=captured) as caught:
        load_draft(tmp_path)
    assert caught.value.fault == fault
    assert "slot_2" in caught.value.expected
    load_draft(tmp_path, skip={fault})


def test_share_of_tokens_that_the_draft_cannot_propose():
    counts = torch.zeros(V, dtype=torch.int64)
    counts[torch.tensor([1, 2, 3])] = torch.tensor([5, 3, 2])
    d2t = torch.tensor([1, 2, 3])  # draft 0, 1, 2 -> target 1, 3, 5
    assert out_of_vocabulary_share(counts, d2t) == pytest.approx(0.3)

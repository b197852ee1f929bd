"""Checkpoints that do not fit are refused by name, before a layer behind the fault takes memory."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine import streamed_load
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.loader import load_target
from slipstream.engine.models.deepseek import DeepseekModel
from slipstream.engine.tensor_files import all_true
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels.int4 import dequantise

KIMI = Path(__file__).parents[1] / "checkpoints" / "kimi.py"
EXPERT = "language_model.model.layers.2.mlp.experts.5."


@pytest.fixture(scope="module")
def made(load_test_module, tmp_path_factory):
    return load_test_module(KIMI).synthesise(tmp_path_factory.mktemp("kimi") / "model", num_hidden_layers=3)


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made.directory, tmp_path / "model"))


@pytest.fixture
def allocated(monkeypatch):
    """Units that got memory, one entry each."""
    units = []
    original = streamed_load._allocate
    monkeypatch.setattr(streamed_load, "_allocate", lambda unit, device: (units.append(unit), original(unit, device)))
    return units


def edit(directory, name, change) -> None:
    """Puts change(tensor) in the place of a tensor; None takes it away, from the index as well."""
    index = directory / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    file = directory / listed["weight_map"][name]
    tensors = load_file(file)
    changed = change(tensors[name])
    if changed is None:
        del tensors[name], listed["weight_map"][name]
        index.write_text(json.dumps(listed))
    else:
        tensors[name] = changed.contiguous()
    save_file(tensors, file)


def edit_text(directory, **values) -> None:
    raw = json.loads((directory / "config.json").read_text())
    raw["text_config"].update(values)
    (directory / "config.json").write_text(json.dumps(raw))


def refused(directory, parallel=None) -> str:
    with pytest.raises(SlipstreamError) as error:
        load_target(directory, torch.float32, parallel=parallel)
    return str(error.value)


def test_experts_are_the_librarys_bits(made):
    target = load_target(made.directory, torch.float32)
    for layer in (1, 2):
        for expert in (0, 15):
            gate_up, down = target.layers[layer].mlp.experts.weights.expert(expert)
            stem = f"language_model.model.layers.{layer}.mlp.experts.{expert}."
            parts = {
                part: dequantise(*(made.tensors[f"{stem}{part}.weight_{what}"] for what in ("packed", "scale")))
                for part in ("gate_proj", "up_proj", "down_proj")
            }
            assert torch.equal(gate_up, torch.cat((parts["gate_proj"], parts["up_proj"])))
            assert torch.equal(down, parts["down_proj"])


def test_a_missing_shard(copy, allocated):
    (copy / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors does not exist" in refused(copy)
    assert not allocated


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("up_proj.weight_packed", lambda t: None, "missing: {}up_proj.weight_packed [256, 8]"),
        (
            "down_proj.weight_packed",
            lambda t: t[:, :-1],
            "shape: {}down_proj.weight_packed is [64, 31], the config says [64, 32]",
        ),
        ("down_proj.weight_scale", lambda t: t.float(), "dtype: {}down_proj.weight_scale is F32, expected BF16"),
        ("gate_proj.weight_packed", lambda t: t.long(), "dtype: {}gate_proj.weight_packed is I64, expected I32"),
    ],
)
def test_headers_that_do_not_fit_are_named_before_anything_takes_memory(copy, allocated, name, change, words):
    edit(copy, EXPERT + name, change)
    assert words.format(EXPERT) in refused(copy)
    assert not allocated


def test_an_expert_that_is_absent_and_one_too_many(copy, allocated):
    for part in ("gate_proj", "up_proj", "down_proj"):
        for what in ("packed", "scale", "shape"):
            edit(copy, f"{EXPERT}{part}.weight_{what}", lambda t: None)
    message = refused(copy)
    assert "differ in 9 tensors" in message
    assert f"missing: {EXPERT}down_proj.weight_packed [64, 32]" in message
    edit_text(copy, n_routed_experts=8)
    assert "not used: language_model.model.layers.1.mlp.experts.10." in refused(copy)
    assert not allocated


def test_tensors_beside_the_model_are_passed_over_by_rule_only(copy):
    edit(copy, "vision_tower.encoder.blocks.0.wqkv.weight", lambda t: t[:3])
    told = []
    report = load_target(copy, torch.float32, progress=told.append).load_report
    assert told[-1] == f"loading the target: {report}"
    assert report.skipped == {"vision (text only)": 2}
    assert "passed over: 2 tensors, vision (text only)" in str(report)
    assert report.peak_host_bytes > report.read_bytes > 0
    file = copy / "model-00001-of-00002.safetensors"
    save_file({**load_file(file), "language_model.visual.x": torch.ones(2)}, file)
    assert "not used: language_model.visual.x [2]" in refused(copy)


def test_layers_that_predict_further_tokens_are_passed_over_where_the_config_says_so(copy):
    file = copy / "model-00001-of-00002.safetensors"
    save_file({**load_file(file), "language_model.model.layers.3.eh_proj.weight": torch.ones(2, 2)}, file)
    assert "not used: language_model.model.layers.3.eh_proj.weight [2, 2]" in refused(copy)
    edit_text(copy, num_nextn_predict_layers=1)
    skipped = load_target(copy, torch.float32).load_report.skipped
    assert skipped["prediction of further tokens (a draft takes its place)"] == 1


@pytest.mark.parametrize(("value", "part"), [(float("nan"), "gate_proj"), (float("inf"), "down_proj")])
def test_a_scale_that_is_no_number_is_named_before_the_next_layer_takes_memory(copy, allocated, value, part):
    def change(scale):
        scale[1, 1] = value
        return scale

    edit(copy, f"{EXPERT.replace('layers.2', 'layers.1')}{part}.weight_scale", change)
    message = refused(copy)
    assert f"layers.1.mlp.experts.5.{part}.weight_scale: 1 scales are not finite" in message
    assert len(allocated) == 3  # embedding, layer 0, layer 1; not layer 2


@pytest.mark.parametrize("part", ["up_proj", "down_proj"])
def test_a_negative_scale_is_named_likewise_and_minus_zero_is_zero(copy, allocated, part):
    """The format is symmetric: of a group, the scale is the size of its largest number."""
    name = f"{EXPERT.replace('layers.2', 'layers.1')}{part}.weight_scale"

    def change(scale):
        scale[1, 1] *= -1
        return scale

    edit(copy, name, lambda scale: scale.index_fill(0, torch.tensor(1), -0.0))
    load_target(copy, torch.float32)
    allocated.clear()
    edit(copy, name, lambda scale: scale.index_fill(0, torch.tensor(1), 0.5))
    edit(copy, name, change)
    assert f"F8: {name}: 1 scales are negative" in refused(copy)
    assert len(allocated) == 3


def test_the_device_is_asked_once_a_layer_whether_its_numbers_can_be(made, monkeypatch):
    asked = []
    monkeypatch.setattr(streamed_load, "all_true", lambda flags: asked.append(len(flags)) or all_true(flags))
    load_target(made.directory, torch.float32)
    # Embedding, layers, norm, head, angles (no weights). Of a layer of experts 14 weights and two stacks of scales.
    assert asked == [1, 12, 16, 16, 1, 1, 0]


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("self_attn.kv_b_proj.weight", float("nan")),
        ("mlp.gate.e_score_correction_bias", float("inf")),
        ("mlp.shared_experts.up_proj.weight", float("-inf")),
        ("input_layernorm.weight", float("nan")),
    ],
)
def test_a_plain_weight_that_is_not_finite_is_named_likewise(copy, allocated, part, value):
    def change(weight):
        weight.view(-1)[3] = value
        return weight

    name = f"language_model.model.layers.1.{part}"
    edit(copy, name, change)
    assert f"F8: 1 weights are not finite:\n    {name}: 1 numbers of" in refused(copy)
    assert len(allocated) == 3  # embedding, layer 0, layer 1; not layer 2


@pytest.mark.parametrize("found", [[], {}, None, {"model.norm.weight": 3}, ["model-00001-of-00002.safetensors"]])
def test_an_index_that_names_no_files(copy, allocated, found):
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": found}))
    assert "holds no weight_map of tensor names and file names" in refused(copy)
    assert not allocated


@pytest.mark.parametrize("file", ["../model-00001-of-00002.safetensors", "/etc/hostname", "a/../../b.safetensors", ""])
def test_an_index_that_names_a_file_elsewhere(copy, allocated, file):
    """One that is there, too: what is loaded is what the directory holds."""
    shutil.copy(copy / "model-00001-of-00002.safetensors", copy.parent)
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    index["weight_map"]["language_model.model.norm.weight"] = file
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refused(copy)
    assert f"says that language_model.model.norm.weight lies in {file!r}" in message
    assert "a file of this directory" in message
    assert not allocated


def test_files_of_a_hubs_cache_are_links_to_elsewhere(made, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(made.directory, blobs)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    assert load_target(snapshot, torch.float32).load_report.read_bytes > 0


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("num_hidden_layers", "num_hidden_layers = 200000000, the files have tensors of 3"),
        ("n_routed_experts", "n_routed_experts = 200000000, the files have tensors of 16"),
    ],
)
def test_more_layers_or_experts_than_the_files_hold_are_named_before_any_is_made(copy, monkeypatch, key, words):
    def never(*_):
        raise AssertionError("a layer was made")

    monkeypatch.setattr(DeepseekModel, "_layer", never)
    edit_text(copy, **{key: 200_000_000})
    assert words in refused(copy)


def test_a_shape_that_contradicts_the_config(copy, allocated):
    edit(copy, f"{EXPERT}down_proj.weight_shape", lambda t: t.flip(0))
    assert f"{EXPERT}down_proj.weight_shape is [256, 64]" in refused(copy)
    assert len(allocated) == 4


def test_ranks_that_do_not_divide_the_groups(made, allocated):
    message = refused(made.directory, TensorParallel(1, 3, object()))
    assert "layers.1.mlp.experts.0.down_proj: this rank's input features are 86..170 of 256" in message
    assert "whole groups of 32" in message
    assert not allocated


def test_rules_that_divide_a_layers_experts(copy, allocated):
    raw = json.loads((copy / "config.json").read_text())
    raw["text_config"]["quantization_config"]["ignore"].append("re:.*experts\\.3\\..*")
    (copy / "config.json").write_text(json.dumps(raw))
    message = refused(copy)
    assert "quantization_config.ignore divides the experts of a layer" in message
    assert "layers.1.mlp.experts.3.gate_proj not" in message
    assert not allocated


def test_latent_attention_with_int4_weights_is_refused(copy, allocated):
    raw = json.loads((copy / "config.json").read_text())
    raw["text_config"]["quantization_config"]["ignore"].remove("re:.*self_attn.*")
    (copy / "config.json").write_text(json.dumps(raw))
    assert "quantization_config says that language_model.model.layers.0.self_attn.q_a_proj is INT4" in refused(copy)
    assert not allocated

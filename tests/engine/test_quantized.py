"""Targets with INT4 weights: written by `compressed-tensors`, read by us, against transformers on the same files."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine.engine import Engine, EngineConfig
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.layers.linear import Linear
from slipstream.engine.loader import load_target
from slipstream.engine.quantization import Quantization
from slipstream.engine.runner import capture_states
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels.int4 import Int4Weight, dequantise, disarrange


@pytest.fixture(scope="module")
def tiny_int4(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_test_module(Path(__file__).with_name("tiny_int4.py"))


@pytest.fixture(scope="module")
def checkpoints(tiny_int4: ModuleType, tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of group 32, and one of group 128 whose attention is ignored by an expression."""
    root = tmp_path_factory.mktemp("int4")
    ignore = {"g32": ("lm_head",), "g128": ("lm_head", "re:.*self_attn.*")}
    return {
        name: tiny_int4.save_tiny_int4(
            root / name, tiny.tiny_hf(1, torch.bfloat16, **tiny_int4.SIZES), int(name[1:]), ignored
        )
        for name, ignored in ignore.items()
    }


@pytest.mark.parametrize("name", ["g32", "g128"])
def test_logits_and_tokens_equal_transformers(
    checkpoints: dict[str, Path], tiny_int4: ModuleType, tiny: ModuleType, name: str
) -> None:
    target = load_target(checkpoints[name], torch.float32)
    layer = target.layers[1]
    assert isinstance(layer.mlp.down_proj.weight, Int4Weight)
    assert layer.mlp.down_proj.weight.group == int(name[1:])
    assert isinstance(layer.self_attn.o_proj.weight, Int4Weight) == (name == "g32")
    assert layer.mlp.gate_up_proj.weight.half == 256
    reference = tiny_int4.reference(checkpoints[name])
    ids = tiny.prompts(1, low=40, high=40)[0]
    _, teacher = capture_states(target, ids, (), prefill_chunk_tokens=32)
    with torch.no_grad():
        torch.testing.assert_close(
            target.logits(teacher), reference(torch.tensor([ids])).logits[0], rtol=1e-4, atol=1e-3
        )
    engine = Engine(target, EngineConfig(max_context_tokens=128, prefill_chunk_tokens=16, dtype="float32"))
    answer = engine.generate([ids], SamplingParams(max_tokens=24, ignore_eos=True))[0]
    expected = reference.generate(
        torch.tensor([ids]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert answer.token_ids == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["g32", "g128"])
def test_ranks_hold_their_slices(checkpoints: dict[str, Path], name: str, size: int) -> None:
    """Put together again, what the ranks read is the whole; no rank holds more than its share of a cut weight."""
    if name == "g128" and size == 4:
        with pytest.raises(SlipstreamError, match="whole groups of 128"):
            load_target(checkpoints[name], torch.bfloat16, parallel=TensorParallel(0, size, group=object()))
        return
    whole = load_target(checkpoints[name], torch.bfloat16)
    ranks = [
        load_target(checkpoints[name], torch.bfloat16, parallel=TensorParallel(rank, size, group=object()))
        for rank in range(size)
    ]
    for path, layer in whole.named_modules():
        if not isinstance(layer, Linear) or not isinstance(layer.weight, Int4Weight):
            continue
        exact = dequantise(*disarrange(layer.weight))
        parts = [model.get_submodule(path) for model in ranks]
        pieces = [dequantise(*disarrange(part.weight)) for part in parts]
        if path.endswith(("o_proj", "down_proj")):
            assert torch.equal(torch.cat(pieces, 1), exact)
            continue
        slices = [part.part_slices() for part in parts]
        names = layer.part_slices()
        for part_name, rows in names.items():
            cut = [piece[s[part_name]] for piece, s in zip(pieces, slices, strict=True)]
            together = torch.cat(cut)
            assert torch.equal(together, exact[rows])
            assert cut[0].shape[0] == exact[rows].shape[0] // size


def test_a_quantised_model_takes_the_memory_of_its_own_form(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weight that is INT4 on disk is ever allocated as floats."""
    floats: list[tuple[int, ...]] = []
    empty = torch.empty

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        if made.is_floating_point() and made.device.type != "meta" and made.dim() == 2:
            floats.append(tuple(made.shape))
        return made

    monkeypatch.setattr(torch, "empty", counted)
    target = load_target(checkpoints["g32"], torch.bfloat16)
    weight = target.layers[0].mlp.gate_up_proj.weight
    assert tuple(weight.shape) not in floats
    assert weight.nbytes == weight.shape.numel() // 2 + weight.shape.numel() // 32 * 2


def edited(checkpoint: Path, to: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> str:
    """The refusal of a copy of the checkpoint with its quantization_config and tensors changed."""
    to.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    change(config["quantization_config"], tensors)
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors")
    with pytest.raises(SlipstreamError) as caught:
        load_target(to, torch.bfloat16)
    return str(caught.value)


UP = "model.layers.2.mlp.up_proj"


def _weights(config: dict[str, Any]) -> dict[str, Any]:
    return config["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c, t: c.update(quant_method="awq"), "quant_method = 'awq'"),
        (lambda c, t: c.update(format="marlin-24"), "format = 'marlin-24'"),
        (lambda c, t: c.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (lambda c, t: c.update(rotation="hadamard"), "quantization_config.rotation = 'hadamard'"),
        (lambda c, t: c["config_groups"].update(group_1={}), "config_groups"),
        (lambda c, t: c["config_groups"]["group_0"].update(targets=["re:.*up_proj"]), "targets = ['re:.*up_proj']"),
        (lambda c, t: c["config_groups"]["group_0"].update(input_activations={"num_bits": 8}), "input_activations"),
        (lambda c, t: _weights(c).update(num_bits=8), "weights.num_bits = 8"),
        (lambda c, t: _weights(c).update(type="float"), "weights.type = 'float'"),
        (lambda c, t: _weights(c).update(symmetric=False), "weights.symmetric = False"),
        (lambda c, t: _weights(c).update(symmetric=1), "weights.symmetric = 1"),
        (lambda c, t: _weights(c).update(strategy="channel"), "weights.strategy = 'channel'"),
        (lambda c, t: _weights(c).update(group_size=64), "weights.group_size = 64"),
        (lambda c, t: _weights(c).update(actorder="group"), "weights.actorder = 'group'"),
        (lambda c, t: _weights(c).pop("strategy"), "without strategy"),
        (lambda c, t: c.update(ignore="lm_head"), "ignore = 'lm_head'"),
        (lambda c, t: c.update(ignore=["lm_head", "re:("]), "ignore = 're:('"),
        (lambda c, t: c["ignore"].append(UP), "divides layers that share their input: model.layers.2.mlp.gate_proj"),
        (lambda c, t: c["ignore"].clear(), "missing: lm_head.weight_packed"),
        (lambda c, t: _weights(c).update(group_size=128), "shape: model.layers.0.mlp.down_proj.weight_scale"),
        (lambda c, t: t.pop(f"{UP}.weight_scale"), f"missing: {UP}.weight_scale"),
        (lambda c, t: t.pop(f"{UP}.weight_packed"), f"missing: {UP}.weight_packed"),
        (lambda c, t: t.update({f"{UP}.weight_zero_point": torch.zeros(2)}), f"not used: {UP}.weight_zero_point"),
        (lambda c, t: t.update({f"{UP}.weight_packed": t[f"{UP}.weight_packed"][:, :8].contiguous()}), "shape: "),
        (lambda c, t: t.update({f"{UP}.weight_packed": t[f"{UP}.weight_packed"].long()}), "is torch.int64"),
        (lambda c, t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"].half()}), "is torch.float16"),
        (lambda c, t: t[f"{UP}.weight_shape"].fill_(128), f"{UP}.weight_shape is [128, 128]"),
        (lambda c, t: t[f"{UP}.weight_scale"][3, 1].fill_(torch.nan), f"{UP}.weight_scale: 1 numbers of 1024"),
    ],
)
def test_what_cannot_be_read_is_named(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None],
    words: str,
) -> None:
    message = edited(checkpoints["g32"], tmp_path / "edited", change)
    assert words in message
    assert "  do: " in message


def test_a_shape_of_32_bits_is_read(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(checkpoints["g32"] / "model.safetensors")
    for name in tensors:
        if name.endswith("weight_shape"):
            tensors[name] = tensors[name].int()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoints["g32"] / "config.json").read_text())
    load_target(tmp_path, torch.bfloat16)


@pytest.mark.parametrize("layer", ["lm_head", "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.up_proj"])
def test_layers_are_ignored_as_the_library_ignores_them(layer: str) -> None:
    from compressed_tensors.utils import is_match

    ignore = ("lm_head", "re:.*self_attn.*", "up_proj", "re:layers")
    module = torch.nn.Linear(1, 1)
    assert Quantization(32, ignore).covers(layer) == (not any(is_match(layer, module, rule) for rule in ignore))


def test_packing_is_the_checkpoints(checkpoints: dict[str, Path]) -> None:
    """What the layers hold, brought back to the form on disk, is what is on disk."""
    target = load_target(checkpoints["g32"], torch.bfloat16)
    tensors = load_file(checkpoints["g32"] / "model.safetensors")
    packed, scale = disarrange(target.layers[0].mlp.gate_up_proj.weight)
    for kind, got in (("weight_packed", packed), ("weight_scale", scale)):
        parts = [tensors[f"model.layers.0.mlp.{part}.{kind}"] for part in ("gate_proj", "up_proj")]
        assert torch.equal(got, torch.cat(parts))


def test_a_random_checkpoint_for_timing_loads(load_test_module: Callable[[Path], ModuleType], tmp_path: Path) -> None:
    made = load_test_module(Path(__file__).parents[1] / "benchmarks" / "int4_checkpoint.py")
    small = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    made.write(tmp_path, 32, {**made.SIZES, **small, "num_attention_heads": 4, "num_key_value_heads": 2})
    target = load_target(tmp_path, torch.bfloat16)
    assert target.layers[1].self_attn.qkv_proj.weight.half == 16
    states, teacher = capture_states(target, [3, 4, 5], (0,), prefill_chunk_tokens=32)
    assert teacher.isfinite().all()
    assert 0.05 < teacher.float().std() / states["slot_0"].float().std() < 20

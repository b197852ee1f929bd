"""Small random checkpoints in exactly the form in which Kimi-K2.5 and DeepSeek-V3 are published.

INT4 weights are packed, and `quantization_config` is written, by the `compressed-tensors` library; the model and what
it answers are transformers' DeepseekV3. Neither knows our reader.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from slipstream.kernels.int4 import dequantise, pack

# Kimi-K2.5's own sizes, for configs alone; to be put over TEXT.
PUBLISHED = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "n_routed_experts": 384,
    "max_position_embeddings": 262144,
    "eos_token_id": 163585,
}
# Kimi-K2.5's own values but for widths, ranks, depth, vocabulary and context; YaRN starts from 16 tokens here.
TEXT = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_nextn_predict_layers": 0,
}
ROPE = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
THETA = 50000.0
# Of config.json beside what transformers' class knows.
EXTRA = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "seq_aux": True, "ep_size": 1}
# The published list: of everything, only routed experts are INT4.
IGNORE = (
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*lm_head.*",
    r"re:vision_tower.*",
    r"re:mm_projector.*",
)
GROUP = 32


@dataclass(frozen=True)
class Synthetic:
    """A checkpoint.

    Args:
        directory: config.json, shards and index.
        reference: transformers' model with the weights that the files stand for, fp32, eager.
        tensors: all that the files hold, by name.
    """

    directory: Path
    reference: DeepseekV3ForCausalLM
    tensors: dict[str, torch.Tensor] = field(repr=False)


def synthesise(
    directory: Path, *, int4: bool = True, wrapper: bool = True, seed: int = 0, library: bool = True, **sizes: Any
) -> Synthetic:
    """Writes a random checkpoint.

    Args:
        directory: to make.
        int4: routed experts are INT4; else everything is bf16.
        wrapper: as `KimiK25ForConditionalGeneration` with vision weights beside it, else as `DeepseekV3ForCausalLM`.
        seed: of all weights.
        library: False: INT4 weights are packed by our own op, where the library is not installed (beside a card).
        sizes: override `TEXT`.
    """
    model = _random_model({**TEXT, **sizes}, seed)
    prefix = "language_model." if wrapper else ""
    tensors = {prefix + name: tensor.bfloat16() for name, tensor in _published(model).items()}
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = model.get_buffer(name.removeprefix(prefix)).clone()
    if wrapper:
        generator = torch.Generator().manual_seed(seed + 1)
        for name in ("vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight"):
            tensors[name] = torch.randn(24, 8, generator=generator).bfloat16()
    quantization = None
    dense = tensors
    if int4:
        tensors, dense, quantization = (_compressed if library else _packed)(tensors)
    _fill(model, {name.removeprefix(prefix): tensor for name, tensor in dense.items()})
    write(directory, tensors, _config({**TEXT, **sizes}, wrapper, quantization))
    return Synthetic(directory, model, tensors)


def write(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Writes the files: two shards, an expert's tensors divided between them, and the index."""
    directory.mkdir(parents=True, exist_ok=True)
    weight_map, names = {}, sorted(tensors)
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        part = {name: tensors[name].contiguous() for name in names[i::2]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))


def _config(text: dict[str, Any], wrapper: bool, quantization: dict[str, Any] | None) -> dict[str, Any]:
    text = {**EXTRA, "rope_theta": THETA, "rope_scaling": ROPE, "torch_dtype": "bfloat16", **text}
    if quantization is not None:
        text["quantization_config"] = quantization
    text |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2" if wrapper else "deepseek_v3"}
    if not wrapper:
        return text
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "media_placeholder_token_id": 163605,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"vt_hidden_size": 1152, "patch_size": 14},
    }


def _random_model(text: dict[str, Any], seed: int) -> DeepseekV3ForCausalLM:
    """Matrices so wide that states keep their size, norm weights from [0.5, 2], a bias that changes who is chosen."""
    rope = {**ROPE, "rope_type": "yarn", "rope_theta": THETA}
    config = DeepseekV3Config(**text, rope_parameters=rope)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = DeepseekV3ForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
        elif tensor.dim() == 1 and name.endswith("norm.weight"):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 1.5 + 0.5)
        elif tensor.dim() > 1:
            std = 1.0 if "embed" in name else tensor.shape[-1] ** -0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
    return model


def _published(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors by the names of published checkpoints: every expert has its own three."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, both in enumerate(tensor):
                tensors[f"{stem}.{expert}.gate_proj.weight"], tensors[f"{stem}.{expert}.up_proj.weight"] = both.chunk(2)
        elif last == "down_proj":
            for expert, one in enumerate(tensor):
                tensors[f"{stem}.{expert}.down_proj.weight"] = one
        else:
            tensors[name] = tensor
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _fill(model: nn.Module, dense: dict[str, torch.Tensor]) -> None:
    """Puts the weights that the files stand for into transformers' model."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        stem, _, last = name.rpartition(".")
        if last in ("gate_up_proj", "down_proj") and tensor.dim() == 3:
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for expert, one in enumerate(tensor):
                one.copy_(torch.cat([dense[f"{stem}.{expert}.{part}.weight"].float() for part in parts]))
        elif name in dense:
            tensor.copy_(dense[name].float())


def _compressed(
    tensors: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """(the files' tensors, the dense weights that the library reads in them, its quantization_config)."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )

    # The library goes by modules: a linear layer for every matrix but embedding and router, which are none.
    shell = nn.Module()
    for name, tensor in tensors.items():
        path = name.removesuffix(".weight")
        if tensor.dim() == 2 and not path.endswith(("embed_tokens", "mlp.gate")):
            layer = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, dtype=tensor.dtype)
            layer.weight.data = tensor.clone()
            _place(shell, path, layer)
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
    config = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)},
        ignore=list(IGNORE),
        quantization_status=QuantizationStatus.FROZEN,
    )
    apply_quantization_config(shell, config)
    for module in shell.modules():
        if hasattr(module, "weight_scale"):
            largest = module.weight.data.float().unflatten(1, (-1, GROUP)).abs().amax(-1)
            module.weight_scale.data.copy_(largest / 7.5)  # so that -8 is used, too
    compressor = ModelCompressor.from_pretrained_model(shell)
    compressor.compress_model(shell)
    packed = {name: tensor.detach().clone() for name, tensor in shell.state_dict().items()}
    told = compressor.quantization_config.model_dump(exclude={"quantization_status"}, mode="json")
    told |= {"ignore": list(IGNORE), "quantization_status": "compressed"}  # rules, as published, not each name
    for module in shell.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight_scale.data.float()  # integer x scale is exact in fp32 only
    compressor.decompress_model(shell)
    dense = {name: tensor.detach().clone() for name, tensor in shell.state_dict().items() if name.endswith(".weight")}
    others = {name: tensor for name, tensor in tensors.items() if name not in dense}
    return packed | others, dense | others, told


def _packed(
    tensors: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """As `_compressed`, without the library."""
    files, dense = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if ".mlp.experts." not in name:
            continue
        grouped = weight.float().unflatten(1, (-1, GROUP))  # [N, K] -> [N, K / group, group]
        scale = (grouped.abs().amax(-1) / 7.5).bfloat16()
        packed = pack((grouped / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int8).flatten(1))
        stem = name.removesuffix(".weight")
        del files[name]
        files[f"{stem}.weight_packed"], files[f"{stem}.weight_scale"] = packed, scale
        files[f"{stem}.weight_shape"] = torch.tensor(weight.shape)
        dense[name] = dequantise(packed, scale)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP, "strategy": "group"}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**weights, "dynamic": False}, "format": "pack-quantized"}}
    told = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return files, dense, {**told, "config_groups": groups, "ignore": list(IGNORE)}


def _place(root: nn.Module, path: str, layer: nn.Module) -> None:
    *parents, last = path.split(".")
    for part in parents:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    root.add_module(last, layer)

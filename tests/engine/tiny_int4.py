"""A tiny target with INT4 weights, written by the library that defines the format."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

SIZES = {
    "tie_word_embeddings": False,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def save_tiny_int4(
    directory: Path, model: LlamaForCausalLM, group: int = 32, ignore: tuple[str, ...] = ("lm_head",)
) -> Path:
    """Quantises `model` (bf16) by the largest value of each group and writes it. Returns the directory."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )

    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    config = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)},
        ignore=list(ignore),
        quantization_status=QuantizationStatus.FROZEN,
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            largest = module.weight.data.float().unflatten(1, (-1, group)).abs().amax(-1)
            module.weight_scale.data.copy_(largest / 7.5)  # so that -8 is used, too
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)
    return directory


def reference(directory: Path) -> Any:
    """The checkpoint in transformers, its weights dequantised by that library, in fp32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

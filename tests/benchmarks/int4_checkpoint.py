"""Writes a Llama checkpoint with random INT4 weights, for timing; the sizes are those of an 8B Llama unless said.

    python tests/benchmarks/int4_checkpoint.py DIRECTORY [--group 128] [--layers 32]

Layers hold the same numbers under their own names: what is timed reads each of them from its own memory all the same.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SIZES = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}


def write(directory: Path, group: int, sizes: dict[str, int] = SIZES) -> None:
    """One file a layer, and one for embedding, norm and head, with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    hidden, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q, kv = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    layer = {"input_layernorm.weight": ones, "post_attention_layernorm.weight": ones.clone()}
    for name, (n, k) in shapes.items():
        layer[f"{name}.weight_packed"] = torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32)
        layer[f"{name}.weight_scale"] = ((0.5 + torch.rand(n, k // group)) * k**-0.5 / 4.6).bfloat16()
        layer[f"{name}.weight_shape"] = torch.tensor([n, k])
    files = {
        f"layer-{i}.safetensors": {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
        for i in range(sizes["num_hidden_layers"])
    }
    files["outside.safetensors"] = {
        "model.embed_tokens.weight": torch.randn(sizes["vocab_size"], hidden).bfloat16(),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": (torch.randn(sizes["vocab_size"], hidden) * hidden**-0.5).bfloat16(),
    }
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    config = {
        **sizes,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
        "quantization_config": quantization,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--group", type=int, default=128, choices=(32, 128))
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    arguments = parser.parse_args()
    write(arguments.directory, arguments.group, {**SIZES, "num_hidden_layers": arguments.layers})

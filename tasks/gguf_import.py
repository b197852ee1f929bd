"""From one GGUF file to a Hugging Face directory: weights dequantised once, config, tokenizer and chat template.

What the file says is used to the last tensor and key that matters, or refused by name: nothing is guessed.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.gguf_tokenizer import write_tokenizer
from slipstream.tasks.manifest import write_json

WEIGHTS = "model.safetensors"

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def import_gguf(
    path: Path, out: Path, dtype: torch.dtype = torch.bfloat16, progress: Callable[[int, int], None] | None = None
) -> None:
    """Writes config.json, generation_config.json, model.safetensors, the tokenizer's files and the chat template.

    Args:
        path: a GGUF file of the llama architecture with a byte-level BPE tokenizer.
        out: an existing directory; after an error its contents are not to be used.
        dtype: of the weights written.
        progress: called with (tensors done, tensors in all).

    Raises:
        SlipstreamError: truncated or unreadable file, unknown architecture, quantisation, tokenizer or tensor.
    """
    reader = open_gguf(path)
    meta = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    config = llama_config(meta, [t.name for t in reader.tensors], dtype)
    config["vocab_size"] = int(_tensor(reader, "token_embd.weight").data.shape[0])
    weights = {}
    for done, tensor in enumerate(reader.tensors):
        name = hugging_face_name(tensor.name, config["num_hidden_layers"])
        weights[name] = _dequantise(tensor, config).to(dtype)
        if progress is not None:
            progress(done + 1, len(reader.tensors))
    _check_complete(weights, config)
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    write_json(out / "config.json", config)
    stops = [config["eos_token_id"]] if isinstance(config["eos_token_id"], int) else config["eos_token_id"]
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": stops, "pad_token_id": config["pad_token_id"]}
    write_json(out / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
    write_tokenizer(meta, out, max_tokens=config["max_position_embeddings"])


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Opens a GGUF file and checks that every tensor that its header lists is really in it."""
    try:
        reader = gguf.GGUFReader(path)
        # The reader maps the tensors' bytes when it is made, so a file cut off in their midst has failed by now.
        short = [t.name for t in reader.tensors if t.data.nbytes != t.n_bytes]
    except Exception as error:  # the reader knows no error of its own: ValueError, IndexError, KeyError, OverflowError
        raise _damaged(path, str(error)) from error
    if short or not reader.tensors:
        raise _damaged(path, f"tensors without their bytes: {short[:3]}" if short else "it lists no tensors")
    return reader


def _damaged(path: Path, why: str) -> SlipstreamError:
    return SlipstreamError(
        f"{path} ({path.stat().st_size:,} bytes) is not a whole GGUF file: {why}",
        expected="a GGUF file with the bytes of every tensor that its header lists",
        do="delete it and fetch it again; a download or a copy was probably cut short",
    )


def _tensor(reader: gguf.GGUFReader, name: str) -> gguf.ReaderTensor:
    for tensor in reader.tensors:
        if tensor.name == name:
            return tensor
    raise SlipstreamError(f"the GGUF file has no tensor {name}", expected="a complete model of the llama architecture")


def llama_config(meta: dict[str, Any], tensor_names: list[str], dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a llama target from GGUF metadata; the vocabulary's size comes from the embedding.

    Raises SlipstreamError for another architecture, a missing key, or scaled or partial rotary positions.
    """
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise SlipstreamError(
            f"the GGUF file holds a model of the architecture {architecture!r}",
            expected="'llama', the only one that is imported from GGUF",
            do="give target.source a Hugging Face directory of this model",
        )

    def need(key: str) -> Any:
        if f"llama.{key}" not in meta:
            raise SlipstreamError(f"the GGUF metadata lacks llama.{key}", expected="a complete llama header")
        return meta[f"llama.{key}"]

    num_heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    head_dim = int(meta.get("llama.attention.key_length", hidden // num_heads))
    scaled = sorted(k for k in meta if k.startswith("llama.rope.scaling"))
    if scaled or int(meta.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise SlipstreamError(
            f"the GGUF file asks for rotary positions that are not imported: {scaled or 'not every dimension turned'}",
            expected="plain rotary positions over the whole head",
            do="give target.source a Hugging Face directory of this model",
        )
    stops = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    distinct = list(dict.fromkeys(int(i) for i in stops if i is not None))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(meta.get("llama.attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": _shortest(meta.get("llama.rope.freq_base", 10000.0))},
        "max_position_embeddings": int(need("context_length")),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": distinct[0] if len(distinct) == 1 else distinct,
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "dtype": str(dtype).removeprefix("torch."),
    }


def hugging_face_name(name: str, num_layers: int) -> str:
    """Name of a llama tensor in Hugging Face's form. Raises SlipstreamError for one that has no place there."""
    match = _LAYER_NAME.fullmatch(name)
    if name in _TOP:
        return _TOP[name]
    if match and match[2] in _LAYER and int(match[1]) < num_layers:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"
    raise SlipstreamError(
        f"the GGUF file has a tensor {name!r} that this importer does not know",
        expected=f"embedding, norms, head, and layers 0..{num_layers - 1} of a plain llama model",
        do="give target.source a Hugging Face directory of this model",
    )


def _dequantise(tensor: gguf.ReaderTensor, config: dict[str, Any]) -> torch.Tensor:
    """One tensor in fp32, its rows in Hugging Face's order."""
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise SlipstreamError(
            f"tensor {tensor.name} is stored as {tensor.tensor_type.name}, which is not dequantised here: {error}",
            expected="a type that the gguf package dequantises, such as F32, F16, BF16, Q4_0, Q4_1, Q5_1, Q8_0, Q6_K",
            do="choose another quantisation of this model",
        ) from error
    weight = torch.from_numpy(np.require(values, requirements=["C", "W"]))  # copies only what the file itself backs
    if ".attn_q." in tensor.name:
        return unpermute_rotary_rows(weight, config["num_attention_heads"])
    if ".attn_k." in tensor.name:
        return unpermute_rotary_rows(weight, config["num_key_value_heads"])
    return weight


def unpermute_rotary_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a q or k projection from llama's order to Hugging Face's.

    A llama GGUF has the two halves of a rotary pair in neighbouring rows, Hugging Face has them half a head apart.

    Args: weight: [num_heads * head_dim, hidden]. Returns: the same shape, rows moved.
    """
    pairs = weight.unflatten(0, (num_heads, -1, 2))  # [H * d, h] -> [H, d/2, 2, h]
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()  # -> [H, 2, d/2, h] -> [H * d, h]


def _check_complete(weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    layers = range(config["num_hidden_layers"])
    wanted = {f"model.layers.{i}.{part}.weight" for i in layers for part in _LAYER.values()}
    wanted |= {"model.embed_tokens.weight", "model.norm.weight"}
    missing = sorted(wanted - set(weights))
    if missing:
        raise SlipstreamError(
            f"the GGUF file lacks {len(missing)} tensors: {missing[:5]}",
            expected=f"every tensor of {config['num_hidden_layers']} layers",
            do="fetch a complete file",
        )


def _shortest(value: float) -> float:
    """The shortest decimal that is the same fp32 number: GGUF keeps these values in fp32, config.json in decimal."""
    return float(str(np.float32(value)))

"""Tiny random models for tests. Norm weights come from [0.5, 2]: with weights of 1 a missing norm shows too little."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.loader import load_target
from slipstream.engine.models.decoder import Decoder
from slipstream.engine.models.dense import DenseModel

SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def randomise(module: torch.nn.Module, seed: int, std: float = 0.15) -> None:
    """Matrices from N(0, std), norm weights (vectors) from [0.5, 2]; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 1.5 + 0.5)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def tiny_hf(
    seed: int = 0, dtype: torch.dtype = torch.float32, family: str = "llama", **sizes: object
) -> PreTrainedModel:
    """A random model of transformers; `family` is its model type. `sizes` override `SIZES`."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **sizes}))
    randomise(model, seed)
    return model.to(dtype).eval()


def save_tiny(directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: object) -> Path:
    """Writes a random checkpoint (config.json, model.safetensors) and returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tiny_hf(seed, dtype, **sizes).save_pretrained(directory)
    return directory


def save_sharded(directory: Path, seed: int = 0) -> Path:
    """The same in two shards and an index."""
    tensors = {k: v.contiguous() for k, v in tiny_hf(seed, tie_word_embeddings=False).state_dict().items()}
    save_tiny(directory, seed, tie_word_embeddings=False)
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for i, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, directory / file)
        weight_map.update(dict.fromkeys(names, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def tiny_target(
    directory: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **sizes: object
) -> DenseModel:
    """Writes and loads a random target."""
    return load_target(save_tiny(directory, seed, **sizes), dtype, device)


def tiny_draft(
    target: Decoder, seed: int = 0, slots: tuple[int, ...] = (1, 2, 4), latent: bool = False, **switches: object
) -> Eagle3Network:
    """A random EAGLE-3 draft for `target`, in its dtype, on a third of its vocabulary.

    latent: its attention has the target's latents (MLA), heads and rope scaling.
    """
    c = target.config
    config = Eagle3Config(
        hidden_size=c.hidden_size,
        intermediate_size=80,
        num_heads=4,
        num_kv_heads=2,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope_theta,
        rope_scaling=None,
        max_position=c.max_position,
        vocab_size=c.vocab_size,
        draft_vocab_size=c.vocab_size // 3,
        target_hidden_size=c.hidden_size,
        slots=slots,
        target_num_layers=c.num_layers,
    )
    if latent:
        assert c.latent is not None
        heads = {
            "num_heads": c.num_heads,
            "num_kv_heads": c.num_heads,
            "head_dim": c.latent.nope_dim + c.latent.rope_dim,
        }
        config = replace(config, latent=c.latent, rope_scaling=c.rope_scaling, **heads)
    config = replace(config, **switches)
    network = Eagle3Network(config)
    randomise(network, seed)
    ids = torch.arange(config.draft_vocab_size)
    network.d2t.copy_(ids * (c.vocab_size // config.draft_vocab_size - 1))  # of a third: draft id i is target id 3 i
    network = network.to(target.embed_tokens.weight.dtype)
    network.embed_tokens.weight.data.copy_(target.embed_tokens.weight)
    return network.requires_grad_(False).eval()


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 40, vocab_size: int = 199) -> list[list[int]]:
    """Random prompts of `low`..`high` tokens; ids 0..2 are left out."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]

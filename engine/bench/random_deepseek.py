"""Kimi-K2.5 with random weights: one rank's share of the whole model, made without a checkpoint."""

from dataclasses import replace

import torch

from slipstream.engine.deepseek_config import WRAPPER, Experts, Latent
from slipstream.engine.expert_kernels import prepare_expert_kernels
from slipstream.engine.layers.linear import unallocated
from slipstream.engine.layers.quantized import Int4ExpertsReader, Reader
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models.deepseek import DeepseekModel
from slipstream.engine.packed_weights import pack_for_device
from slipstream.engine.quantization import Quantization
from slipstream.engine.streamed_load import CheckpointNames, units_of
from slipstream.engine.tensor_parallel import Shard, TensorParallel
from slipstream.kernels.expert_mlp import ExpertWeights
from slipstream.kernels.int4 import arranged

_SPREAD = 4.6  # deviation of integers -8..7


def kimi_k25(num_layers: int = 61, max_position: int = 262144) -> ModelConfig:
    """The published values; fewer layers for a slice of it, fewer positions for a smaller rope table."""
    rope = {"type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    return ModelConfig(
        architecture=WRAPPER,
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=18432,
        num_layers=num_layers,
        num_heads=64,
        num_kv_heads=64,
        head_dim=192,
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
        rope_scaling={**rope, "original_max_position_embeddings": 4096},
        max_position=max_position,
        tie_word_embeddings=False,
        bos_token_id=163584,
        eos_token_ids=(163585,),
        dtype="bfloat16",
        quantization=Quantization(
            32, ("re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*", "re:.*lm_head.*")
        ),
        latent=Latent(1536, 512, 128, 64, 128, scale=0.14467962580268923),
        experts=Experts(384, 8, 1, 2048, first_dense=1, scaling=2.827, normalise=True, groups=1, groups_kept=1),
    )


def kimi_k25_rank(ranks: int = 8, num_layers: int = 61, max_position: int = 8192) -> ModelConfig:
    """One rank's share of it as a model of its own: no other rank, and nothing exchanged."""
    whole = kimi_k25(num_layers, max_position)
    assert whole.experts is not None
    heads = whole.num_heads // ranks
    return replace(
        whole,
        vocab_size=whole.vocab_size // ranks,
        intermediate_size=whole.intermediate_size // ranks,
        num_heads=heads,
        num_kv_heads=heads,
        experts=replace(whole.experts, width=whole.experts.width // ranks),
        bos_token_id=0,
        eos_token_ids=(),
    )


def random_deepseek(
    config: ModelConfig,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    parallel: TensorParallel | None = None,
    seed: int = 0,
) -> DeepseekModel:
    """A target of these sizes, ready to serve: weights as wide as keeps states their size, INT4 uniform, norms 1.

    Rows choose different experts: the router is random. Memory is taken as a loader takes it, layer by layer.
    """
    prepare_expert_kernels(config, dtype, device)
    with torch.device(device), unallocated():
        model = DeepseekModel(config, dtype, parallel)
    generator = torch.Generator(device).manual_seed(seed)
    for unit in units_of(model, CheckpointNames.of(config), config.quantization):
        ready = unit.on(device)
        for name, shard in replace(ready, readers=()).shards().items():
            _fill(name, shard, generator)
        for reader in ready.readers:
            _fill_experts(reader, generator)
    model.prepare()
    pack_for_device(model, device)
    return model.requires_grad_(False).eval()


def _fill_experts(reader: Reader, generator: torch.Generator) -> None:
    """All experts of a layer at once: in any order of words and scales they are as random."""
    if not isinstance(reader, Int4ExpertsReader):
        raise ValueError(f"{type(reader).__name__}: expected no INT4 weights but routed experts")
    for (packed, scale), part in ((reader.gate_up, "gate_proj"), (reader.down, "down_proj")):
        packed.random_(-(2**31), 2**31, generator=generator)
        features = reader.parts[f"0.{part}.weight"].shape[1]  # of all ranks
        scale.uniform_(0.5, 1.5, generator=generator).mul_(features**-0.5 / _SPREAD)
    layer = reader.layer
    layer.int4 = ExpertWeights(arranged(*reader.gate_up, layer.cut.size), arranged(*reader.down), layer.num)


def _fill(name: str, shard: Shard, generator: torch.Generator) -> None:
    view, features = shard.view, shard.shape[-1]
    if name.endswith("norm.weight"):
        view.fill_(1.0)
    elif name.endswith("e_score_correction_bias"):
        view.normal_(0.0, 0.02, generator=generator)
    else:
        view.normal_(0.0, 1.0 if "embed_tokens" in name else features**-0.5, generator=generator)

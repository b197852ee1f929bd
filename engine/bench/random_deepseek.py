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
from slipstream.kernels.int4 import BLOCK, Int4Weight, arranged

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

    Rows choose different experts: the router is random. Scales have a random sign: the integers -8..7 are -0.5 on
    average, and weights that are not 0 on average add the same to every feature, layer upon layer, until that is all
    that rows have. Memory is taken as a loader takes it, layer by layer. Of several ranks each makes the whole of a
    layer and keeps its part, so that together they hold the model of one rank.
    """
    prepare_expert_kernels(config, dtype, device)
    with torch.device(device), unallocated():
        model = DeepseekModel(config, dtype, parallel)
    generator = torch.Generator(device).manual_seed(seed)
    for unit in units_of(model, CheckpointNames.of(config), config.quantization):
        ready = unit.on(device)
        for name, shard in replace(ready, readers=()).shards().items():
            fill(name, shard, generator)
        for reader in ready.readers:
            _fill_experts(reader, generator)
    model.prepare()
    pack_for_device(model, device)
    return model.requires_grad_(False).eval()


def _fill_experts(reader: Reader, generator: torch.Generator) -> None:
    """All experts of a layer at once: in any order of words and scales they are as random."""
    if not isinstance(reader, Int4ExpertsReader):
        raise ValueError(f"{type(reader).__name__}: expected no INT4 weights but routed experts")
    layer, cut, group = reader.layer, reader.layer.cut, reader.group
    hidden, width = reader.parts["0.down_proj.weight"].shape  # of all ranks
    gate_up = _random_stack(*reader.gate_up, (layer.num * 2 * width, hidden), width, group, generator)
    down = _random_stack(*reader.down, (layer.num * hidden, width), 16, group, generator)
    if cut.size < width:
        blocks = slice(cut.start // 16, cut.stop // 16)  # of an expert: 16 gate rows and 16 up rows each
        words, scales = (
            x.unflatten(0, (layer.num, -1))[:, blocks].flatten(0, 1) for x in (gate_up.words, gate_up.scales)
        )
        gate_up = Int4Weight(words, scales, layer.num * 2 * cut.size, cut.size)
        words = down.words[:, cut.start // BLOCK : cut.stop // BLOCK].contiguous()
        scales = down.scales[:, cut.start // group : cut.stop // group].contiguous()
        down = Int4Weight(words, scales, down.num_rows, down.half)
    layer.int4 = ExpertWeights(gate_up, down, layer.num)


def _random_stack(
    packed: torch.Tensor,
    scale: torch.Tensor,
    shape: tuple[int, int],
    half: int,
    group: int,
    generator: torch.Generator,
) -> Int4Weight:
    """A whole weight of this shape, in the memory of `packed` and `scale` where they are of it."""
    rows, columns = shape
    if packed.shape != (rows, columns // 8):
        packed, scale = packed.new_empty(rows, columns // 8), scale.new_empty(rows, columns // group)
    packed.random_(-(2**31), 2**31, generator=generator)
    scale.uniform_(0.5, 1.5, generator=generator).mul_(columns**-0.5 / _SPREAD)
    scale.mul_(torch.empty_like(scale).bernoulli_(0.5, generator=generator).mul_(2).sub_(1))  # else -0.5 on average
    return arranged(packed, scale, half)


def fill(name: str, shard: Shard, generator: torch.Generator) -> None:
    """Fills this rank's part of a random tensor, of which every rank that asks in the same order makes the whole."""
    view, features = shard.view, shard.shape[-1]
    whole = view if view.shape == shard.shape else view.new_empty(shard.shape)
    if name.endswith("norm.weight"):
        whole.fill_(1.0)
    elif name.endswith("e_score_correction_bias"):
        whole.normal_(0.0, 0.02, generator=generator)
    else:
        whole.normal_(0.0, 1.0 if "embed_tokens" in name else features**-0.5, generator=generator)
    if whole is not view:
        view.copy_(shard.take(whole))

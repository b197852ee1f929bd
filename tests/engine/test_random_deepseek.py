"""Random weights in a published size: the shape of a loaded model, and rows that go to different experts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.engine.batch_capture import BatchCapture
from slipstream.engine.bench.random_deepseek import kimi_k25, kimi_k25_rank, random_deepseek
from slipstream.engine.capture import slot_name
from slipstream.engine.layers.linear import unallocated
from slipstream.engine.loader import load_target
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models.deepseek import DeepseekModel
from slipstream.engine.runner import capture_states
from slipstream.engine.streamed_load import CheckpointNames, units_of
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels.stream import Stream

_PUBLISHED = kimi_k25()
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "num_kv_heads": 2,
    "latent": replace(_PUBLISHED.latent, q_rank=64, kv_rank=32),
    "experts": replace(_PUBLISHED.experts, num=16, width=128),
}
KIMI = Path(__file__).parents[1] / "checkpoints" / "kimi.py"


@pytest.fixture(scope="module")
def kimi(load_test_module):
    return load_test_module(KIMI)


def test_the_sizes_are_those_that_a_published_config_gives(kimi, tmp_path):
    rope = {**kimi.ROPE, "original_max_position_embeddings": 4096}
    kimi.write(tmp_path, {}, kimi._config({**kimi.TEXT, **kimi.PUBLISHED, "rope_scaling": rope}, True, None))
    read, ours = ModelConfig.from_dir(tmp_path), kimi_k25()
    free = {"bos_token_id": 0, "eos_token_ids": (), "quantization": None, "rope_scaling": None}
    assert replace(read, **free) == replace(ours, **free)
    assert {key: read.rope_scaling[key] for key in ours.rope_scaling} == ours.rope_scaling
    names = CheckpointNames.of(ours)
    int4 = [names.name(f"layers.1.{name}") for name in ("mlp.experts.0.up_proj", "mlp.experts.383.down_proj")]
    plain = ("self_attn.o_proj", "mlp.shared_experts.up_proj", "mlp.gate_proj")
    assert all(ours.quantization.covers(name) for name in int4)
    assert not any(ours.quantization.covers(names.name(f"layers.0.{name}")) for name in plain)


def test_a_rank_of_eight_holds_what_the_published_sizes_say():
    """Nothing is allocated: an expert is 24.8 MB, an eighth of it here; projections to latents are whole."""
    config = kimi_k25(2, 16)
    with torch.device("meta"), unallocated():
        model = DeepseekModel(config, torch.bfloat16, TensorParallel(3, 8, object()))
    layer = units_of(model, CheckpointNames.of(config), config.quantization)[2]
    held = {name: shard.view.nbytes for name, shard in layer.shards().items()}
    experts = sum(size for name, size in held.items() if ".experts." in name and not name.endswith("weight_shape"))
    assert experts == 384 * 3 * 2048 * 7168 * 4.5 / 8 / 8
    assert sum(size for name, size in held.items() if "_a_proj" in name) == (1536 + 576) * 7168 * 2
    others = sum(size for name, size in held.items() if ("self_attn" in name and "_b_proj" in name) or "o_proj" in name)
    assert others == (64 * 192 * 1536 + 64 * 256 * 512 + 7168 * 64 * 128) * 2 / 8


def test_a_random_model_has_the_tensors_of_a_loaded_one_and_runs(kimi, tiny, tmp_path):
    kimi.synthesise(tmp_path / "model")
    loaded = load_target(tmp_path / "model", torch.float32)
    model = random_deepseek(loaded.config, "cpu", torch.float32)
    shapes = {name: tensor.shape for name, tensor in loaded.state_dict().items()}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    for ours, theirs in zip(model.layers[1:], loaded.layers[1:], strict=True):
        assert ours.mlp.experts.int4.gate_up.words.shape == theirs.mlp.experts.int4.gate_up.words.shape
        assert ours.mlp.experts.int4.down.scales.shape == theirs.mlp.experts.int4.down.scales.shape
    ids = tiny.prompts(1, low=40, high=40)[0]
    states, last = capture_states(model, ids, (0, 2, 3))
    sizes = [float(states[slot_name(slot)].std()) for slot in (0, 2, 3)]
    assert 0.5 < min(sizes) <= max(sizes) < 20
    assert last.isfinite().all()
    layer = model.layers[3]
    chosen = layer.mlp.gate(Stream(states["slot_3"]), layer.post_attention_layernorm.constants, None).choice.ids
    assert len({tuple(sorted(row)) for row in chosen.tolist()}) > 30
    assert len(chosen.unique()) == 16


def test_rows_stay_apart_in_a_deep_model():
    """States keep what is the token's own: no direction that all share, and as many experts as independent choices."""
    experts = replace(_PUBLISHED.experts, num=96, width=64)
    config = replace(kimi_k25_rank(8, 16, 64), **{**SMALL, "hidden_size": 256, "experts": experts})
    model = random_deepseek(config, "cpu")
    chosen = [[] for _ in model.layers]
    for layer, ids in zip(model.layers[1:], chosen[1:], strict=True):
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out, ids=ids: ids.append(out.choice.ids))
    prompts = torch.randint(0, 128, (8, 32), generator=torch.Generator().manual_seed(7)).tolist()
    last = torch.stack([state[-1] for _, state in BatchCapture(model, (0,), 256, 32)(prompts)]).float()  # [8, h]
    cosines = torch.nn.functional.cosine_similarity(last[:, None], last[None], dim=-1) - torch.eye(8)
    assert cosines.abs().max() < 0.5
    assert last.std() < 10
    independent = 96 * (1 - (1 - 8 / 96) ** 8)
    distinct = [len(ids[0].unflatten(0, (8, 32))[:, -1].unique()) for ids in chosen[1:]]
    assert min(distinct) > 0.7 * independent, distinct
    assert sum(distinct) / len(distinct) > 0.9 * independent


def test_ranks_hold_parts_of_one_model():
    config = replace(kimi_k25_rank(1, 2, 64), **SMALL)
    whole = random_deepseek(config, "cpu", torch.float32)
    width = config.experts.width
    for rank in range(2):
        part = random_deepseek(config, "cpu", torch.float32, TensorParallel(rank, 2, object()))
        rows = slice(rank * width // 2, (rank + 1) * width // 2)
        for expert in (0, 9):
            gate_up, down = whole.layers[1].mlp.experts.weights.expert(expert)
            ours, of_down = part.layers[1].mlp.experts.weights.expert(expert)
            assert torch.equal(ours, gate_up.unflatten(0, (2, -1))[:, rows].flatten(0, 1))
            assert torch.equal(of_down, down[:, rows])
        heads = slice(rank, rank + 1)
        assert torch.equal(part.layers[0].self_attn.key_up, whole.layers[0].self_attn.key_up[heads])
        assert torch.equal(part.layers[1].mlp.gate.weight, whole.layers[1].mlp.gate.weight)
        assert torch.equal(part.embed_tokens.weight, whole.embed_tokens.weight.chunk(2)[rank])

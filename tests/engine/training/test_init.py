"""The draft's first weights: what comes from the target, and the linear warm start."""

import pytest
import torch

from slipstream.engine.drafts.eagle3.vocab import select_draft_vocab
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.training.data import Conversation, ConversationList, collate
from slipstream.engine.training.init import TargetWeights, init_network
from slipstream.engine.training.unroll import unrolled_states

SIZES = {"hidden_size": 32, "target_hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@pytest.fixture
def target(draft_tools):
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    layer = {
        "input_layernorm.weight": torch.full((32,), 0.7),
        "post_attention_layernorm.weight": torch.full((32,), 0.8),
        "self_attn.q_proj.weight": draw(64, 32),
        "self_attn.k_proj.weight": draw(32, 32),
        "self_attn.v_proj.weight": draw(32, 32),
        "self_attn.o_proj.weight": draw(32, 64),
        "mlp.gate_proj.weight": draw(24, 32),
        "mlp.up_proj.weight": draw(24, 32),
        "mlp.down_proj.weight": draw(32, 24),
    }
    return TargetWeights(draw(draft_tools.VOCAB, 32), torch.full((32,), 1.3), draw(draft_tools.VOCAB, 32), layer)


def linear_conversations(target, count=8, length=60):
    """States that follow a linear recurrence around a common mean, as a model's states have one."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(32, generator=generator)
    carry, embed = (torch.randn(32, 32, generator=generator) * 32**-0.5 for _ in range(2))
    mix = torch.randn(32, 96, generator=generator)
    out = []
    for _ in range(count):
        ids = torch.randint(0, len(target.embedding), (length,), generator=generator)
        states = [mean]
        for token in ids[1:]:
            e = target.embedding[token]
            states.append(mean + 0.5 * (states[-1] - mean) @ carry + 3 * e @ embed)
        teacher = torch.stack(states)
        mask = torch.arange(length) >= 4
        out.append(Conversation(ids, mask, teacher @ mix, teacher[3:], 3))
    return out


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True}, {"norm_before_residual": True}, {"norm_output": True}])
def test_warm_start_is_what_the_network_computes(draft_tools, target, switches):
    network = draft_tools.make_network(**SIZES, **switches)
    vocab = select_draft_vocab(torch.arange(draft_tools.VOCAB), 30)
    conversations = linear_conversations(target)
    explained = init_network(network, target, vocab, "target", 0, ConversationList(conversations))
    assert explained > 0.8
    batch = collate(conversations, 1)
    with torch.no_grad():
        (state,) = unrolled_states(network, batch, 1)
    wanted = batch.teacher[batch.teacher_rows[0]]
    wanted = wanted / wanted.square().mean(-1, keepdim=True).sqrt()
    share = 1 - (state - wanted).square().sum() / (wanted - wanted.mean((0, 1))).square().sum()
    assert share > explained - 0.1  # attention to the own row is not perfect
    assert torch.equal(network.norm.weight, target.final_norm)


def test_target_without_conversations(draft_tools, target):
    network = draft_tools.make_network(**SIZES)
    vocab = select_draft_vocab(torch.arange(draft_tools.VOCAB), 30)
    assert init_network(network, target, vocab, "target", 0) is None
    assert torch.equal(network.lm_head.weight, target.head[vocab.target_ids])
    assert torch.equal(network.embed_tokens.weight, target.embedding)
    assert not network.embed_tokens.weight.requires_grad
    assert torch.equal(network.d2t, vocab.d2t)
    qkv = network.midlayer.self_attn.qkv_proj
    q = qkv.weight[qkv.part_slices()["q_proj"]]
    assert torch.equal(q[:, 32:], target.last_layer["self_attn.q_proj.weight"])  # the half that reads the feature
    assert q[:, :32].abs().max() < 0.1
    assert torch.equal(network.midlayer.mlp.down_proj.weight, target.last_layer["mlp.down_proj.weight"])
    features = torch.randn(5, 96)
    torch.testing.assert_close(network.fuse(features), features[:, 64:], rtol=0.2, atol=0.2)


def test_random_takes_only_the_embedding(draft_tools, target):
    first, second, other = (draft_tools.make_network(**SIZES) for _ in range(3))
    vocab = select_draft_vocab(torch.arange(draft_tools.VOCAB), 30)
    for network, seed in ((first, 0), (second, 0), (other, 1)):
        init_network(network, target, vocab, "random", seed)
    assert torch.equal(first.embed_tokens.weight, target.embedding)
    assert torch.equal(first.fc.weight, second.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert (first.norm.weight == 1).all()
    assert not torch.equal(first.lm_head.weight, target.head[vocab.target_ids])


def test_refusals(draft_tools, target):
    vocab = select_draft_vocab(torch.arange(draft_tools.VOCAB), 30)
    with pytest.raises(SlipstreamError, match=r"draft.init is 'zero'"):
        init_network(draft_tools.make_network(**SIZES), target, vocab, "zero", 0)
    with pytest.raises(SlipstreamError, match="the target's embedding is"):
        init_network(draft_tools.make_network(), target, vocab, "target", 0)


def test_the_targets_weights_are_read_from_shards_and_a_lost_shard_is_named(tiny, tmp_path):
    directory = tiny.save_sharded(tmp_path)
    model = tiny.tiny_hf(0, tie_word_embeddings=False)
    tensors = model.state_dict()
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    weights = TargetWeights.from_dir(directory, model.config.num_hidden_layers)
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.head, tensors["lm_head.weight"])
    assert torch.equal(weights.final_norm, tensors["model.norm.weight"])
    assert weights.last_layer.keys() == {name.removeprefix(last) for name in tensors if name.startswith(last)}
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SlipstreamError, match=r"model-00002-of-00002\.safetensors does not exist"):
        TargetWeights.from_dir(directory, model.config.num_hidden_layers)

"""The EAGLE-3 draft network: one definition for training, conversion checks, parity and serving.

    g      = fc([a_1; ..; a_n])                      fuse: n captured states -> one feature
    x      = [input_layernorm(e); hidden_norm(g)]    e = embedding of the slot's token
    r      = g + o_proj(attention(x))                residual from the un-normed g
    s      = r + mlp(post_attention_layernorm(r))    the pre-norm state
    logits = lm_head(norm(s))                        over the draft vocabulary
    next g = s

Attention's keys and values live with the caller, who passes `attend`: the training-time-test mask in training, the
paged KV cache in serving, a plain list of keys in tests.
"""

from collections.abc import Callable

import torch
from torch import nn

from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.layers import (
    ColumnParallelLinear,
    GatedMLP,
    Linear,
    MergedColumnParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from slipstream.engine.tensor_parallel import GatherVocabulary, TensorParallel, single
from slipstream.kernels.rotary import apply_rotary

# attend(q [..., heads, d], k [..., kv_heads, d], v [..., kv_heads, d]) -> [..., heads, d]; q and k are rotated already.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Eagle3Attention(nn.Module):
    """Projections of the draft's attention, this rank's heads: 2h wide inputs, h wide output."""

    def __init__(self, config: Eagle3Config, parallel: TensorParallel, dtype: torch.dtype | None) -> None:
        super().__init__()
        heads = parallel.cut_heads(config.num_heads, config.num_kv_heads)
        self.num_heads, self.num_kv_heads, self.head_dim = heads.q.size, heads.kv.size, config.head_dim
        q, kv = heads.q.times(config.head_dim), heads.kv.times(config.head_dim)
        cuts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv_proj = MergedColumnParallelLinear(2 * config.hidden_size, cuts, dtype=dtype)
        self.o_proj = RowParallelLinear(q, config.hidden_size, parallel, dtype=dtype)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [..., 2h]; cos, sin [..., d] of the rows' positions -> [..., h]."""
        q, k, v = self.qkv_proj.split(self.qkv_proj(x))  # [..., 2h] -> [..., nq * d], 2 x [..., nkv * d]
        q = apply_rotary(q.unflatten(-1, (self.num_heads, self.head_dim)), cos, sin)  # [..., nq, d]
        k = apply_rotary(k.unflatten(-1, (self.num_kv_heads, self.head_dim)), cos, sin)  # [..., nkv, d]
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))  # [..., nkv, d]
        return self.o_proj(attend(q, k, v).flatten(-2))  # [..., nq, d] -> [..., h]


class Eagle3Layer(nn.Module):
    """The draft's one decoder layer, which reads the token's embedding beside the feature."""

    def __init__(self, config: Eagle3Config, parallel: TensorParallel, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = Eagle3Attention(config, parallel, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, parallel, dtype=dtype)

    def forward(
        self, embedding: torch.Tensor, g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """embedding, g [..., h] -> the pre-norm state s [..., h]."""
        normed = self.hidden_norm(g)
        residual = normed if self.norm_before_residual else g
        x = torch.cat((self.input_layernorm(embedding), normed), dim=-1)  # 2 x [..., h] -> [..., 2h]
        attention = self.self_attn(x, cos, sin, attend)
        normed, residual = self.post_attention_layernorm.add(attention, residual)
        return residual + self.mlp(normed)


class Eagle3Network(nn.Module):
    """An EAGLE-3 draft.

    Args:
        config: shapes and switches.
        dtype: of the parameters; None is torch's default.
        parallel: the ranks that serve it together; training has one. Embedding and head are cut by vocabulary, the
            layer by heads and features; `fc` and the norms are whole on every rank.

    Parameters come uninitialised (norm weights 1, d2t all zero): `engine.training.init` or a checkpoint fills them.
    The parameters' names are those of the plain Hugging Face EAGLE-3 form, but for `qkv_proj` and `gate_up_proj`, which
    hold q, k, v and gate, up stacked by rows.
    """

    def __init__(
        self, config: Eagle3Config, dtype: torch.dtype | None = None, parallel: TensorParallel | None = None
    ) -> None:
        super().__init__()
        self.config, self.parallel = config, parallel or single()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden, self.parallel, dtype=dtype)
        self.input_norm = RMSNorm(config.feature_size, eps, dtype=dtype) if config.norm_before_fc else None
        norms = [RMSNorm(config.target_hidden_size, eps, dtype=dtype) for _ in config.slots]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = Linear(config.feature_size, hidden, dtype=dtype)
        self.midlayer = Eagle3Layer(config, self.parallel, dtype)
        self.norm = RMSNorm(hidden, eps, dtype=dtype)
        self.lm_head = ColumnParallelLinear(hidden, self.parallel.cut(config.draft_vocab_size), dtype=dtype)
        self.gather_vocabulary = GatherVocabulary(config.draft_vocab_size, self.parallel)
        self.rotary = RotaryEmbedding(config.head_dim, config.max_position, config.rope_theta, config.rope_scaling)
        # Offsets, as checkpoints store them: target id = draft id + d2t[draft id].
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.d2t: torch.Tensor

    def normed_features(self, features: torch.Tensor) -> torch.Tensor:
        """Features [..., n * ht] after the norms that stand before fc (none unless switched on)."""
        if self.input_norm is not None:
            return self.input_norm(features)
        if self.fc_norm is not None:
            chunks = features.chunk(len(self.fc_norm), dim=-1)  # [..., n * ht] -> n x [..., ht]
            return torch.cat([norm(c) for norm, c in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return features

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Captured states of the config's slots, in its order, [..., n * ht] -> g [..., h]."""
        return self.fc(self.normed_features(features))

    def forward(
        self, token_ids: torch.Tensor, g: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """One draft step for every row.

        Args:
            token_ids: [...] int64 target ids, the token that each row embeds.
            g: [..., h], from `fuse` at step 1 and from `feedback` later.
            positions: [...] int64 rope positions (slot t at step k: t + k - 1); -1 marks padding.
            attend: the attention context.

        Returns:
            The pre-norm state s [..., h].
        """
        cos, sin = self.rotary(positions, g.dtype)
        return self.midlayer(self.embed_tokens(token_ids), g, cos, sin, attend)

    def feedback(self, state: torch.Tensor) -> torch.Tensor:
        """The next step's g [..., h] from this step's state [..., h]."""
        return self.norm(state) if self.config.norm_output else state

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """State [..., h] -> logits over the draft vocabulary [..., Vd]."""
        return self.gather_vocabulary(self.lm_head(self.norm(state)))

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids [...] int64 -> target ids [...]."""
        return draft_ids + self.d2t[draft_ids]

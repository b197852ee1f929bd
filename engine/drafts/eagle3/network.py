"""The EAGLE-3 draft network: one definition for training, conversion checks, parity and serving.

    g      = fc([a_1; ..; a_n])                      fuse: n captured states -> one feature
    x      = [input_layernorm(e); hidden_norm(g)]    e = embedding of the slot's token
    r      = g + o_proj(attention(x))                residual from the un-normed g
    s      = r + mlp(post_attention_layernorm(r))    the pre-norm state
    logits = lm_head(norm(s))                        over the draft vocabulary
    next g = s

Attention's keys and values live with the caller, who passes `attend`: the training-time-test mask in training, the
paged KV cache in serving, a plain list of keys in tests. Attention has grouped KV heads (Llama) or latents (MLA).
"""

import torch
from torch import nn

from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.layers import (
    Attend,
    Attention,
    ColumnParallelLinear,
    GatedMLP,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    VocabParallelEmbedding,
)
from slipstream.engine.layers.latent_attention import LatentAttention, PagedLatents
from slipstream.engine.tensor_parallel import SplitVocabulary, TensorParallel, single
from slipstream.kernels.draft_input import draft_input
from slipstream.kernels.stream import Stream


class Eagle3Layer(nn.Module):
    """The draft's one decoder layer, which reads the token's embedding beside the feature."""

    def __init__(self, config: Eagle3Config, parallel: TensorParallel, dtype: torch.dtype | None) -> None:
        super().__init__()
        c, hidden = config, config.hidden_size
        self.norm_before_residual = c.norm_before_residual
        self.input_layernorm = RMSNorm(hidden, c.rms_norm_eps, dtype=dtype)
        self.hidden_norm = RMSNorm(hidden, c.rms_norm_eps, dtype=dtype)
        self.self_attn = _attention(c, parallel, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, c.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(hidden, c.intermediate_size, parallel, dtype=dtype)

    def forward(
        self,
        token_ids: torch.Tensor,
        table: torch.Tensor,
        g: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend | PagedLatents,
    ) -> Stream:
        """token_ids [M] into table [.., h]; g [M, h]; cos, sin [M, d] -> the pre-norm states s of M rows."""
        norms = self.input_layernorm.constants, self.hidden_norm.constants
        x, residual = draft_input(token_ids, table, g, *norms, self.norm_before_residual)  # [M, 2h], [M, h]
        stream = self.self_attn(Stream(x), None, cos, sin, attend, Stream(residual))
        return self.mlp(stream, self.post_attention_layernorm.constants)


def _attention(c: Eagle3Config, parallel: TensorParallel, dtype: torch.dtype | None) -> Attention | LatentAttention:
    """Over inputs that are 2h wide."""
    hidden = c.hidden_size
    if c.latent is None:
        return Attention(2 * hidden, hidden, c.num_heads, c.num_kv_heads, c.head_dim, parallel, dtype=dtype)
    # Trainers and engines give the inner norms of a draft the eps of its other norms, unlike those of its target.
    eps = c.rms_norm_eps
    return LatentAttention(2 * hidden, hidden, c.num_heads, c.latent, parallel, inner_eps=eps, dtype=dtype)


class _InShape:
    """`attend` for the M rows of a layer, where the caller's rows have another shape."""

    def __init__(self, attend: Attend, shape: torch.Size) -> None:
        self.attend, self.shape, self.sink = attend, shape, getattr(attend, "sink", None)

    def __call__(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        def shaped(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(0, self.shape)  # [M, heads, d] -> [..., heads, d]

        mixed = self.attend(shaped(q), None if k is None else shaped(k), None if v is None else shaped(v))
        return mixed.reshape(*q.shape[:-1], mixed.shape[-1])  # [..., heads, d] -> [M, heads, d]


class Eagle3Network(nn.Module):
    """An EAGLE-3 draft.

    Args:
        config: shapes and switches.
        dtype: of the parameters; None is torch's default.
        parallel: the ranks that serve it together; training has one. Embedding and head are cut by vocabulary, the
            layer by heads and features; `fc` and the norms are whole on every rank.

    Parameters come uninitialised (norm weights 1, d2t all zero): `engine.training.init` or a checkpoint fills them.
    The parameters' names are those of the plain Hugging Face EAGLE-3 form, but for `qkv_proj` (`qkv_a_proj`) and
    `gate_up_proj`, which hold q, k, v and gate, up stacked by rows. Rope rows of latent attention are in halves.
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
        self.vocabulary = SplitVocabulary(config.draft_vocab_size, self.parallel)
        self.rotary = RotaryEmbedding(
            config.rope_dim, config.max_position, config.rope_theta, config.rope_scaling, dtype=dtype
        )
        # Offsets, as checkpoints store them: target id = draft id + d2t[draft id].
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.d2t: torch.Tensor

    def prepare(self) -> None:
        """What serving needs beside the weights, once they are there."""
        if isinstance(self.midlayer.self_attn, LatentAttention):
            self.midlayer.self_attn.absorb()

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
        if self.input_norm is not None:
            return self.fc(features, self.input_norm.constants)
        return self.fc(self.normed_features(features))

    def forward(
        self,
        token_ids: torch.Tensor,
        g: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend | PagedLatents,
        angles: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """One draft step for every row.

        Args:
            token_ids: [...] int64 target ids, the token that each row embeds.
            g: [..., h], from `fuse` at step 1 and from `feedback` later.
            positions: [...] int64 rope positions (slot t at step k: t + k - 1); -1 marks padding.
            attend: the attention context; it gets q [..., heads, d] and k, v [..., kv_heads, d], rotated, and gives
                [..., heads, d]. One that has a `sink` finds k and v there, and gets None. With latents every head has
                its own k and v, of unlike widths, and v's is that of the output; a cache of latents is `PagedLatents`.
            angles: cos and sin of `positions`, [..., d] each; None: looked up.

        Returns:
            The pre-norm state s [..., h].
        """
        shape = token_ids.shape
        angles = self.rotary(positions, g.dtype) if angles is None else angles
        cos, sin = (table.reshape(-1, table.shape[-1]) for table in angles)  # [..., d] -> [M, d]
        ids, table = self.embed_tokens.lookup(token_ids.flatten())  # [...] -> [M]
        attend = attend if isinstance(attend, PagedLatents) else _InShape(attend, shape)
        stream = self.midlayer(ids, table, g.reshape(-1, g.shape[-1]), cos, sin, attend)
        return stream.rows.view(*shape, -1)  # [M, h] -> [..., h]

    def feedback(self, state: torch.Tensor) -> torch.Tensor:
        """The next step's g [..., h] from this step's state [..., h]."""
        return self.norm(state) if self.config.norm_output else state

    def own_logits(self, state: torch.Tensor) -> torch.Tensor:
        """State [..., h] -> logits over the draft vocabulary [..., Vd], or this rank's of them (`vocabulary.part`)."""
        return self.vocabulary.own(self.lm_head(state, self.norm.constants))

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """State [..., h] -> logits over the draft vocabulary [..., Vd]."""
        return self.vocabulary.whole(self.own_logits(state))

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids [...] int64 -> target ids [...]."""
        return draft_ids + self.d2t[draft_ids]

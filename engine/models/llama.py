"""Llama-family decoder: RMSNorm, rotary attention with grouped KV heads, SwiGLU."""

import torch
from torch import nn

from slipstream.engine.capture import slot_name
from slipstream.engine.kv_cache import KVCache, PagedKV
from slipstream.engine.layers import (
    ColumnParallelLinear,
    GatedMLP,
    MergedColumnParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models.target import TargetOutput
from slipstream.engine.tensor_parallel import GatherVocabulary, TensorParallel, single
from slipstream.kernels.linear import linear
from slipstream.kernels.paged_attention import AttentionRows, paged_attention, write_kv
from slipstream.kernels.rotary import apply_rotary


class LlamaAttention(nn.Module):
    """Self-attention of one layer over its paged cache: this rank's heads."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, dtype: torch.dtype | None) -> None:
        super().__init__()
        heads = parallel.cut_heads(config.num_heads, config.num_kv_heads)
        self.num_heads, self.num_kv_heads, self.head_dim = heads.q.size, heads.kv.size, config.head_dim
        q, kv = heads.q.times(config.head_dim), heads.kv.times(config.head_dim)
        cuts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv_proj = MergedColumnParallelLinear(config.hidden_size, cuts, dtype=dtype)
        self.o_proj = RowParallelLinear(q, config.hidden_size, parallel, dtype=dtype)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, rows: AttentionRows
    ) -> torch.Tensor:
        """x [B, R, h]; cos, sin [B, R, d]; cache: this layer's -> [B, R, h]."""
        num_rotated = self.num_heads + self.num_kv_heads
        qkv = self.qkv_proj(x).unflatten(
            -1, (num_rotated + self.num_kv_heads, self.head_dim)
        )  # -> [B, R, nq + 2 nkv, d]
        rotated = apply_rotary(qkv[:, :, :num_rotated], cos, sin)  # q and k in one go
        q, k = rotated.split((self.num_heads, self.num_kv_heads), dim=2)  # [B, R, nq, d], [B, R, nkv, d]
        write_kv(k, qkv[:, :, num_rotated:], cache, rows)
        mixed = paged_attention(q, cache, rows, self.head_dim**-0.5)
        return self.o_proj(mixed.flatten(2))  # [B, R, nq, d] -> [B, R, nq * d] -> [B, R, h]


class LlamaLayer(nn.Module):
    """One decoder layer. The add of a block's output to the residual stream is left to the norm behind it."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = LlamaAttention(config, parallel, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, parallel, dtype=dtype)

    def forward(
        self,
        block_out: torch.Tensor | None,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        rows: AttentionRows,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One layer on the residual stream.

        Args:
            block_out: [B, R, h], output of the layer before, not added yet; None at the first layer.
            residual: [B, R, h].
            cos, sin: [B, R, d] of the rows' positions.
            cache, rows: this layer's cache, and the rows of the step.

        Returns:
            (the stream as this layer found it, this layer's output, the stream it is to be added to), each [B, R, h].
        """
        if block_out is None:
            state, x = residual, self.input_layernorm(residual)
        else:
            x, state = self.input_layernorm.add(block_out, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, cos, sin, cache, rows), state)
        return state, self.mlp(x), residual


class LlamaModel(nn.Module):
    """A Llama-family target.

    Args:
        config: shapes and constants.
        dtype: of the parameters; None is torch's default.
        parallel: the ranks that share every layer, and which of them this is.

    Parameters come uninitialised: `engine.loader` fills them. Their names are those of the Hugging Face checkpoint
    without the leading `model.`, but for `qkv_proj` and `gate_up_proj`, which hold their parts stacked by rows.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype | None = None, parallel: TensorParallel | None = None
    ) -> None:
        super().__init__()
        self.config, self.parallel = config, parallel or single()
        vocabulary, hidden = config.vocab_size, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(vocabulary, hidden, self.parallel, dtype=dtype)
        self.layers = nn.ModuleList([LlamaLayer(config, self.parallel, dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = ColumnParallelLinear(hidden, self.parallel.cut(vocabulary), dtype=dtype)
        self.gather_vocabulary = GatherVocabulary(vocabulary, self.parallel)
        self.rotary = RotaryEmbedding(config.head_dim, config.max_position, config.rope_theta, config.rope_scaling)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: PagedKV, capture: tuple[int, ...] = ()
    ) -> TargetOutput:
        """One step for every row.

        Args:
            token_ids: [B, R] int64.
            positions: [B, R] int64, absolute; -1 marks padding rows, whose keys go to the dummy block.
            kv: where keys and values are written and read.
            capture: slots to hand out; slot k is the residual stream after k layers.
        """
        rows = kv.rows(positions)
        residual = self.embed_tokens(token_ids)  # [B, R] -> [B, R, h]
        cos, sin = self.rotary(positions, residual.dtype)  # [B, R, d] each
        states: dict[str, torch.Tensor] = {}
        block_out: torch.Tensor | None = None
        for k, layer in enumerate(self.layers):
            state, block_out, residual = layer(block_out, residual, cos, sin, kv.cache.layers[k], rows)
            if k in capture:
                states[slot_name(k)] = state
        last = residual if block_out is None else residual + block_out
        if len(self.layers) in capture:
            states[slot_name(len(self.layers))] = last
        return TargetOutput(last, states)

    def final_norm(self, last: torch.Tensor) -> torch.Tensor:
        """Slot N [..., h] -> what the head reads [..., h]."""
        return self.norm(last)

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, h]; this rank's rows of it where there are several."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Slot N [..., h] -> [..., V]."""
        return self.gather_vocabulary(linear(self.final_norm(last), self.head_weight))

    def allocate_kv(self, num_blocks: int, block_size: int) -> KVCache:
        """An empty cache of this model's shape, for this rank's KV heads."""
        weight, c = self.embed_tokens.weight, self.config
        kv_heads = self.parallel.cut_heads(c.num_heads, c.num_kv_heads).kv.size
        return KVCache(c.num_layers, num_blocks, block_size, kv_heads, c.head_dim, weight.dtype, weight.device)

"""Dense decoder: RMSNorm, rotary attention with grouped KV heads, SwiGLU. Llama, Mistral and Qwen3 by their config."""

import torch
from torch import nn

from slipstream.engine.capture import slot_name
from slipstream.engine.kv_cache import KVCache, PagedKV
from slipstream.engine.layers import (
    Attention,
    ColumnParallelLinear,
    GatedMLP,
    RMSNorm,
    RotaryEmbedding,
    VocabParallelEmbedding,
)
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models.target import TargetOutput
from slipstream.engine.tensor_parallel import SplitVocabulary, TensorParallel, single
from slipstream.kernels.cuda.pack import PackedWeight
from slipstream.kernels.embed import embed_at
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.paged_attention import AttentionRows
from slipstream.kernels.stream import Stream
from slipstream.kernels.weight import Weight


class DenseLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, dtype: torch.dtype | None) -> None:
        super().__init__()
        c, hidden = config, config.hidden_size
        self.input_layernorm = RMSNorm(hidden, c.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(
            hidden,
            hidden,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            parallel,
            qk_norm_eps=c.rms_norm_eps if c.qk_norm else None,
            window=c.sliding_window,
            dtype=dtype,
        )
        self.post_attention_layernorm = RMSNorm(hidden, c.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(hidden, c.intermediate_size, parallel, dtype=dtype)

    def forward(
        self, stream: Stream, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, rows: AttentionRows
    ) -> Stream:
        """The stream of M rows behind this layer.

        Args:
            stream: as the layer finds it.
            cos, sin: [M, d] of the rows' positions.
            cache, rows: this layer's cache, and the rows of the step.
        """
        attend = self.self_attn.paged(cache, rows)
        stream = self.self_attn(stream, self.input_layernorm.constants, cos, sin, attend, stream)
        return self.mlp(stream, self.post_attention_layernorm.constants)


class DenseModel(nn.Module):
    """A dense target.

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
        c, vocabulary, hidden = config, config.vocab_size, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(vocabulary, hidden, self.parallel, dtype=dtype)
        self.layers = nn.ModuleList([DenseLayer(config, self.parallel, dtype) for _ in range(c.num_layers)])
        self.norm = RMSNorm(hidden, c.rms_norm_eps, dtype=dtype)
        self.lm_head = None
        if not c.tie_word_embeddings:
            self.lm_head = ColumnParallelLinear(hidden, self.parallel.cut(vocabulary), dtype=dtype)
        self.packed_head: PackedWeight | None = None  # of a tied head, beside the table (engine/packed_weights.py)
        self.vocabulary = SplitVocabulary(vocabulary, self.parallel)
        self.rotary = RotaryEmbedding(c.head_dim, c.max_position, c.rope_theta, c.rope_scaling, dtype=dtype)

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
        stream, cos, sin = self._start(token_ids.flatten(), positions.flatten())  # [B, R] -> [M, h], [M, d] each
        states: dict[str, torch.Tensor] = {}
        for k, (layer, cache) in enumerate(zip(self.layers, kv.cache.layers, strict=True)):
            if k in capture:
                states[slot_name(k)] = stream.rows.view(*token_ids.shape, -1)  # [M, h] -> [B, R, h]
            stream = layer(stream, cos, sin, cache, rows)
        last = stream.rows.view(*token_ids.shape, -1)  # [M, h] -> [B, R, h]
        if len(self.layers) in capture:
            states[slot_name(len(self.layers))] = last
        return TargetOutput(last, states)

    def _start(self, token_ids: torch.Tensor, positions: torch.Tensor) -> tuple[Stream, torch.Tensor, torch.Tensor]:
        """token_ids, positions [M] -> what the first layer reads, and cos, sin [M, d]."""
        table, angles = self.embed_tokens.weight, self.rotary.table
        if self.parallel.size == 1 and angles.dtype == table.dtype:
            return embed_at(token_ids, table, positions, angles)
        stream = self.embed_tokens(token_ids)
        return stream, *self.rotary(positions, stream.rows.dtype)

    def final_norm(self, last: torch.Tensor) -> torch.Tensor:
        """Slot N [..., h] -> what the head reads [..., h]."""
        return self.norm(last)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def tied_head(self) -> torch.Tensor | None:
        """The embedding's table [V, h], where it is the head's weight, too."""
        return self.embed_tokens.weight if self.lm_head is None else None

    @property
    def head_weight(self) -> Weight:
        """[V, h] in the form that products read; this rank's rows of it where there are several."""
        if self.lm_head is not None:
            head: Weight = self.lm_head.weight
            return head
        return self.embed_tokens.weight if self.packed_head is None else self.packed_head

    def own_logits(self, last: torch.Tensor) -> torch.Tensor:
        """Slot N [..., h] -> [..., V], or this rank's columns of it (`vocabulary.part`)."""
        rows = Stream(last.reshape(-1, last.shape[-1]))  # [..., h] -> [M, h]
        logits = self.vocabulary.own(norm_linear(rows, self.norm.constants, self.head_weight))  # [M, Vr]
        return logits.view(*last.shape[:-1], logits.shape[-1])  # [M, Vr] -> [..., Vr]

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Slot N [..., h] -> [..., V]."""
        return self.vocabulary.whole(self.own_logits(last))

    def allocate_kv(self, num_blocks: int, block_size: int) -> KVCache:
        """An empty cache of this model's shape, for this rank's KV heads."""
        weight, c = self.embed_tokens.weight, self.config
        kv_heads = self.parallel.cut_heads(c.num_heads, c.num_kv_heads).kv.size
        return KVCache(c.num_layers, num_blocks, block_size, kv_heads, c.head_dim, weight.dtype, weight.device)

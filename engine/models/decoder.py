"""What every decoder has around its layers: embedding, rope table, capture, final norm and head."""

from typing import Any

import torch
from torch import nn

from slipstream.engine.capture import slot_name
from slipstream.engine.kv_cache import KVCache, PagedKV
from slipstream.engine.layers import ColumnParallelLinear, RMSNorm, RotaryEmbedding, VocabParallelEmbedding
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models.target import TargetOutput
from slipstream.engine.tensor_parallel import SplitVocabulary, TensorParallel, single
from slipstream.kernels.cuda.pack import PackedWeight
from slipstream.kernels.embed import embed_at
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.stream import Stream
from slipstream.kernels.weight import Weight


class Decoder(nn.Module):
    """A target, but for what its layers are and what they keep of a position, which a model's own file says.

    Args:
        config: shapes and constants.
        dtype: of the parameters; None is torch's default.
        parallel: the ranks that share every layer, and which of them this is.

    Parameters come uninitialised: `engine.loader` fills them. Their names are those of the Hugging Face checkpoint
    without the leading `model.`, but for merged layers, which hold their parts stacked by rows.

    load_report: what loading took, where it was layer by layer (`engine.streamed_load`).
    """

    load_report: Any = None

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype | None = None, parallel: TensorParallel | None = None
    ) -> None:
        super().__init__()
        self.config, self.parallel = config, parallel or single()
        c, vocabulary, hidden = config, config.vocab_size, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(vocabulary, hidden, self.parallel, dtype=dtype)
        self.layers = nn.ModuleList([self._layer(index, dtype) for index in range(c.num_layers)])
        self.norm = RMSNorm(hidden, c.rms_norm_eps, dtype=dtype)
        self.lm_head = None
        if not c.tie_word_embeddings:
            self.lm_head = ColumnParallelLinear(hidden, self.parallel.cut(vocabulary), dtype=dtype)
        self.packed_head: PackedWeight | None = None  # of a tied head, beside the table (engine/packed_weights.py)
        self.vocabulary = SplitVocabulary(vocabulary, self.parallel)
        self.rotary = RotaryEmbedding(self._rope_dim, c.max_position, c.rope_theta, c.rope_scaling, dtype=dtype)

    def _layer(self, index: int, dtype: torch.dtype | None) -> nn.Module:
        """Layer `index`: called with (stream, cos, sin, cache, rows), it gives the stream behind it."""
        raise NotImplementedError

    @property
    def _rope_dim(self) -> int:
        """How much of a head is rotated."""
        raise NotImplementedError

    @property
    def _cell(self) -> tuple[int, ...]:
        """As `KVCache`'s, on this rank."""
        raise NotImplementedError

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
        """An empty cache of this model's shape, on this rank."""
        weight = self.embed_tokens.weight
        return KVCache(self.config.num_layers, num_blocks, block_size, self._cell, weight.dtype, weight.device)

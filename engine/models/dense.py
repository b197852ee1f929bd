"""Dense decoder: RMSNorm, rotary attention with grouped KV heads, SwiGLU. Llama, Mistral and Qwen3 by their config."""

import torch
from torch import nn

from slipstream.engine.layers import Attention, GatedMLP, RMSNorm
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models.decoder import Decoder
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels.paged_attention import AttentionRows
from slipstream.kernels.stream import Stream


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


class DenseModel(Decoder):
    """A dense target."""

    def _layer(self, index: int, dtype: torch.dtype | None) -> DenseLayer:
        return DenseLayer(self.config, self.parallel, dtype)

    @property
    def _rope_dim(self) -> int:
        return self.config.head_dim

    @property
    def _cell(self) -> tuple[int, ...]:
        c = self.config
        return 2, self.parallel.cut_heads(c.num_heads, c.num_kv_heads).kv.size, c.head_dim

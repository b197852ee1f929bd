"""DeepSeek-V3 and Kimi-K2: latent attention, a mixture of experts in every layer but the first ones."""

import torch
from torch import nn

from slipstream.engine.layers import GatedMLP, RMSNorm
from slipstream.engine.layers.experts import MixtureOfExperts
from slipstream.engine.layers.latent_attention import LatentAttention
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models.decoder import Decoder
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels.paged_attention import AttentionRows
from slipstream.kernels.stream import Stream


class DeepseekLayer(nn.Module):
    """One decoder layer. index: 0 is the first one."""

    def __init__(self, config: ModelConfig, index: int, parallel: TensorParallel, dtype: torch.dtype | None) -> None:
        super().__init__()
        c, hidden = config, config.hidden_size
        assert c.latent is not None
        assert c.experts is not None
        self.input_layernorm = RMSNorm(hidden, c.rms_norm_eps, dtype=dtype)
        self.self_attn = LatentAttention(hidden, hidden, c.num_heads, c.latent, parallel, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(hidden, c.rms_norm_eps, dtype=dtype)
        self.mlp: GatedMLP | MixtureOfExperts
        if index < c.experts.first_dense:
            self.mlp = GatedMLP(hidden, c.intermediate_size, parallel, dtype=dtype)
        else:
            self.mlp = MixtureOfExperts(hidden, c.experts, parallel, dtype=dtype)

    def forward(
        self, stream: Stream, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, rows: AttentionRows
    ) -> Stream:
        """The stream of M rows behind this layer.

        Args:
            stream: as the layer finds it.
            cos, sin: [M, rope_dim] of the rows' positions.
            cache, rows: this layer's cache [num_blocks, block_size, cell], and the rows of the step.
        """
        attend = self.self_attn.paged(cache, rows)
        stream = self.self_attn(stream, self.input_layernorm.constants, cos, sin, attend, stream)
        return self.mlp(stream, self.post_attention_layernorm.constants)


class DeepseekModel(Decoder):
    """A target of this family. Every rank holds whole latents, and its own heads' up-projections of them."""

    def _layer(self, index: int, dtype: torch.dtype | None) -> DeepseekLayer:
        return DeepseekLayer(self.config, index, self.parallel, dtype)

    @property
    def _rope_dim(self) -> int:
        assert self.config.latent is not None
        return self.config.latent.rope_dim

    @property
    def _cell(self) -> tuple[int, ...]:
        assert self.config.latent is not None
        return (self.config.latent.cell,)

    def prepare(self) -> None:
        """What follows from the weights, once they are there."""
        for module in self.modules():
            if isinstance(module, LatentAttention):
                module.prepare()

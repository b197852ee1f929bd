"""Multi-head latent attention (MLA) of one layer: this rank's heads over a cache of latents that every rank holds."""

import torch
from torch import nn

from slipstream.engine.deepseek_config import Latent
from slipstream.engine.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from slipstream.engine.layers.norm import RMSNorm
from slipstream.engine.tensor_parallel import Cut, TensorParallel
from slipstream.kernels.head_linear import head_linear
from slipstream.kernels.latent_rows import absorb_query, rotate_query, write_latent
from slipstream.kernels.mla_attention import mla_attention, mla_prefill
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.norm_qkv import Heads
from slipstream.kernels.paged_attention import AttentionRows
from slipstream.kernels.stream import Norm, Stream

# Parts that have plain weights: `prepare` rearranges them.
PLAIN = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj")
# Of the two norms inside; `rms_norm_eps` is that of the other norms. As transformers and the models' own code have it.
_INNER_EPS = 1e-6


class LatentAttention(nn.Module):
    """Norm, projections through latents, rotation, attention, output projection, add.

    Decode and verify are absorbed: queries go to the latents, which are keys and values of all heads. On a CPU prompts
    expand the latents to keys and values of each head, which is less work for many rows; the two round differently. On
    a card prompts are absorbed, too, and `kv_b_proj` is not kept: a captured launch has no room for keys and values of
    a whole block table.

    Args:
        hidden_size: width of the stream.
        num_heads: of the whole layer, all ranks together.
        latent: shapes.
        parallel: the ranks.

    The checkpoint rotates neighbours (2 i, 2 i + 1) of a rope part. `prepare` puts its rows in another order, of
    queries and keys alike, so that the half-split rotation of every other layer applies; dot products do not change.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        latent: Latent,
        parallel: TensorParallel,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.latent, c = latent, latent
        cut = parallel.cut(num_heads)
        self.heads = Heads(cut.size, cut.size, c.nope_dim + c.rope_dim)
        whole = {"q_a_proj": Cut.whole(c.q_rank), "kv_a_proj_with_mqa": Cut.whole(c.cell)}
        self.qkv_a_proj = MergedColumnParallelLinear(hidden_size, whole, dtype=dtype)  # [q_rank + cell, h], every rank
        self.q_a_layernorm = RMSNorm(c.q_rank, _INNER_EPS, dtype=dtype)
        self.q_b_proj = ColumnParallelLinear(c.q_rank, cut.times(self.heads.dim), dtype=dtype)
        self.kv_a_layernorm = RMSNorm(c.kv_rank, _INNER_EPS, dtype=dtype)
        self.kv_b_proj: ColumnParallelLinear | None = ColumnParallelLinear(
            c.kv_rank, cut.times(c.nope_dim + c.value_dim), dtype=dtype
        )  # None on a card, once prepared: `key_up` and `value_up` are all that is read
        self.o_proj = RowParallelLinear(cut.times(c.value_dim), hidden_size, parallel, dtype=dtype)
        self.key_up: torch.Tensor  # [H, kv_rank, nope], from kv_b_proj by `prepare`
        self.value_up: torch.Tensor  # [H, v, kv_rank], likewise
        self.register_buffer("key_up", None, persistent=False)
        self.register_buffer("value_up", None, persistent=False)

    @torch.no_grad()
    def prepare(self) -> None:
        """Once, when the weights are there: the order of rope rows, and the two halves of `kv_b_proj` by heads."""
        c = self.latent
        assert self.kv_b_proj is not None
        order = (
            torch.arange(c.rope_dim, device=self.q_b_proj.weight.device).view(-1, 2).T.flatten()
        )  # 0 2 4 .. 1 3 5 ..
        keys = self.qkv_a_proj.weight.data[-c.rope_dim :]  # [rope, h]
        keys.copy_(keys[order])
        queries = self.q_b_proj.weight.data.unflatten(0, (self.heads.q, -1))[:, c.nope_dim :]  # [H, rope, q_rank]
        queries.copy_(queries[:, order])
        parts = self.kv_b_proj.weight.data.unflatten(0, (self.heads.q, c.nope_dim + c.value_dim))  # [H, nope + v, rank]
        self.key_up = parts[:, : c.nope_dim].transpose(1, 2).contiguous()
        self.value_up = parts[:, c.nope_dim :].contiguous()
        if parts.is_cuda:
            self.kv_b_proj = None

    def forward(
        self,
        stream: Stream,
        norm: Norm,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        rows: AttentionRows,
    ) -> Stream:
        """The stream of M = B * R rows with the block's output added.

        Args:
            stream: M rows of width hidden_size.
            norm: through which they are read.
            cos, sin: [M, rope_dim] of the rows' positions.
            cache: [num_blocks, block_size, cell]; the rows' cells are written.
            rows: of the step.
        """
        c, heads, shape = self.latent, self.heads, rows.positions.shape
        made = norm_linear(stream, norm, self.qkv_a_proj.weight)  # [M, q_rank + cell]
        queries = Stream(made[:, : c.q_rank])
        q = norm_linear(queries, self.q_a_layernorm.constants, self.q_b_proj.weight)  # [M, H * (nope + rope)]
        q = q.view(-1, heads.q, heads.dim)  # [M, H, nope + rope]
        write_latent(made[:, c.q_rank :], self.kv_a_layernorm.constants, cos, sin, cache, rows.write_index)
        if rows.prefill and self.kv_b_proj is not None:
            q = rotate_query(q, cos, sin).view(*shape, heads.q, heads.dim)  # [M, H, d] -> [B, R, H, d]
            mixed = mla_prefill(q, cache, rows, c.scale, self.kv_b_proj.weight, c.nope_dim, c.value_dim)
            mixed = mixed.flatten(0, 1)  # [B, R, H, v] -> [M, H, v]
        else:
            q = absorb_query(q, self.key_up, cos, sin).view(*shape, heads.q, c.cell)  # [M, H, cell] -> [B, R, H, cell]
            latents = mla_attention(q, cache, rows, c.scale, c.kv_rank)  # [B, R, H, kv_rank]
            mixed = head_linear(latents.flatten(0, 1), self.value_up)  # [M, H, kv_rank] -> [M, H, v]
        return self.o_proj(mixed.flatten(1), stream)  # [M, H, v] -> [M, H * v] -> [M, h]

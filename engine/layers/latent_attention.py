"""Multi-head latent attention (MLA) of one layer: this rank's heads over a cache of latents that every rank holds."""

from dataclasses import dataclass

import torch
from torch import nn

from slipstream.engine.deepseek_config import Latent
from slipstream.engine.layers.attention import Attend
from slipstream.engine.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from slipstream.engine.layers.norm import RMSNorm
from slipstream.engine.tensor_parallel import Cut, TensorParallel
from slipstream.kernels.head_linear import head_linear
from slipstream.kernels.latent_rows import absorb_query, latent_rows, rotate_query
from slipstream.kernels.mla_attention import mla_attention, mla_prefill
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.norm_qkv import Heads
from slipstream.kernels.paged_attention import AttentionRows
from slipstream.kernels.rotary import apply_rotary
from slipstream.kernels.stream import Norm, Stream

# Parts that have plain weights: `prepare` rearranges them.
PLAIN = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj")
# Of the two norms inside; `rms_norm_eps` is that of the other norms. As transformers and the models' own code have it.
_INNER_EPS = 1e-6


def rope_in_halves(weight: torch.Tensor, heads: int, rope_dim: int) -> torch.Tensor:
    """Rows of a projection as checkpoints have them -> as the half-split rotation of every layer here wants them.

    Checkpoints rotate neighbours (2 i, 2 i + 1) of a rope part. With its rows in another order, of queries and keys
    alike, (i, i + rope_dim / 2) are rotated; dot products do not change.

    Args:
        weight: [heads x d, K]; the last `rope_dim` rows of each head are rotated.
        heads, rope_dim: see there. Keys have one head for all.
    """
    return _reordered(weight, heads, rope_dim, (rope_dim // 2, 2))


def rope_in_pairs(weight: torch.Tensor, heads: int, rope_dim: int) -> torch.Tensor:
    """The way back: rows as checkpoints have them."""
    return _reordered(weight, heads, rope_dim, (2, rope_dim // 2))


def _reordered(weight: torch.Tensor, heads: int, rope_dim: int, shape: tuple[int, int]) -> torch.Tensor:
    if not heads:
        return weight
    parts = weight.unflatten(0, (heads, -1)).clone()  # [heads x d, K] -> [heads, d, K]
    rope = parts[:, -rope_dim:].unflatten(1, shape).transpose(1, 2)  # [heads, rope, K] -> [heads, *shape turned, K]
    parts[:, -rope_dim:] = rope.flatten(1, 2).clone()  # [heads, rope, K]
    return parts.flatten(0, 1)  # [heads x d, K]


@dataclass(frozen=True)
class PagedLatents:
    """Attention over one layer's paged cache of latents.

    Args:
        cache: [num_blocks, block_size, cell]; the rows' cells are written.
        rows: the M = B * R rows of the step.
    """

    cache: torch.Tensor
    rows: AttentionRows


class LatentAttention(nn.Module):
    """Norm, projections through latents, rotation, attention, output projection, add.

    Over a paged cache, decode and verify are absorbed: queries go to the latents, which are keys and values of all
    heads. On a CPU prompts expand the latents to keys and values of each head, which is less work for many rows; the
    two round differently. On a card prompts are absorbed, too (a captured launch has no room for keys and values of a
    whole block table), and a target's `kv_b_proj` is not kept. Any other context, as in training, gets keys and values.

    Args:
        input_size: width of what is projected; the target's stream, or the draft's [embedding; feature].
        hidden_size: width of the stream that the output is added to.
        num_heads: of the whole layer, all ranks together.
        latent: shapes.
        parallel: the ranks.
        inner_eps: of the norms of queries' and keys' latents.

    Rope rows of the weights are in halves (`rope_in_halves`).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_heads: int,
        latent: Latent,
        parallel: TensorParallel,
        *,
        inner_eps: float = _INNER_EPS,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.latent, c = latent, latent
        self.scale = c.scale
        cut = parallel.cut(num_heads)
        self.heads = Heads(cut.size, cut.size, c.nope_dim + c.rope_dim)
        whole = {"q_a_proj": Cut.whole(c.q_rank), "kv_a_proj_with_mqa": Cut.whole(c.cell)}
        self.qkv_a_proj = MergedColumnParallelLinear(input_size, whole, dtype=dtype)  # [q_rank + cell, in], every rank
        self.q_a_layernorm = RMSNorm(c.q_rank, inner_eps, dtype=dtype)
        self.q_b_proj = ColumnParallelLinear(c.q_rank, cut.times(self.heads.dim), dtype=dtype)
        self.kv_a_layernorm = RMSNorm(c.kv_rank, inner_eps, dtype=dtype)
        self.kv_b_proj: ColumnParallelLinear | None = ColumnParallelLinear(
            c.kv_rank, cut.times(c.nope_dim + c.value_dim), dtype=dtype
        )  # None of a target on a card, once prepared: `key_up` and `value_up` are all that is read
        self.o_proj = RowParallelLinear(cut.times(c.value_dim), hidden_size, parallel, dtype=dtype)
        self.key_up: torch.Tensor  # [H, kv_rank, nope], from kv_b_proj by `absorb`
        self.value_up: torch.Tensor  # [H, v, kv_rank], likewise
        self.register_buffer("key_up", None, persistent=False)
        self.register_buffer("value_up", None, persistent=False)

    @property
    def cell(self) -> tuple[int, ...]:
        """As `KVCache`'s: a latent for all heads, on every rank."""
        return (self.latent.cell,)

    def paged(self, cache: torch.Tensor, rows: AttentionRows) -> PagedLatents:
        """This layer's attention over its paged cache."""
        return PagedLatents(cache, rows)

    @torch.no_grad()
    def prepare(self) -> None:
        """Once, when a checkpoint's weights are there as it has them: the order of rope rows, then `absorb`."""
        c = self.latent
        keys, queries = self.qkv_a_proj.weight.data[-c.cell :], self.q_b_proj.weight.data
        keys.copy_(rope_in_halves(keys, 1, c.rope_dim))
        queries.copy_(rope_in_halves(queries, self.heads.q, c.rope_dim))
        self.absorb()
        if queries.is_cuda:
            self.kv_b_proj = None

    @torch.no_grad()
    def absorb(self) -> None:
        """Takes the two halves of `kv_b_proj` apart by heads, for attention over a paged cache."""
        c = self.latent
        assert self.kv_b_proj is not None
        parts = self.kv_b_proj.matrix().unflatten(0, (self.heads.q, c.nope_dim + c.value_dim))  # [H, nope + v, rank]
        self.key_up = parts[:, : c.nope_dim].transpose(1, 2).contiguous()
        self.value_up = parts[:, c.nope_dim :].contiguous()

    def forward(
        self,
        x: Stream,
        norm: Norm | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: "PagedLatents | Attend",
        residual: Stream,
    ) -> Stream:
        """One attention block.

        Args:
            x: M rows of width input_size.
            norm: through which they are read; None: as they are.
            cos, sin: [M, rope_dim] of the rows' positions.
            attend: of `paged`, or a context that gets q, k [M, H, nope + rope] and v [M, H, v] and gives [M, H, v].
            residual: M rows of width hidden_size.

        Returns:
            `residual` with the block's output added.
        """
        made = norm_linear(x, norm, self.qkv_a_proj.weight)  # [M, q_rank + cell]
        if isinstance(attend, PagedLatents):
            mixed = self._over_pages(made, cos, sin, attend)
        else:
            q_rank = self.latent.q_rank
            q = self._queries(Stream(made[:, :q_rank]), self.q_a_layernorm.constants)
            mixed = attend(rotate_query(q, cos, sin), *self._expanded(made[:, q_rank:], cos, sin))
        return self.o_proj(mixed.flatten(1), residual)  # [M, H, v] -> [M, H * v] -> [M, h]

    def _queries(self, latents: Stream, norm: Norm | None) -> torch.Tensor:
        """[M, q_rank], read through `norm` -> [M, H, nope + rope], not rotated."""
        made = norm_linear(latents, norm, self.q_b_proj.weight)  # [M, H * (nope + rope)]
        return made.view(-1, self.heads.q, self.heads.dim)  # [M, H, nope + rope]

    def _over_pages(
        self, made: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pages: PagedLatents
    ) -> torch.Tensor:
        """made [M, q_rank + cell] by `qkv_a_proj`, cos, sin [M, rope] -> [M, H, v]."""
        c, heads, cache, rows = self.latent, self.heads, pages.cache, pages.rows
        shape = rows.positions.shape  # B, R
        norms = self.q_a_layernorm.constants, self.kv_a_layernorm.constants
        normed = latent_rows(made, *norms, cos, sin, cache, rows.write_index)  # [M, q_rank]
        q = self._queries(Stream(normed), None)
        if rows.prefill and self.kv_b_proj is not None and not cache.is_cuda:
            q = rotate_query(q, cos, sin).view(*shape, heads.q, heads.dim)  # [M, H, d] -> [B, R, H, d]
            mixed = mla_prefill(q, cache, rows, c.scale, self.kv_b_proj.weight, c.nope_dim, c.value_dim)
            return mixed.flatten(0, 1)  # [B, R, H, v] -> [M, H, v]
        q = absorb_query(q, self.key_up, cos, sin).view(*shape, heads.q, c.cell)  # [M, H, cell] -> [B, R, H, cell]
        latents = mla_attention(q, cache, rows, c.scale, c.kv_rank)  # [B, R, H, kv_rank]
        return head_linear(latents.flatten(0, 1), self.value_up)  # [M, H, kv_rank] -> [M, H, v]

    def _expanded(self, kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """kv [M, cell] as it was made, cos, sin [M, rope] -> keys [M, H, nope + rope], values [M, H, v]."""
        c, heads = self.latent, self.heads.q
        assert self.kv_b_proj is not None
        latents = Stream(kv[:, : c.kv_rank].contiguous())
        made = norm_linear(latents, self.kv_a_layernorm.constants, self.kv_b_proj.weight)  # [M, H * (nope + v)]
        k, v = made.unflatten(1, (heads, -1)).split((c.nope_dim, c.value_dim), dim=2)  # [M, H, nope], [M, H, v]
        rope = apply_rotary(kv[:, None, c.kv_rank :], cos, sin)  # [M, 1, rope]
        return torch.cat((k, rope.expand(-1, heads, -1)), dim=2), v

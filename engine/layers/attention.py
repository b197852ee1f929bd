"""Self-attention of one layer, this rank's heads; keys and values live with the caller."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from slipstream.engine.layers.norm import RMSNorm
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels.norm_qkv import Heads, KVSink, norm_qkv
from slipstream.kernels.paged_attention import AttentionRows, paged_attention, write_kv
from slipstream.kernels.stream import Norm, Stream

# attend(q [..., heads, d], k [..., kv_heads, d], v [..., kv_heads, d]) -> [..., heads, d]; q and k are rotated already.
# Where it has a `sink` (KVSink), keys and values go there as they are made, and k and v are None.
Attend = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class PagedAttend:
    """Attention over one layer's paged cache.

    Args:
        cache: [num_blocks, block_size, 2, kv_heads, head_dim].
        rows: the M = B * R rows of the step.
        scale: multiplied onto q.k.
        window: keys that a row sees, itself included; None: all of them.
    """

    cache: torch.Tensor
    rows: AttentionRows
    scale: float
    window: int | None = None

    @property
    def sink(self) -> KVSink:
        return KVSink(self.cache, self.rows.write_index)

    def __call__(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        """q [..., heads, d] of the M rows; k, v [..., kv_heads, d] unless they are in the cache -> [..., heads, d]."""
        shape = self.rows.positions.shape  # B, R
        if k is not None and v is not None:
            write_kv(k.view(*shape, *k.shape[-2:]), v.view(*shape, *v.shape[-2:]), self.cache, self.rows)
        mixed = paged_attention(q.view(*shape, *q.shape[-2:]), self.cache, self.rows, self.scale, self.window)
        return mixed.view(q.shape)


class Attention(nn.Module):
    """Norm, projections and rotation of q, k and v, attention, output projection, add.

    Args:
        input_size: width of what is projected; the target's stream, or the draft's [embedding; feature].
        hidden_size: width of the stream that the output is added to.
        num_heads, num_kv_heads, head_dim: of the whole layer, all ranks together.
        parallel: the ranks.
        qk_norm_eps: RMSNorm of every query and key head before the rotation, with this eps; None: there is none.
        window: tokens that a row sees, itself included; None: all of them.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        parallel: TensorParallel,
        *,
        qk_norm_eps: float | None = None,
        window: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        heads = parallel.cut_heads(num_heads, num_kv_heads)
        self.heads = Heads(heads.q.size, heads.kv.size, head_dim)
        self.scale, self.window = head_dim**-0.5, window
        q, kv = heads.q.times(head_dim), heads.kv.times(head_dim)
        self.qkv_proj = MergedColumnParallelLinear(input_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, dtype=dtype)
        self.o_proj = RowParallelLinear(q, hidden_size, parallel, dtype=dtype)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:  # whole on every rank
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype)

    @property
    def cell(self) -> tuple[int, ...]:
        """As `KVCache`'s: keys and values of this rank's heads."""
        return 2, self.heads.kv, self.heads.dim

    def paged(self, cache: torch.Tensor, rows: AttentionRows) -> PagedAttend:
        """This layer's attention over its paged cache."""
        return PagedAttend(cache, rows, self.scale, self.window)

    def forward(
        self,
        x: Stream,
        norm: Norm | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        residual: Stream,
    ) -> Stream:
        """One attention block.

        Args:
            x: M rows of width input_size.
            norm: through which they are read; None: as they are.
            cos, sin: [M, head_dim] of the rows' positions.
            attend: the attention context, for q [M, heads, d].
            residual: M rows of width hidden_size.

        Returns:
            `residual` with the block's output added.
        """
        q_norm = None if self.q_norm is None else self.q_norm.constants
        k_norm = None if self.k_norm is None else self.k_norm.constants
        sink = getattr(attend, "sink", None)
        q, k, v = norm_qkv(x, norm, self.qkv_proj.weight, self.heads, cos, sin, q_norm, k_norm, sink)
        return self.o_proj(attend(q, k, v).flatten(1), residual)  # [M, nq, d] -> [M, nq * d] -> [M, h]

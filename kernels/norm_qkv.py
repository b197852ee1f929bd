"""First half of an attention block: norm, the q, k, v projections, rotary positions, and the write to the KV cache."""

from dataclasses import dataclass

import torch

from slipstream.kernels.dispatch import cuda_products, triton_product
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.rms_norm import rms_norm
from slipstream.kernels.rotary import apply_rotary
from slipstream.kernels.stream import Norm, Stream
from slipstream.kernels.weight import Weight


@dataclass(frozen=True)
class Heads:
    """Attention heads of one rank: q query heads, kv key and value heads, each `dim` wide."""

    q: int
    kv: int
    dim: int


@dataclass(frozen=True)
class KVSink:
    """Where keys and values of the M rows go.

    Args:
        cache: [num_blocks, block_size, 2, kv_heads, head_dim].
        write_index: [M] int64, the cell of each row in the flattened cache; of padding rows, in the dummy block.
    """

    cache: torch.Tensor
    write_index: torch.Tensor


def norm_qkv(
    stream: Stream,
    norm: Norm | None,
    weight: Weight,
    heads: Heads,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    sink: KVSink | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Rotated queries, keys and values of M rows.

    Args:
        stream: M rows of width K.
        norm: None: the rows are read as they are.
        weight: [(q + 2 kv) * dim, K]: query heads, then key heads, then value heads.
        heads: of this rank.
        cos, sin: [M, dim] of the rows' positions, in the dtype of `weight`.
        q_norm, k_norm: RMSNorm of each head before the rotation (Qwen3), weights [dim].
        sink: keys and values are written there; None: they are handed out.

    Returns:
        (q [M, q, dim], k [M, kv, dim], v [M, kv, dim]); k and v are None where they went to the sink.
    """
    int4 = norm is not None and q_norm is None and k_norm is None  # what the kernel over INT4 weights does
    if cuda := cuda_products(weight, stream.rows, half=heads.dim // 2 if int4 else 0):
        return cuda.norm_qkv(stream, norm, weight, heads, cos, sin, q_norm, k_norm, sink)
    if triton_product(weight, stream.rows):
        from slipstream.kernels.gpu import norm_qkv as gpu

        return gpu.norm_qkv(stream, norm, weight, heads, cos, sin, q_norm, k_norm, sink)
    qkv = norm_linear(stream, norm, weight).unflatten(-1, (heads.q + 2 * heads.kv, heads.dim))  # -> [M, q + 2 kv, d]
    rotated, v = qkv[:, : heads.q + heads.kv], qkv[:, heads.q + heads.kv :]
    if q_norm is not None or k_norm is not None:
        q, k = rotated.split((heads.q, heads.kv), dim=1)
        q = q if q_norm is None else rms_norm(q, q_norm.weight, q_norm.eps)
        k = k if k_norm is None else rms_norm(k, k_norm.weight, k_norm.eps)
        rotated = torch.cat((q, k), dim=1)  # [M, q + kv, d]
    q, k = apply_rotary(rotated, cos, sin).split((heads.q, heads.kv), dim=1)  # q and k in one go
    if sink is None:
        return q, k, v
    cells = sink.cache.flatten(0, 1)  # [blocks, block, 2, kv, d] -> [cells, 2, kv, d]
    cells[:, 0].index_copy_(0, sink.write_index, k)
    cells[:, 1].index_copy_(0, sink.write_index, v)
    return q, None, None

"""Multi-head latent attention (MLA) over a paged cache of latents: absorbed, but for prompts on a CPU.

A card absorbs prompts, too: a captured launch would need room for the keys and values of a whole block table.

Layout: a cache is [num_blocks, block_size, kv_rank + rope_dim], one cell a position for all heads: the normed latent,
then the rotated rope key. Every rank of a tensor-parallel group holds the whole cell. Block 0 is the dummy block.
"""

import torch
import torch.nn.functional as F

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.linear import linear
from slipstream.kernels.paged_attention import AttentionRows, paged_attention
from slipstream.kernels.weight import Weight


def mla_attention(
    q: torch.Tensor, cache: torch.Tensor, rows: AttentionRows, scale: float, kv_rank: int
) -> torch.Tensor:
    """Causal attention of every query row, all its heads over the same latents: keys are cells, values their latents.

    Args:
        q: [B, R, H, kv_rank + rope_dim], absorbed (`absorb_query`); outputs of padding rows are not meant for use.
        cache: [num_blocks, block_size, kv_rank + rope_dim].
        rows: of this step, on a card of prompts as well.
        scale: multiplied onto q.k.
        kv_rank: width of a latent.

    Returns:
        [B, R, H, kv_rank], for `head_linear` with the values' part of the up-projection.

    The bits of a row depend on its own position and keys alone, as in `paged_attention`.
    """
    if on_gpu(q):
        from slipstream.kernels.gpu import mla_attention as gpu

        attention = gpu.mla_prefill if rows.prefill else gpu.mla_attention
        return attention(q, cache, rows, scale, kv_rank)
    if not q.shape[2]:
        return q[..., :kv_rank]
    # One KV head that all query heads share. Values as wide as keys: the columns behind kv_rank are dropped.
    shared = cache[:, :, None, None].expand(
        -1, -1, 2, -1, -1
    )  # [blocks, block, c] -> [blocks, block, 2, 1, c], no copy
    return paged_attention(q, shared, rows, scale)[..., :kv_rank]  # [B, R, H, c] -> [B, R, H, kv_rank]


def mla_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    rows: AttentionRows,
    scale: float,
    expand: Weight,
    nope_dim: int,
    value_dim: int,
) -> torch.Tensor:
    """The same for rows of prompts on a CPU: each latent is expanded to every head's keys and values.

    Args:
        q: [B, R, H, nope_dim + rope_dim], its rope part rotated.
        cache: [num_blocks, block_size, kv_rank + rope_dim]; the cells of `rows` are written already.
        rows: of this step.
        scale: multiplied onto q.k.
        expand: [H * (nope_dim + value_dim), kv_rank], of each head the key rows, then the value rows (`kv_b_proj`).
        nope_dim, value_dim: of a head.

    Returns:
        [B, R, H, value_dim]. Bits of a row do not depend on how the prompt is cut into chunks.
    """
    batch, _, heads, key_dim = q.shape
    if not heads:
        return q[..., :value_dim]
    kv_rank, block = expand.shape[1], cache.shape[1]
    cells = cache.index_select(0, rows.host.read_blocks)  # [B * blocks, block, c]
    latent, rope = cells.split((kv_rank, cells.shape[2] - kv_rank), dim=2)
    made = linear(latent, expand).unflatten(2, (heads, -1))  # [B * blocks, block, H, nope + v]
    k_nope, v = made.split((nope_dim, value_dim), dim=3)
    k = torch.cat((k_nope, rope.unsqueeze(2).expand(-1, -1, heads, -1)), dim=3)  # [B * blocks, block, H, nope + rope]
    width = max(key_dim, value_dim)
    kv = torch.stack((F.pad(k, (0, width - key_dim)), F.pad(v, (0, width - value_dim))), dim=2)  # [.., 2, H, width]
    table = torch.arange(len(cells), device=q.device).view(batch, -1)  # [B, blocks] of the expanded cells
    expanded = AttentionRows(table, rows.positions, block, rows.write_index, rows.prefill)
    return paged_attention(F.pad(q, (0, width - key_dim)), kv, expanded, scale)[..., :value_dim]

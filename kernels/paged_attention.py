"""Attention over a paged KV cache. Decode, verify and prefill are one op: each query row is computed by itself.

Layout: caches are [num_blocks, block_size, kv_heads, head_dim]; block 0 is the dummy block that padding rows point at.
"""

import torch
import torch.nn.functional as F


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Store keys and values at their positions.

    Args:
        k, v: [B, R, kv_heads, head_dim].
        k_cache, v_cache: [num_blocks, block_size, kv_heads, head_dim], written in place.
        block_table: [B, blocks_per_sequence] int64.
        positions: [B, R] int64; -1 marks a padding row, which goes to the dummy block.
    """
    block_size = k_cache.shape[1]
    real = positions >= 0
    blocks = block_table.gather(1, positions.clamp(min=0) // block_size) * real  # [B, R]
    index = (blocks * block_size + positions.clamp(min=0) % block_size).reshape(-1)  # [B * R]
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, index, k.reshape(-1, *k.shape[2:]))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, index, v.reshape(-1, *v.shape[2:]))


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of every query row over the keys at positions <= its own.

    Args:
        q: [B, R, heads, head_dim].
        k_cache, v_cache: [num_blocks, block_size, kv_heads, head_dim].
        block_table: [B, blocks_per_sequence] int64; only the blocks that hold positions are read.
        positions: [B, R] int64, the absolute position of each row; -1 marks padding (its output is not meant for use).
        scale: multiplied onto q.k.

    Returns:
        [B, R, heads, head_dim].

    The group of query heads that share a KV head is the query axis of the inner call and rows are its batch axis, so
    the inner shape never depends on R and a row's bits do not depend on its neighbours.
    """
    batch, num_rows, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    out = torch.empty_like(q)
    for b in range(batch):
        num_blocks = max(int(positions[b].max()), 0) // block_size + 1
        blocks = block_table[b, :num_blocks]
        # [blocks, block, kv, d] -> [1, kv, T, d] -> [R, kv, T, d] without a copy per row
        k = k_cache[blocks].flatten(0, 1).transpose(0, 1)[None].expand(num_rows, -1, -1, -1)
        v = v_cache[blocks].flatten(0, 1).transpose(0, 1)[None].expand(num_rows, -1, -1, -1)
        visible = torch.arange(k.shape[2])[None] <= positions[b].clamp(min=0)[:, None]  # [R, T]
        rows = q[b].view(num_rows, kv_heads, group, head_dim)  # [R, heads, d] -> [R, kv, group, d]
        mixed = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible[:, None, None, :], scale=scale)
        out[b] = mixed.reshape(num_rows, heads, head_dim)  # [R, kv, group, d] -> [R, heads, d]
    return out

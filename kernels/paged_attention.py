"""Attention over a paged KV cache. Decode, verify and prefill are one op: each query row is computed by itself.

Layout: a cache is [num_blocks, block_size, 2, kv_heads, head_dim], keys at index 0 of the third axis and values at 1;
block 0 is the dummy block that padding rows point at. What is the same for every layer of a step (where rows are
written, which blocks are read, what is visible) is worked out once a step, in `AttentionRows`.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F

from slipstream.kernels.dispatch import on_gpu


@dataclass(frozen=True)
class HostPlan:
    """What the torch twin needs beside the rows: shapes that depend on values, so it waits for the device.

    Args:
        read_blocks: [B * blocks] int64, the blocks that hold positions 0.. of each request, in order.
        first_block: the first block where those of a single request lie side by side, so that no copy is needed.
        last: [B, R] int64, the last position that a row sees: its own, or 0 for padding.
        visible: [B, R, 1, T] bool, T = blocks * block_size: keys at positions <= the row's own.
        num_keys: of each request, how many of the T keys are read (whole blocks).
    """

    read_blocks: torch.Tensor
    first_block: int | None
    last: torch.Tensor
    visible: torch.Tensor
    num_keys: tuple[int, ...]
    _within: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor:
        """[B, R, 1, T] bool: what a row sees, itself and the window - 1 positions before it."""
        if window is None:
            return self.visible
        if window not in self._within:  # once a step, not once a layer
            keys = torch.arange(self.visible.shape[-1], device=self.last.device)
            recent = keys > self.last.unsqueeze(-1) - window  # [B, R] -> [B, R, T]
            self._within[window] = self.visible & recent.unsqueeze(2)
        return self._within[window]


@dataclass(frozen=True)
class AttentionRows:
    """The rows of one step, as every layer's attention needs them.

    Args:
        block_table: [B, blocks_per_sequence] int64.
        positions: [B, R] int64, the absolute position of each row; -1 marks padding.
        block_size: tokens a block.
        write_index: [B * R] int64, cell of each row in the flattened cache; of padding rows, in block 0.
        prefill: the rows are part of a prompt. On a GPU the kernel is chosen by this, never by the number of rows.
    """

    block_table: torch.Tensor
    positions: torch.Tensor
    block_size: int
    write_index: torch.Tensor
    prefill: bool = False

    @cached_property
    def host(self) -> HostPlan:
        """Of the torch twin; made when it is first asked for."""
        last = self.positions.clamp(min=0)
        counts = [end // self.block_size + 1 for end in last.amax(1).tolist()]
        num_blocks = max(counts)
        read = self.block_table[:, :num_blocks]  # [B, blocks]
        first_block = None
        if read.shape[0] == 1 and bool((read[0] - read[0, 0] == torch.arange(num_blocks, device=read.device)).all()):
            first_block = int(read[0, 0])
        keys = torch.arange(num_blocks * self.block_size, device=last.device)
        visible = keys <= last.unsqueeze(-1)  # [B, R, T]
        num_keys = tuple(count * self.block_size for count in counts)
        return HostPlan(read.flatten(), first_block, last, visible.unsqueeze(2), num_keys)


def plan_rows(
    block_table: torch.Tensor, positions: torch.Tensor, block_size: int, prefill: bool = False
) -> AttentionRows:
    """Works out once what every layer of a step needs. Waits for nothing: a CUDA graph can hold it.

    Args:
        block_table: [B, blocks_per_sequence] int64.
        positions: [B, R] int64, the absolute position of each row; -1 marks padding.
        block_size: tokens a block.
        prefill: the rows are part of a prompt.
    """
    if positions.is_cuda:
        from slipstream.kernels.gpu.write_index import write_index as on_card

        return AttentionRows(block_table, positions, block_size, on_card(block_table, positions, block_size), prefill)
    index = positions.clamp(min=0)
    blocks = block_table.gather(1, index // block_size) * (positions >= 0)  # [B, R]; padding: block 0
    write_index = (blocks * block_size + index % block_size).flatten()  # [B, R] -> [B * R]
    return AttentionRows(block_table, positions, block_size, write_index, prefill)


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, rows: AttentionRows) -> None:
    """Store keys and values, each [B, R, kv_heads, head_dim], in their cells of `cache`, in place."""
    cells = cache.flatten(0, 1)  # [blocks, block, 2, kv, d] -> [cells, 2, kv, d]
    cells[:, 0].index_copy_(0, rows.write_index, k.flatten(0, 1))  # [B, R, kv, d] -> [B * R, kv, d]
    cells[:, 1].index_copy_(0, rows.write_index, v.flatten(0, 1))


def paged_attention(
    q: torch.Tensor, cache: torch.Tensor, rows: AttentionRows, scale: float, window: int | None = None
) -> torch.Tensor:
    """Causal attention of every query row over the keys at positions <= its own.

    Args:
        q: [B, R, heads, head_dim]; outputs of padding rows are not meant for use. A rank of a tensor-parallel group
            may have no heads.
        cache: [num_blocks, block_size, 2, kv_heads, head_dim].
        rows: of this step.
        scale: multiplied onto q.k.
        window: positions that a row sees, itself included (sliding window); None: all before it.

    Returns:
        [B, R, heads, head_dim].

    The group of query heads that share a KV head is the query axis of the inner call and rows are its batch axis, so
    the inner shape never depends on R and a row's bits do not depend on its neighbours.
    """
    batch, num_rows, heads, head_dim = q.shape
    kv_heads = cache.shape[3]
    if not heads:
        return q
    if on_gpu(q):
        return _on_card(q, cache, rows, scale, window)
    host = rows.host
    visible = host.mask(window)
    if host.first_block is None:
        kv = cache.index_select(0, host.read_blocks)  # [B * blocks, block, 2, kv, d]
    else:
        kv = cache[host.first_block : host.first_block + host.read_blocks.shape[0]]
    kv = kv.view(batch, -1, 2, kv_heads, head_dim).permute(2, 0, 3, 1, 4)  # -> [2, B, kv, T, d]
    q = q.view(batch, num_rows, kv_heads, heads // kv_heads, head_dim)  # [B, R, heads, d] -> [B, R, kv, group, d]
    if num_rows == 1:  # one call for the whole batch
        mixed = F.scaled_dot_product_attention(q[:, 0], kv[0], kv[1], attn_mask=visible, scale=scale)
        return mixed.reshape(batch, 1, heads, head_dim)  # [B, kv, group, d] -> [B, 1, heads, d]
    parts = []
    for b, num_keys in enumerate(host.num_keys):
        k, v = kv[:, b : b + 1, :, :num_keys].expand(-1, num_rows, -1, -1, -1).unbind()  # -> 2 x [R, kv, T, d], no copy
        mask = visible[b, :, None, :, :num_keys]  # [R, 1, 1, T]
        parts.append(F.scaled_dot_product_attention(q[b], k, v, attn_mask=mask, scale=scale))
    return torch.stack(parts).reshape(batch, num_rows, heads, head_dim)  # B x [R, kv, group, d] -> [B, R, heads, d]


def _on_card(
    q: torch.Tensor, cache: torch.Tensor, rows: AttentionRows, scale: float, window: int | None
) -> torch.Tensor:
    """As `paged_attention`. The kernel is chosen by phase: rows of a prompt may differ in rounding from later ones."""
    if rows.prefill:
        from slipstream.kernels.gpu.prefill_attention import prefill_attention

        return prefill_attention(q, cache, rows.block_table, rows.positions, scale, window)
    from slipstream.kernels.gpu import paged_attention as gpu

    return gpu.paged_attention(q, cache, rows.block_table, rows.positions, scale, window)

"""The paged KV cache of one model, and the view of it that a step reads and writes."""

from dataclasses import dataclass

import torch

from slipstream.kernels.paged_attention import AttentionRows, plan_rows


class KVCache:
    """Keys and values of every layer: `layers[i]` is [num_blocks, block_size, 2, kv_heads, head_dim].

    Zero-initialised: masked cells are still multiplied by a weight of 0, and 0 x NaN is NaN.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size = block_size
        shape = (num_blocks, block_size, 2, num_kv_heads, head_dim)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def view(
        self, block_table: torch.Tensor, prefill: bool = False, write_index: torch.Tensor | None = None
    ) -> "PagedKV":
        """What a step reads and writes.

        Args:
            block_table: [B, blocks_per_sequence] int64, of the requests of a step.
            prefill: its rows are prompts'.
            write_index: [B * R] int64, cells of the step's rows, where they are known.
        """
        return PagedKV(self, block_table, prefill, write_index)

    def read(self, blocks: list[int], length: int) -> torch.Tensor:
        """Copy of the first `length` positions held by `blocks`: [layers, length, 2, kv_heads, head_dim]."""
        index = torch.tensor(blocks, device=self.layers[0].device)
        return torch.stack([layer[index].flatten(0, 1)[:length] for layer in self.layers])


@dataclass(frozen=True)
class PagedKV:
    """A cache, and of a step: the block table [B, blocks_per_sequence] of its requests, whether it runs prompts, and
    the cells [B * R] of its rows (None: to be worked out)."""

    cache: KVCache
    block_table: torch.Tensor
    prefill: bool = False
    write_index: torch.Tensor | None = None

    def rows(self, positions: torch.Tensor) -> AttentionRows:
        """What every layer needs to know about rows at `positions` [B, R] (-1 marks padding)."""
        if self.write_index is not None:
            return AttentionRows(
                self.block_table, positions, self.cache.block_size, self.write_index, prefill=self.prefill
            )
        return plan_rows(self.block_table, positions, self.cache.block_size, self.prefill)

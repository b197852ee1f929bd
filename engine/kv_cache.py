"""The paged KV cache of one model, and the view of it that a step reads and writes."""

from dataclasses import dataclass

import torch

from slipstream.kernels.paged_attention import AttentionRows, plan_rows


class KVCache:
    """What attention keeps of every position: `layers[i]` is [num_blocks, block_size, *cell].

    Args:
        num_layers, num_blocks, block_size: in tokens.
        cell: shape of what a layer keeps of a position. (2, kv_heads, head_dim): keys and values of this rank's heads.
            (kv_rank + rope_dim,): a latent for all heads, on every rank.
        dtype, device: of the cache.

    Zero-initialised: masked cells are still multiplied by a weight of 0, and 0 x NaN is NaN.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        cell: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size = block_size
        shape = (num_blocks, block_size, *cell)
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
        """Copy of the first `length` positions held by `blocks`: [layers, length, *cell]."""
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

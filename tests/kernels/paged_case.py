"""Paged caches for tests of the attention kernels: every cell that must not be read holds NaN."""

import math
from dataclasses import dataclass

import torch


@dataclass
class PagedCase:
    """Requests with the given `lengths` in scattered blocks of 8 tokens.

    cache [num_blocks, 8, 2, kv_heads, head_dim]: NaN but for the first `lengths[b]` cells of each request.
    table [B, blocks]: what lies behind a request's length points at blocks of NaN.
    keys, values: of each request, [length, kv_heads, head_dim].
    """

    cache: torch.Tensor
    table: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    generator: torch.Generator
    block_size: int

    @staticmethod
    def of(
        lengths: list[int],
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        seed: int = 0,
        block_size: int = 8,
        spare: int = 3,
    ) -> "PagedCase":
        generator = torch.Generator(device).manual_seed(seed)
        blocks = -(-max(lengths) // block_size) + spare
        order = torch.randperm(len(lengths) * blocks, generator=generator, device=device)
        table = 1 + order.view(len(lengths), blocks)
        shape = (1 + len(lengths) * blocks, block_size, 2, kv_heads, head_dim)
        cache = torch.full(shape, math.nan, dtype=dtype, device=device)
        keys, values = [], []
        for request, length in zip(table, lengths, strict=True):
            kv = torch.randn(length, 2, kv_heads, head_dim, generator=generator, device=device).to(dtype)
            at = torch.arange(length, device=device)
            cache.flatten(0, 1)[request[at // block_size] * block_size + at % block_size] = kv
            keys.append(kv[:, 0])
            values.append(kv[:, 1])
        return PagedCase(cache, table, keys, values, generator, block_size)

    def queries(self, positions: torch.Tensor, heads: int) -> torch.Tensor:
        """[B, R, heads, head_dim] for rows at `positions` [B, R]."""
        shape = (*positions.shape, heads, self.cache.shape[-1])
        return torch.randn(shape, generator=self.generator, device=self.cache.device).to(self.cache)

    def softmax(
        self, q: torch.Tensor, positions: torch.Tensor, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """The same attention written out in fp64, row by row; padding rows are 0."""
        out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        group = q.shape[2] // self.cache.shape[3]
        for b, r in (positions >= 0).nonzero().tolist():
            last = int(positions[b, r])
            seen = slice(0 if window is None else max(0, last + 1 - window), last + 1)
            k = self.keys[b][seen].double().repeat_interleave(group, 1)  # [T, kv, d] -> [T, heads, d]
            v = self.values[b][seen].double().repeat_interleave(group, 1)
            weights = (torch.einsum("hd,thd->ht", q[b, r].double(), k) * scale).softmax(-1)
            out[b, r] = torch.einsum("ht,thd->hd", weights, v)
        return out


def rows_at(starts: list[int], num_rows: int, device: str) -> torch.Tensor:
    """[B, num_rows] consecutive positions."""
    return torch.tensor(starts, device=device)[:, None] + torch.arange(num_rows, device=device)

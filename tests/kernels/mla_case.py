"""Paged caches of latents for tests of the kernels: every cell that must not be read holds NaN."""

import math
from dataclasses import dataclass

import torch

from slipstream.kernels.paged_attention import AttentionRows


@dataclass
class LatentCase:
    """Requests with the given `lengths` in scattered blocks.

    cache [num_blocks, block_size, rank + rope]: NaN but for the first `lengths[b]` cells of each request.
    table [B, blocks]: what lies behind a request's length points at blocks of NaN.
    cells: of each request, [length, rank + rope].
    """

    cache: torch.Tensor
    table: torch.Tensor
    cells: list[torch.Tensor]
    rank: int
    generator: torch.Generator

    @staticmethod
    def of(
        lengths: list[int], rank: int, rope: int, dtype: torch.dtype, device: str, seed: int = 0, block_size: int = 8
    ) -> "LatentCase":
        generator = torch.Generator(device).manual_seed(seed)
        blocks = -(-max(lengths) // block_size) + 3
        order = torch.randperm(len(lengths) * blocks, generator=generator, device=device)
        table = 1 + order.view(len(lengths), blocks)
        shape = (1 + len(lengths) * blocks, block_size, rank + rope)
        cache = torch.full(shape, math.nan, dtype=dtype, device=device)
        cells = []
        for request, length in zip(table, lengths, strict=True):
            made = torch.randn(length, rank + rope, generator=generator, device=device).to(dtype)
            at = torch.arange(length, device=device)
            cache.flatten(0, 1)[request[at // block_size] * block_size + at % block_size] = made
            cells.append(made)
        return LatentCase(cache, table, cells, rank, generator)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.cache.device).to(self.cache)

    def rows(self, positions: torch.Tensor, requests: slice = slice(None)) -> AttentionRows:
        none = torch.empty(0, dtype=torch.int64, device=self.cache.device)
        return AttentionRows(self.table[requests], positions, self.cache.shape[1], none)

    def softmax(self, q: torch.Tensor, positions: torch.Tensor, scale: float) -> torch.Tensor:
        """[B, R, H, rank], written out in fp64 row by row; padding rows are 0."""
        out = torch.zeros((*q.shape[:3], self.rank), dtype=torch.float64, device=q.device)
        for b, r in (positions >= 0).nonzero().tolist():
            keys = self.cells[b][: int(positions[b, r]) + 1].double()
            weights = (q[b, r].double() @ keys.t() * scale).softmax(-1)  # [H, T]
            out[b, r] = weights @ keys[:, : self.rank]
        return out


def rows_at(starts: list[int], num_rows: int, device: str) -> torch.Tensor:
    """[B, num_rows] consecutive positions."""
    return torch.tensor(starts, device=device)[:, None] + torch.arange(num_rows, device=device)

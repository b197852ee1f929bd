"""Probe: do the ops of the decode and verify path give a row the same bits, whatever rows travel with it?

Where they do, speculation is bitwise lossless. Where a CPU's linear layer is not row-invariant the promise is by logit
gap, and the server says so at start.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.kernels.linear import linear
from slipstream.kernels.paged_attention import paged_attention, plan_rows

# Widths of chains (K + 1 = 2..9), small batches of them, and counts on both sides of where libraries change blocking.
ROW_COUNTS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 32, 33, 48)
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class RowInvariance:
    """invariant: no row changed. detail: what was probed, or the first op, shape and row count that differed."""

    invariant: bool
    detail: str


def probe(
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, int]],
    row_counts: Sequence[int] = ROW_COUNTS,
    attention: tuple[int, int, int] = (4, 2, 64),
    seed: int = 0,
) -> RowInvariance:
    """Compare rows computed alone with the same rows computed together, bit for bit.

    Args:
        dtype: the serving dtype.
        shapes: (out_features, in_features) of the model's linear layers.
        row_counts: how many rows travel together.
        attention: (heads, kv_heads, head_dim) of the model.
        seed: of the random weights and inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for shape in shapes:
            rows = _first_changed_linear(dtype, shape, row_counts, generator)
            if rows:
                return RowInvariance(
                    False, f"linear {shape[0]}x{shape[1]} in {dtype} changes a row's bits at {rows} rows"
                )
        rows = _first_changed_attention(dtype, attention, row_counts, generator)
        if rows:
            name = f"attention of {attention[0]} heads, {attention[1]} KV heads, size {attention[2]}"
            return RowInvariance(False, f"{name} in {dtype} changes a row's bits at {rows} rows")
    return RowInvariance(
        True, f"{len(shapes)} linear shapes and attention in {dtype} keep a row's bits for 1..{max(row_counts)} rows"
    )


def _first_changed_linear(
    dtype: torch.dtype, shape: tuple[int, int], row_counts: Sequence[int], generator: torch.Generator
) -> int | None:
    """The first row count at which some row differs from the row alone, or None."""
    out_features, in_features = shape
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    x = torch.randn(max(row_counts), in_features, generator=generator).to(dtype)
    # The second half of every sum undoes the first, in another order. What is left is rounding, so that another order
    # of summation shows in nearly every output; in plain random data bf16 outputs would hide it.
    half = in_features // 2
    order = torch.randperm(half, generator=generator)
    weight[:, half : 2 * half] = -weight[:, order]
    x[:, half : 2 * half] = x[:, order]
    alone = torch.cat([linear(row[None], weight) for row in x])  # M x [1, out] -> [M, out]
    for count in row_counts:
        # The rows from the front and from the back: buffers of both begin at other addresses.
        if not torch.equal(linear(x[:count], weight), alone[:count]):
            return count
        if not torch.equal(linear(x[-count:], weight), alone[-count:]):
            return count
    return None


def _first_changed_attention(
    dtype: torch.dtype, heads: tuple[int, int, int], row_counts: Sequence[int], generator: torch.Generator
) -> int | None:
    """As `_first_changed_linear`, for rows at consecutive positions of one request, alone and beside another request.

    In company a row also sees more masked keys: those of later rows, and those of a longer request.
    """
    num_heads, kv_heads, head_dim = heads
    most = max(row_counts)
    start = 3 * _BLOCK_SIZE - 2  # rows cross a block's border
    blocks = (start + most) // _BLOCK_SIZE + 4
    cache = torch.randn(2 * blocks + 1, _BLOCK_SIZE, 2, kv_heads, head_dim, generator=generator).to(dtype)
    # The first request's blocks lie side by side; those of the other are scattered.
    scattered = blocks + torch.randperm(blocks, generator=generator)
    tables = 1 + torch.stack([torch.arange(blocks), scattered])  # [2, blocks]
    q = torch.randn(2, most, num_heads, head_dim, generator=generator).to(dtype)
    positions = start + torch.arange(most) + torch.tensor([[0], [2 * _BLOCK_SIZE]])  # [2, M]
    changed = _first_changed_in_company(q, cache, tables, positions, row_counts)
    if changed:
        return changed
    # Equal weights (q = 0) over values that undo each other: as for linear layers, only rounding is left.
    values = cache[:, :, 1]
    values[tables[:, 3:]] = 0
    half = start // 2
    for table in tables:
        cells = (table[:3, None] * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE)).flatten()  # [3, block] -> [3 * block]
        flat = values.flatten(0, 1)[cells]  # [3 * block, kv, d], a copy
        order = torch.randperm(half, generator=generator)
        flat[half : 2 * half], flat[2 * half :] = -flat[order], 0
        cache.flatten(0, 1)[cells, 1] = flat
    return _first_changed_in_company(torch.zeros_like(q), cache, tables, positions, row_counts)


def _first_changed_in_company(
    q: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, positions: torch.Tensor, row_counts: Sequence[int]
) -> int | None:
    """q [2, M, heads, d], tables [2, blocks], positions [2, M] -> the first row count that changes a row, or None."""

    def attend(requests: slice, rows: slice) -> torch.Tensor:
        plan = plan_rows(tables[requests], positions[requests, rows], _BLOCK_SIZE)
        return paged_attention(q[requests, rows], cache, plan, q.shape[-1] ** -0.5)

    for request in (slice(0, 1), slice(1, 2)):
        single = [attend(request, slice(i, i + 1)) for i in range(q.shape[1])]
        alone = torch.cat(single, dim=1)  # M x [1, 1, H, d] -> [1, M, H, d]
        if not torch.equal(attend(slice(0, 2), slice(0, 1))[request], alone[:, :1]):
            return 2
        for count in row_counts:
            if not torch.equal(attend(request, slice(0, count)), alone[:, :count]):
                return count
            if not torch.equal(attend(slice(0, 2), slice(0, count))[request], alone[:, :count]):
                return 2 * count
    return None

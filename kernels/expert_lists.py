"""The (row, expert) pairs of some rows by expert, as kernels over routed experts go through them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpertLists:
    """The (row, expert) pairs of M rows by expert: what kernels over experts go through.

    Args:
        count: [1] int32, entries that there are.
        entries: [most, 4] int32, each (expert, first place, rows, 0): places lie in the order of their experts, and of
            their rows within one. What is behind `count` is undefined.
        order: [M k] int32, the row of each place.
        place: [M k] int32, the place of pair m * k + j.
        tile: rows of an entry, at most; an expert with more has several.
    """

    count: torch.Tensor
    entries: torch.Tensor
    order: torch.Tensor
    place: torch.Tensor
    tile: int


def tile_of(rows: int) -> int:
    """Rows of an entry, for so many rows in all. Changes no bits."""
    return 8 if rows <= 16 else 16 if rows <= 128 else 32


def most_entries(rows: int, per_token: int, num_experts: int, tile: int) -> int:
    """How many there can be."""
    pairs = rows * per_token
    return min(num_experts, pairs) + (pairs // tile if rows > tile else 0)


def empty_lists(ids: torch.Tensor, num_experts: int, tile: int | None = None) -> ExpertLists:
    """Room for the lists of ids [M, k]."""
    (rows, per_token), tile = ids.shape, tile or tile_of(len(ids))
    most, pairs = most_entries(rows, per_token, num_experts, tile), ids.numel()
    # In one piece: the first four hold the count.
    room = torch.empty(4 + 4 * most + 2 * pairs, dtype=torch.int32, device=ids.device)
    count, entries, order, place = room.split((4, 4 * most, pairs, pairs))
    return ExpertLists(count, entries.view(most, 4), order, place, tile)


def sorted_lists(ids: torch.Tensor, num_experts: int, tile: int) -> ExpertLists:
    """The same by torch, of any number of rows."""
    lists = empty_lists(ids, num_experts, tile)
    chosen, pairs = ids.flatten().sort(stable=True)  # [M k] each
    lists.order.copy_(pairs // ids.shape[1])
    lists.place[pairs] = torch.arange(len(pairs), dtype=torch.int32, device=ids.device)
    experts = torch.arange(num_experts, dtype=ids.dtype, device=ids.device)
    starts, ends = torch.searchsorted(chosen, experts), torch.searchsorted(chosen, experts, right=True)  # [E] each
    entries_up_to = ((ends - starts + tile - 1) // tile).cumsum(0)  # [E]
    index = torch.arange(len(lists.entries), device=ids.device)  # [most]
    expert = torch.searchsorted(entries_up_to, index, right=True).clamp_(max=num_experts - 1)
    before = entries_up_to[expert] - (ends - starts + tile - 1)[expert] // tile
    first = starts[expert] + (index - before) * tile
    rows = (ends[expert] - first).clamp(min=0, max=tile)
    lists.entries.copy_(torch.stack((expert, first, rows, torch.zeros_like(rows)), dim=1))  # 4 x [most] -> [most, 4]
    lists.count.copy_(entries_up_to[-1].expand(4))
    return lists

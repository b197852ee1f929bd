"""Rows of hidden states, picked and put where the next model call reads them."""

from collections.abc import Sequence

import torch

from slipstream.kernels.dispatch import on_gpu


def select_last(states: torch.Tensor, last_row: torch.Tensor) -> torch.Tensor:
    """One row a request: states [B, R, h], last_row [B] int64 -> [B, h]."""
    if on_gpu(states):
        from slipstream.kernels.gpu import row_copies

        return row_copies.select_last(states, last_row)
    return states[torch.arange(states.shape[0], device=states.device), last_row]  # [B, R, h] -> [B, h]


def store_features(
    states: Sequence[torch.Tensor], features: torch.Tensor, slots: torch.Tensor, last_row: torch.Tensor | None = None
) -> None:
    """Puts captured states side by side into the rows of the table that the draft reads next.

    Args:
        states: n x [B * R, h], captured slots, the draft's order; 1 to 5 of them.
        features: [S, K + 1, n * h], changed in place: row r of request b goes to [slots[b], r].
        slots: [B] int64.
        last_row: [B] int64; given, only that row of each request is kept, as [slots[b], 0] (the end of a prompt).

    Raises ValueError when the sizes do not fit together.
    """
    batch, (rows, hidden) = slots.shape[0], states[0].shape
    per_request = rows // batch
    if not 1 <= len(states) <= 5:
        raise ValueError(f"{len(states)} states; 1 to 5 can be stored")
    if features.shape[-1] != len(states) * hidden or (last_row is None and per_request > features.shape[1]):
        raise ValueError(
            f"{len(states)} states of {per_request} rows x {hidden} do not fit features {tuple(features.shape)}"
        )
    if on_gpu(features):
        from slipstream.kernels.gpu import row_copies

        row_copies.store_features(states, features, slots, last_row)
        return
    side_by_side = torch.cat(list(states), dim=-1).view(batch, per_request, -1)  # n x [B * R, h] -> [B, R, n * h]
    if last_row is None:
        features[slots, :per_request] = side_by_side
    else:
        features[slots, 0] = side_by_side[torch.arange(batch, device=slots.device), last_row]  # [B, n * h]

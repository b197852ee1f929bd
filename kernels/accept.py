"""Acceptance of a chain: a draft is accepted when it equals the token that the target chose at its position."""

import torch


def accept(draft: torch.Tensor, sampled: torch.Tensor, num_valid: torch.Tensor) -> torch.Tensor:
    """Length of the leading run of drafts that equal the target's own tokens.

    Args:
        draft: [B, K] int64, d_1 .. d_K.
        sampled: [B, K + 1] int64, y_0 .. y_K: y_i is the target's token after i accepted drafts, so d_{i+1} is held
            against y_i, and y_a is the token committed after a accepted drafts.
        num_valid: [B] int64, usable drafts of each row (0..K); later ones are never accepted.

    Returns:
        [B] int64 accepted counts a, 0..num_valid.
    """
    steps = torch.arange(draft.shape[1], device=draft.device)
    match = (draft == sampled[:, : draft.shape[1]]) & (steps < num_valid[:, None])  # [B, K]
    return match.long().cumprod(dim=1).sum(dim=1)  # [B, K] -> [B]

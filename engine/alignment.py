"""The shift between tokens and features: the one place where it is written down.

    position        t        t+1       t+2
    token           x_t      x_{t+1}   x_{t+2}
    feature         g_t
    slot t of the draft sees (g_t, embedding of x_{t+1}) and predicts x_{t+2};
    its teacher is the target's distribution after x_{t+1}, i.e. the teacher state at position t+1.

At draft step k (k = 1..K; step 1 uses the target's feature, later steps the draft's own state) every index but that of
the feature moves on by k - 1.
"""

import torch


def draft_tokens(token_ids: torch.Tensor, step: int) -> torch.Tensor:
    """Token that slot t embeds at `step`: x_{t+step}.

    Args: token_ids [..., T]. Returns [..., T - step], slot t at index t.
    """
    return token_ids[..., step:]


def teacher_index(slot: int, step: int) -> int:
    """Position whose teacher state slot `slot` must match at `step`."""
    return slot + step


def slot_mask(loss_mask: torch.Tensor, step: int) -> torch.Tensor:
    """Slots supervised at `step`: the token embedded and the token predicted both belong to one assistant answer.

    Args:
        loss_mask: [..., T] bool, true on assistant tokens, the end token included.
        step: draft step, 1-based.

    Returns:
        [..., T] bool; slot t is true when x_{t+1} .. x_{t+1+step} are all assistant tokens (the first of them is the
        target's own token, the earliest that serving hands to the draft).
    """
    size = loss_mask.shape[-1]
    mask = loss_mask.bool()
    out = torch.zeros_like(mask)
    reach = size - 1 - step  # slots t with t + 1 + step <= T - 1
    if reach <= 0:
        return out
    ok = torch.ones_like(mask[..., :reach])
    for ahead in range(1, step + 2):
        ok = ok & mask[..., ahead : ahead + reach]
    out[..., :reach] = ok
    return out

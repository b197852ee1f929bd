"""The router of a mixture of experts: which experts a row goes to, and how much each counts (`noaux_tc`, sigmoid)."""

from dataclasses import dataclass

import torch

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.linear import linear

_TINY = 1e-20  # added to the sum that weights are divided by, as the published models do


@dataclass(frozen=True)
class Routing:
    """How experts are chosen.

    Args:
        per_token: experts of a row (k).
        groups: parts of equal size that the experts are in, in order of their ids.
        groups_kept: of those, how many a row may choose from: the ones whose two best experts score highest together.
        normalise: the k weights of a row are divided by their sum.
        scaling: what they are multiplied by then.
    """

    per_token: int
    groups: int = 1
    groups_kept: int = 1
    normalise: bool = True
    scaling: float = 1.0


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T summed in fp32 and not rounded: a choice between experts must not hang on bf16.

    Args:
        x: [M, h], normed, fp32 or bf16.
        weight: [E, h] in the dtype of `x`.

    Returns:
        [M, E] fp32; a row's bits as in `linear`.
    """
    if on_gpu(x):
        from slipstream.kernels.cuda import router

        return router.router_logits(x, weight)
    return linear(x.float(), weight.float())


def route(logits: torch.Tensor, bias: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of every row.

    Args:
        logits: [M, E] fp32, from `router_logits`.
        bias: [E] fp32, added to sigmoid(logits) for the choice only (`e_score_correction_bias`).
        routing: how they are chosen.

    Returns:
        (ids [M, k] int32, weights [M, k] fp32), the best of sigmoid + bias first; of equal ones the lower id first. A
        weight is the sigmoid without the bias.
    """
    if on_gpu(logits):
        from slipstream.kernels.cuda import router

        return router.route(logits, bias, routing)
    scores = _scores(logits)  # [M, E]
    choice = scores + bias
    if routing.groups > 1:
        parts = choice.unflatten(1, (routing.groups, -1))  # [M, E] -> [M, G, E / G]
        best = parts.topk(min(2, parts.shape[2]), dim=2).values.sum(2)  # [M, G]
        kept = _first(best, routing.groups_kept)  # [M, groups_kept]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)  # [M, G]
        choice = parts.masked_fill(~mask[..., None], float("-inf")).flatten(1)  # [M, G, E / G] -> [M, E]
    ids = _first(choice, routing.per_token)  # [M, k]
    return ids.int(), _weigh(scores, ids, routing)


def gates_of(logits: torch.Tensor, ids: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The weights [M, k] fp32 that `route` gives these experts, whoever chose them.

    Args:
        logits: [M, E] fp32, from `router_logits`.
        ids: [M, k] int32, in the order in which they are summed.
        routing: how they are weighted.
    """
    return _weigh(_scores(logits), ids.long(), routing)


def _scores(logits: torch.Tensor) -> torch.Tensor:
    """sigmoid, [M, E] fp32.

    torch's fp32 sigmoid rounds otherwise in whole vectors than in what is left behind the last one, so that a row's
    bits would depend on how many rows there are. From fp64 both round to the same.
    """
    return logits.double().sigmoid().float()


def _weigh(scores: torch.Tensor, ids: torch.Tensor, routing: Routing) -> torch.Tensor:
    """scores [M, E], ids [M, k] int64 -> [M, k]."""
    weights = scores.gather(1, ids)  # [M, k]
    if routing.normalise:
        total = weights[:, :1].clone()  # [M, 1], summed in chosen order
        for place in range(1, weights.shape[1]):
            total += weights[:, place : place + 1]
        weights = weights / (total + _TINY)
    return weights * routing.scaling


def _first(values: torch.Tensor, count: int) -> torch.Tensor:
    """[M, n] -> [M, count] int64: places of the largest, the largest first, of equal ones the lower place first."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]

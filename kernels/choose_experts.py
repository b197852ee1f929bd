"""The router in one op: which experts a row goes to, how much each counts, and the lists for `expert_mlp`."""

from dataclasses import dataclass

import torch

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.expert_lists import ExpertLists
from slipstream.kernels.route import Routing, route, router_logits


@dataclass(frozen=True)
class Choice:
    """Args:
    ids: [M, k] int32, as `route` gives them.
    gates: [M, k] fp32.
    lists: of the pairs by expert, where a kernel wants them and the router made them; `expert_mlp` makes them else.
    """

    ids: torch.Tensor
    gates: torch.Tensor
    lists: ExpertLists | None = None


def choose_experts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, routing: Routing) -> Choice:
    """`route` of `router_logits`; on a GPU one kernel for 1 to 128 rows.

    Args:
        x: [M, h], normed, fp32 or bf16.
        weight: [E, h] in the dtype of `x`.
        bias: [E] fp32.
        routing: how experts are chosen.
    """
    if on_gpu(x):
        from slipstream.kernels.cuda import router

        return router.choose_experts(x, weight, bias, routing)
    return Choice(*route(router_logits(x, weight), bias, routing))

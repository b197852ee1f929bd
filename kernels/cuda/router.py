"""The router on a card, by route.cuh's kernel: 1 to 128 rows a launch."""

import torch

from slipstream.kernels.choose_experts import Choice
from slipstream.kernels.cuda import route_launch
from slipstream.kernels.cuda.route_launch import MAX_ROWS, RouteParams, Stage
from slipstream.kernels.expert_lists import ExpertLists, empty_lists, sorted_lists, tile_of
from slipstream.kernels.route import Routing


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `slipstream.kernels.route.router_logits`."""
    logits = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    for rows, out in zip(x.split(MAX_ROWS), logits.split(MAX_ROWS), strict=True):
        if len(rows):
            params, _sums = route_launch.product(rows, weight)
            params.logits = out.data_ptr()
            route_launch.launch(Stage.LOGITS, params, _device(x))
    return logits


def route(logits: torch.Tensor, bias: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """As `slipstream.kernels.route.route`."""
    ids, gates = _empty(logits, routing)
    logits = logits.contiguous()
    for rows, out, weights in zip(logits.split(MAX_ROWS), ids.split(MAX_ROWS), gates.split(MAX_ROWS), strict=True):
        if len(rows):
            params = RouteParams(sums=rows.data_ptr(), M=len(rows), E=logits.shape[1], parts=1)
            route_launch.choose(params, bias, routing, out, weights)
            route_launch.launch(Stage.FROM_LOGITS, params, _device(logits))
    return ids, gates


def choose_experts(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, routing: Routing, tile: int | None = None
) -> Choice:
    """As `slipstream.kernels.choose_experts.choose_experts`; with lists where one launch takes all rows.

    Args: tile: rows of an entry of the lists, at most; None: by the number of rows.
    """
    ids, gates = _empty(x, routing)
    whole = 0 < len(x) <= MAX_ROWS
    lists = empty_lists(ids, len(weight), tile) if whole else None
    for rows, out, weights in zip(x.split(MAX_ROWS), ids.split(MAX_ROWS), gates.split(MAX_ROWS), strict=True):
        if len(rows):
            params, _sums = route_launch.product(rows, weight)
            route_launch.choose(params, bias, routing, out, weights)
            if lists is not None:
                route_launch.fill(params, lists)
            route_launch.launch(Stage.ROUTE, params, _device(x))
    return Choice(ids, gates, lists)


def expert_lists(ids: torch.Tensor, num_experts: int, tile: int | None = None) -> ExpertLists:
    """The lists of ids [M, k] int32 that are chosen already; no more is asked of the host than their shape."""
    if len(ids) > MAX_ROWS:
        return sorted_lists(ids, num_experts, tile or tile_of(len(ids)))
    ids = ids.contiguous()
    lists = empty_lists(ids, num_experts, tile)
    params = RouteParams(ids=ids.data_ptr(), M=len(ids), E=num_experts, per_token=ids.shape[1], parts=1)
    route_launch.fill(params, lists)
    route_launch.launch(Stage.FROM_IDS, params, _device(ids))
    return lists


def _empty(like: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(like), routing.per_token)
    ids = torch.empty(shape, dtype=torch.int32, device=like.device)
    return ids, torch.empty(shape, dtype=torch.float32, device=like.device)


def _device(x: torch.Tensor) -> int:
    return x.get_device()

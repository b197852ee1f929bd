"""Which experts every row went to: recorded beside the captured states, and followed by a target that is to go there.

An expert more or less moves a row's state far more than rounding does, and rounding decides where two score alike. So
what is compared with a served state must have gone to the experts that the server chose; that each choice was one of
near equals is judged apart (`slipstream.tasks.parity_experts`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from slipstream.engine.layers.experts import Router
from slipstream.engine.models.decoder import Decoder
from slipstream.engine.models.target import TargetOutput
from slipstream.kernels.choose_experts import Choice
from slipstream.kernels.gate_experts import Gated
from slipstream.kernels.route import gates_of, router_logits
from slipstream.kernels.weight import as_matrix

_PREFIX = "experts_"


def experts_name(layer: int) -> str:
    """Of a layer's choices among captured states."""
    return f"{_PREFIX}{layer}"


def choices_of(states: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Layer -> [n, k] int32, of the states of a trace; {} for a target without routed experts."""
    return {int(name.removeprefix(_PREFIX)): ids for name, ids in sorted(states.items()) if name.startswith(_PREFIX)}


def routers(target: Decoder) -> dict[int, Router]:
    """Layer -> its router, where it has one."""
    found = {index: getattr(layer.mlp, "gate", None) for index, layer in enumerate(target.layers)}
    return {index: router for index, router in found.items() if isinstance(router, Router)}


def record_choices(target: Decoder) -> None:
    """Every forward pass that captures states hands out the experts of each row from now on, [B, R, k] int32.

    From outside, as `slipstream.engine.inject`: a server without diagnostics has none of it.
    """
    found = routers(target)
    if not found:
        return
    seen: dict[str, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_router: Router, _args: object, out: Gated) -> None:
            seen[experts_name(layer)] = out.choice.ids

        return hook

    for layer, router in found.items():
        router.register_forward_hook(keep(layer))
    original = target.forward

    def forward(*args: object, **kwargs: object) -> TargetOutput:
        out = original(*args, **kwargs)  # type: ignore[arg-type]
        if not out.states:
            return out
        rows = out.last.shape[:-1]
        chosen = {name: ids.view(*rows, ids.shape[-1]) for name, ids in seen.items()}  # [M, k] -> [B, R, k]
        return replace(out, states={**out.states, **chosen})

    target.forward = forward  # type: ignore[method-assign]


@contextmanager
def following(target: Decoder, choices: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Meanwhile the rows of `target`, in the order in which they come, go to these experts.

    Args:
        target: its weights still say how much each counts.
        choices: layer -> [n, k] int32, of the rows of all passes until the end; {}: it chooses itself.

    Raises ValueError where more rows come.
    """
    done = dict.fromkeys(choices, 0)

    def follow(layer: int) -> Any:
        def hook(router: Router, _args: object, out: Gated) -> Gated:
            rows = slice(done[layer], done[layer] + len(out.x))
            done[layer] = rows.stop
            ids = choices[layer][rows].to(out.x.device)  # [M, k]
            if len(ids) < len(out.x):
                raise ValueError(f"{rows.stop} rows came to layer {layer}, and {len(choices[layer])} choices")
            weight = router.weight.data if isinstance(router.weight, torch.nn.Parameter) else router.weight
            logits = router_logits(out.x, as_matrix(weight))  # [M, E]
            return out._replace(choice=Choice(ids, gates_of(logits, ids, router.routing)))

        return hook

    handles = [router.register_forward_hook(follow(i)) for i, router in routers(target).items() if i in choices]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

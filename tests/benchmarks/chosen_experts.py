"""Which experts every row went to, in the steps of a running engine."""

from typing import Any

import torch

from slipstream.engine.engine import Engine
from slipstream.engine.layers.experts import Router

ENOUGH = 0.8  # of the distinct experts of rows that choose apart: with fewer, rows have become alike


def choice_of(result: Any) -> Any:
    """Of what a router hands out: ids, gates."""
    return getattr(result, "choice", result)


def with_choice(result: Any, choice: Any) -> Any:
    """The same with another choice."""
    return result._replace(choice=choice) if hasattr(result, "choice") else choice


class Chosen:
    """Experts of every row in the last step of each batch: routers hand out the tensors that a captured step writes.

    Args: engine: not started yet, so that what its steps are captured from is seen.
    """

    def __init__(self, engine: Engine) -> None:
        self.of_batch: dict[int, list[torch.Tensor]] = {}
        self._now: list[torch.Tensor] | None = None
        run = engine.runner.round

        def round_(slots: torch.Tensor, num_steps: int | None = None) -> Any:
            self._now = []
            result = run(slots, num_steps)
            self.of_batch[len(slots)], self._now = self._now, None
            return result

        engine.runner.round = round_  # type: ignore[method-assign]
        assert isinstance(engine.target, torch.nn.Module)
        self._hooks = [
            module.register_forward_hook(self._note) for module in engine.target.modules() if isinstance(module, Router)
        ]

    def _note(self, _module: Any, _inputs: Any, result: Any) -> None:
        if self._now is not None:
            self._now.append(choice_of(result).ids)

    def distinct(self, batch: int) -> list[int]:
        """Of each layer."""
        return [len(ids.unique()) for ids in self.of_batch[batch]]

    def stop(self) -> None:
        """Notes nothing any more, so that another engine of the same target may."""
        for hook in self._hooks:
            hook.remove()

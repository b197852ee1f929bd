"""Training conversations from a hidden-state store."""

from collections.abc import Sequence

import torch

from slipstream.engine.capture import CapturePlan
from slipstream.engine.hidden_store import HiddenStateStore
from slipstream.engine.training.data import Conversation


class StoreSource:
    """Conversations of a store, read (and checked) when they are asked for.

    Args:
        store: an open store.
        conversation_ids: which of them, in this order.
        plan: the draft's slots: features are picked by name, in the plan's order.
    """

    def __init__(self, store: HiddenStateStore, conversation_ids: Sequence[str], plan: CapturePlan) -> None:
        self._store, self._ids, self._plan = store, list(conversation_ids), plan
        self.lengths: Sequence[int] = [store.entry(i).tokens for i in self._ids]

    def loss_mask(self, index: int) -> torch.Tensor:
        """[T] bool of the conversation at `index`, without its states."""
        return self._store.loss_mask(self._ids[index])

    def __getitem__(self, index: int) -> Conversation:
        """The conversation at `index`. Raises KeyError for a slot of the plan that the store does not hold."""
        states = self._store.read(self._ids[index])
        return Conversation(
            token_ids=states.token_ids.long(),
            loss_mask=states.loss_mask,
            features=self._plan.select(states.slots),  # n x [T, h] -> [T, n * h]
            teacher=states.teacher,
            teacher_start=states.teacher_start,
        )

"""Which hidden states are captured, by name. One definition for extraction, training, conversion, parity and serving.

Canonical slot id = number of decoder layers already applied to the residual stream: 0 is the embedding output, k the
state after k layers, N (`num_layers`) the last state before the final norm.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.engine.errors import SlipstreamError

if TYPE_CHECKING:  # naming slots must not load torch: `slipstream plan` names them within a second
    import torch


class BadSlots(SlipstreamError, ValueError):
    """Slots that a target does not have."""

    def __init__(self, found: str, *, expected: str, do: str = "") -> None:
        SlipstreamError.__init__(self, found, expected=expected, do=do)


@dataclass(frozen=True)
class CapturePlan:
    """An ordered tuple of feature slots plus the teacher slot N. Compared by name, never sliced by position."""

    slots: tuple[int, ...]
    num_layers: int

    def __post_init__(self) -> None:
        bad = [s for s in self.slots if not 0 <= s <= self.num_layers]
        if bad:
            raise BadSlots(
                f"slots {bad} are outside 0..{self.num_layers}",
                expected=f"slots of a target of {self.num_layers} layers: slot k is the state after k layers",
                do="correct the slots (capture.slots, --capture-slots), or take the target that they were made for",
            )
        if len(set(self.slots)) != len(self.slots):
            raise BadSlots(
                f"slots {self.slots} name the same state twice",
                expected="each slot once",
                do="name other slots (capture.slots, --capture-slots); where none are named, (2, N // 2, N - 3) are "
                "taken, which are three states from N = 7 layers on",
            )

    @property
    def teacher(self) -> int:
        """The slot whose normed state gives the target's logits."""
        return self.num_layers

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(slot_name(s) for s in self.slots)

    def select(self, states: Mapping[str, "torch.Tensor"]) -> "torch.Tensor":
        """Features of the draft, picked by name in the plan's order.

        Args: states: name -> [..., hidden]. Returns: [..., len(slots) * hidden]. Raises KeyError on a missing slot.
        """
        import torch

        missing = [n for n in self.names if n not in states]
        if missing:
            raise KeyError(f"the draft needs {list(self.names)}; captured were {sorted(states)}: missing {missing}")
        return torch.cat([states[n] for n in self.names], dim=-1)  # n x [..., h] -> [..., n * h]


def slot_name(slot: int) -> str:
    return f"slot_{slot}"


def slot_id(name: str) -> int:
    """Inverse of `slot_name`."""
    return int(name.removeprefix("slot_"))


def default_slots(num_layers: int) -> tuple[int, ...]:
    """The three slots that vLLM and SGLang capture when a draft's config names none."""
    return (2, num_layers // 2, num_layers - 3)

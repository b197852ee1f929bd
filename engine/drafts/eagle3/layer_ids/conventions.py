"""How trainers and libraries number the states that an engine captures: their numbers to slots and back.

What an engine makes of a number in a draft's config.json is its reading (`reading.py`), and depends on its version.
Here stands what the number meant to whoever wrote it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.errors import SlipstreamError


@dataclass(frozen=True)
class Convention:
    """One way to number states.

    Args:
        name: of the trainer or library.
        add: slot = number + add.
        first: smallest slot that has a number.
        no_last: why slot N has no number; "" where it has one.
        teacher: the list ends with slot N for the teacher, behind the slots that the draft reads.
        verified: false where the source was read, but how it works at run time is in doubt.
    """

    name: str
    add: int
    first: int = 0
    no_last: str = ""
    teacher: bool = False
    verified: bool = True

    def slots(self, ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
        """The slots that the draft reads, by the numbers of this convention, in their order.

        Raises SlipstreamError (F4) for numbers that are no slot, and for a list without the teacher where it belongs.
        """
        named = tuple(i + self.add for i in ids)
        if self.teacher:
            if not named or named[-1] != num_layers:
                raise SlipstreamError(
                    f"{self.name} ids {list(ids)} do not end with {num_layers - self.add}, the last state",
                    expected=f"the draft's slots and then {num_layers - self.add}: the last one is the teacher's",
                    do="capture again with the last layer: otherwise the last feature is taken for the teacher",
                    fault="F4",
                )
            named = named[:-1]
        self._check(named, num_layers)
        return named

    def ids(self, slots: Sequence[int], num_layers: int) -> tuple[int, ...]:
        """The numbers of this convention for slots. Raises SlipstreamError (F4) for slots that it has none for."""
        self._check(slots, num_layers)
        return tuple(s - self.add for s in (*slots, *([num_layers] if self.teacher else [])))

    def _check(self, slots: Sequence[int], num_layers: int) -> None:
        last = num_layers - 1 if self.no_last else num_layers
        outside = [s for s in slots if not self.first <= s <= last]
        if not outside:
            return
        why = "slots of the target"
        if self.no_last and num_layers in outside:
            why = self.no_last
        elif self.first and 0 in outside:
            why = "outputs of layers are numbered, and the embedding is none"
        raise SlipstreamError(
            f"{self.name} has no number for slots {outside} of a target with {num_layers} layers",
            expected=f"slots {self.first}..{last}: {why}",
            do="take other slots, or capture with Slipstream, which names 0 to N",
            fault="F4",
        )


_ALL = (
    Convention("slipstream", 0),
    # hidden_states of transformers: the last one is normed, so that slot N is in no model output.
    Convention("huggingface", 0, no_last="hidden_states[N] is taken after the final norm, slot N before it"),
    Convention("eagle", 0, no_last="states are captured on entering a layer, and none follows the last one"),
    Convention("specforge", 1, first=1),  # stored reduced by one, since SGLang adds one
    Convention("vllm", 0),  # eagle_aux_hidden_state_layer_ids
    Convention("vllm-dflash", 1, first=1),  # target_layer_ids of DFlash and DSpark
    Convention("speculators", 0, teacher=True),  # what it asks vLLM for; the teacher's state is before the norm
    Convention("modelopt", 1, first=1),  # as stored; capture adds 1, and N for the teacher
    Convention("modelopt-vllm-dump", 0, verified=False),  # its offline dumper hands its numbers to vLLM as they are
)
CONVENTIONS = {convention.name: convention for convention in _ALL}

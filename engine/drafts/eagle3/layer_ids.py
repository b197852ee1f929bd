"""Layer ids of other engines for our slots. One table; every translation goes through it.

A canonical slot k is the residual stream after k decoder layers. vLLM numbers it k. SGLang numbers it k - 1, by the
layer whose output it is, and adds 1 when it reads the config; for DeepSeek and Kimi it does so, since 0.5.13, only when
the first id is exactly 1. So one list of ids means different states to different engines and versions (F4).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from slipstream.engine.engine_versions import Engine
from slipstream.engine.errors import SlipstreamError


class Family(StrEnum):
    """Families of targets that differ in how an engine captures their states."""

    LLAMA = "llama"  # Llama, Qwen2, Qwen3, Mistral and the like
    DEEPSEEK = "deepseek"  # DeepSeek-V2/V3, Kimi-K2


_DEEPSEEK_NAMES = ("deepseek", "kimi")
# The versions whose rules were read in their source and which this table is true for.
KNOWN_VERSIONS = {Engine.VLLM: "0.24.0", Engine.SGLANG: "0.5.14"}


def family_of(name: str) -> Family:
    """The family of a target by the name of its architecture (or its `model_type`)."""
    return Family.DEEPSEEK if name.lower().startswith(_DEEPSEEK_NAMES) else Family.LLAMA


@dataclass(frozen=True)
class Reading:
    """How one engine reads layer ids for one family of targets.

    Args:
        name: for messages.
        add: added to every id.
        add_only_if_first_is: the addition happens only when the first id is this; None = always.
        embedding, last: whether slot 0 and slot N can be captured.
    """

    name: str
    add: int
    add_only_if_first_is: int | None
    embedding: bool
    last: bool

    def slots(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The canonical slots that the engine captures when a config holds `ids`."""
        applies = self.add_only_if_first_is is None or (len(ids) > 0 and ids[0] == self.add_only_if_first_is)
        return tuple(i + (self.add if applies else 0) for i in ids)

    def ids(self, slots: Sequence[int], num_layers: int) -> tuple[int, ...]:
        """The ids to write so that the engine captures `slots` of a target with `num_layers` layers.

        Raises SlipstreamError: F3 for slots out of layer order, which is the order that engines concatenate in; F4 for
        slots that the engine cannot capture or cannot be told to.
        """
        rising = sorted(set(slots))
        if list(slots) != rising:
            raise SlipstreamError(
                f"slots {list(slots)} are not in rising order",
                expected=f"{rising}: {self.name} concatenates states in layer order, whatever the order of the ids",
                do="set capture.slots in rising order, extract and train again",
                fault="F3",
            )
        first, last = (0 if self.embedding else 1), (num_layers if self.last else num_layers - 1)
        outside = [s for s in slots if not first <= s <= last]
        if outside:
            raise SlipstreamError(
                f"{self.name} cannot capture slots {outside} of a target with {num_layers} layers",
                expected=f"slots {first}..{last}",
                do="choose other capture.slots, extract and train again, or serve with Slipstream's own engine",
                fault="F4",
            )
        # Shifted first: [1, 29, 57] means the same to every version of SGLang, [2, 30, 58] does not.
        for candidate in (tuple(s - self.add for s in slots), tuple(slots)):
            if self.slots(candidate) == tuple(slots):
                return candidate
        raise SlipstreamError(
            f"{self.name} reads no list of ids as slots {list(slots)}",
            expected="a first slot other than 1, which it would take for a shifted 2",
            do="choose another first slot, extract and train again, or serve with Slipstream's own engine",
            fault="F4",
        )


def reading(engine: Engine, version: str, family: Family) -> Reading:
    """How an engine of a version ("0.5.14", "0.5.12.post1") reads ids. Raises SlipstreamError for another form."""
    name = f"{engine.value} {version} ({family.value} target)"
    if engine is Engine.VLLM:
        # DeepSeek: states are captured on entering a layer, where slot 0 has no residual yet; no layer follows slot N.
        both_ends = family is not Family.DEEPSEEK
        return Reading(name, 0, None, embedding=both_ends, last=both_ends)
    first = 1 if family is Family.DEEPSEEK and _release(version) >= (0, 5, 13) else None
    return Reading(name, 1, first, embedding=False, last=False)  # captured on entering a layer, too


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if not found:
        raise SlipstreamError(
            f"SGLang version {version!r} is not of the form 0.5.14",
            expected="a released version: the meaning of layer ids changed at 0.5.13",
            do="name the version that is installed on the host",
            fault="F20",
        )
    return tuple(int(part) for part in found.groups())

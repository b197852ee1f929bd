"""What can be injected into a server on purpose, and how it is written: FAULT[:key=value[,key=value]].

Imports no torch: the command line and the front check it before an engine process starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.engine.errors import SlipstreamError

# Fault -> kind -> what it does. The first kind is the one meant when none is named.
INJECTABLE: Mapping[str, Mapping[str, str]] = {
    "F3": {
        "order": "the first two captured slots are handed out under each other's name",
        "features": "the draft reads its features in another order; the captured states are right",
    },
    "F5": {
        "partial": "the stream before the all-reduce of its last addend (slot 0: the vocab-parallel embedding)",
        "no-residual": "the block's output, not added to the residual stream",
        "normed": "the stream after the norm that the next layer begins with",
    },
    "F6": {
        "stale": "a round hands out what the round before it captured, of the same shape",
        "frozen": "every round hands out what the first one captured, of the same shape",
    },
    "F19": {
        "feedback": "the draft is fed back the normed state in place of the one before the norm, or the other way",
        "rope": "the draft's rope position is not advanced from step 2 on",
        "draft-kv": "the draft's keys of its own drafts are kept, not made again from the target's states",
    },
}
KEYS = {"F3": {"kind"}, "F5": {"kind", "slot", "rank"}, "F6": {"kind", "slot", "rank"}, "F19": {"kind"}}
# Named in the table of faults, and nothing that a server does.
NOT_IN_A_SERVER = {"F19:kind=untrained": "train such a draft instead: training.num_steps: 1, and serve it with K > 1"}


class UnknownInjection(SlipstreamError):
    """A fault that cannot be injected: a wrong command line."""

    exit_code = 2


@dataclass(frozen=True)
class Injection:
    """One fault: `slot` and `rank` narrow it down, None is every one."""

    fault: str
    kind: str
    slot: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        words = {"slot": self.slot, "rank": self.rank, "kind": self.kind}
        return f"{self.fault}:" + ",".join(f"{key}={value}" for key, value in words.items() if value is not None)

    def contradicts(self, other: "Injection") -> bool:
        """Whether both bend the same: all kinds of F5 or F6 the states of a slot, each kind of the others its own."""
        if self.fault != other.fault:
            return False
        same = [a is None or b is None or a == b for a, b in ((self.slot, other.slot), (self.rank, other.rank))]
        return all(same) and (self.kind == other.kind or "slot" in KEYS[self.fault])

    @property
    def meaning(self) -> str:
        return INJECTABLE[self.fault][self.kind]


def parse_injection(text: str) -> Injection:
    """`F5:slot=0,kind=partial` and the like. Raises UnknownInjection, which lists what there is."""
    fault, _, rest = text.strip().partition(":")
    if fault not in INJECTABLE:
        raise _unknown(text, f"there is no {fault or 'fault'} to inject")
    values: dict[str, str] = {}
    for pair in rest.split(",") if rest else []:
        key, equals, value = pair.partition("=")
        if not equals or key not in KEYS[fault]:
            raise _unknown(text, f"{pair!r} says nothing of {fault}, which knows {', '.join(sorted(KEYS[fault]))}")
        if key in values:
            raise _unknown(text, f"{key} is given twice")
        values[key] = value
    values.setdefault("kind", next(iter(INJECTABLE[fault])))
    if values["kind"] not in INJECTABLE[fault]:
        hint = NOT_IN_A_SERVER.get(f"{fault}:kind={values['kind']}", "")
        raise _unknown(text, f"{fault} has no kind {values['kind']!r}" + (f": {hint}" if hint else ""))
    numbers: dict[str, int | None] = {"slot": None, "rank": None}
    for key in numbers.keys() & values.keys():
        if not values[key].isdecimal():
            raise _unknown(text, f"{key} is {values[key]!r}, no number")
        numbers[key] = int(values[key])
    if fault == "F5" and numbers["slot"] is None:
        raise _unknown(text, "F5 is about one slot: name it, as F5:slot=0")
    return Injection(fault, values["kind"], **numbers)


def parse_injections(texts: Sequence[str]) -> tuple[Injection, ...]:
    """Several. Raises UnknownInjection, also where two bend the same thing: names swapped twice are right again."""
    injections: list[Injection] = []
    for text in texts:
        new = parse_injection(text)
        for old in injections:
            if new.contradicts(old):
                raise _unknown(text, f"{old} is injected already, and it bends the same")
        injections.append(new)
    return tuple(injections)


def injectable() -> str:
    """Everything that can be injected, a line each."""
    lines = []
    for fault, kinds in INJECTABLE.items():
        keys = ",".join(f"{key}=..." for key in sorted(KEYS[fault] - {"kind"}, reverse=True))
        lines += [f"{fault}:{keys + ',' if keys else ''}kind={kind}  {meaning}" for kind, meaning in kinds.items()]
    return "\n    ".join(lines)


def _unknown(text: str, why: str) -> UnknownInjection:
    return UnknownInjection(
        f"--inject {text}: {why}",
        expected=f"one of\n    {injectable()}",
        do="correct --inject; it may be given several times",
    )

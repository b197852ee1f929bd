"""Acceptance: what is counted while serving, and what held-out data predict for it.

Both go through `AcceptanceCounts.add`, so that a predicted figure and a served one leave out the same rounds.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


def usable_steps(num_steps: int, tokens_left: int) -> int:
    """Drafts that a round may still propose when the request may take `tokens_left` more tokens.

    The bonus token needs one of them, so the last round proposes one less than what is left.
    """
    return max(0, min(num_steps, tokens_left - 1))


def round_kind(clamped: bool, ends_request: bool) -> Literal["counted", "ended", "clamped"]:
    """The rule for what is left out of rounds, tokens and A_k alike: rounds that end a request or propose fewer than K.

    Args:
        clamped: the round proposed fewer than K drafts.
        ends_request: the round committed the request's last token.
    """
    if ends_request:
        return "ended"
    return "clamped" if clamped else "counted"


@dataclass(frozen=True)
class JointAcceptance:
    """A_k: `hits` of `rounds` rounds had their first `step` drafts all accepted."""

    step: int
    hits: int
    rounds: int

    @property
    def rate(self) -> float:
        return self.hits / self.rounds if self.rounds else math.nan

    @property
    def standard_error(self) -> float:
        """Binomial, in the unit of `rate`; NaN without rounds."""
        return math.sqrt(self.rate * (1 - self.rate) / self.rounds) if self.rounds else math.nan


@dataclass
class AcceptanceCounts:
    """Rounds of one K, counted by how many drafts were accepted.

    histogram[a] = counted rounds that accepted a drafts, a = 0..K. `ended` and `clamped` are the rounds left out.
    """

    num_steps: int
    histogram: list[int] = field(default_factory=list)
    ended: int = 0
    clamped: int = 0

    def __post_init__(self) -> None:
        if self.num_steps < 0:
            raise ValueError(f"num_steps is {self.num_steps}; it must be 0 or more")
        self.histogram = self.histogram or [0] * (self.num_steps + 1)
        if len(self.histogram) != self.num_steps + 1:
            raise ValueError(f"a histogram for K = {self.num_steps} has {self.num_steps + 1} entries: {self.histogram}")

    def add(self, accepted: int, clamped: bool = False, ends_request: bool = False) -> None:
        """Count one round.

        Args:
            accepted: accepted drafts, 0..K.
            clamped: the round proposed fewer than K drafts.
            ends_request: the round committed the request's last token.
        """
        if not 0 <= accepted <= self.num_steps:
            raise ValueError(f"{accepted} drafts accepted in a round of K = {self.num_steps}")
        kind = round_kind(clamped, ends_request)
        if kind == "counted":
            self.histogram[accepted] += 1
        elif kind == "ended":
            self.ended += 1
        else:
            self.clamped += 1

    def merge(self, other: "AcceptanceCounts") -> None:
        """Add the rounds of `other`; ValueError when its K differs, for accept lengths of different K do not add."""
        if other.num_steps != self.num_steps:
            raise ValueError(f"counts of K = {self.num_steps} and K = {other.num_steps} do not add")
        self.histogram = [mine + theirs for mine, theirs in zip(self.histogram, other.histogram, strict=True)]
        self.ended += other.ended
        self.clamped += other.clamped

    def since(self, earlier: "AcceptanceCounts") -> "AcceptanceCounts":
        """The rounds counted after `earlier`, an older look at these counts; ValueError when its K differs."""
        if earlier.num_steps != self.num_steps:
            raise ValueError(f"counts of K = {self.num_steps} were not counts of K = {earlier.num_steps} before")
        histogram = [now - then for now, then in zip(self.histogram, earlier.histogram, strict=True)]
        return AcceptanceCounts(self.num_steps, histogram, self.ended - earlier.ended, self.clamped - earlier.clamped)

    @property
    def rounds(self) -> int:
        return sum(self.histogram)

    @property
    def left_out(self) -> int:
        return self.ended + self.clamped

    @property
    def accepted(self) -> int:
        """Accepted drafts."""
        return sum(a * n for a, n in enumerate(self.histogram))

    @property
    def tokens(self) -> int:
        """Committed tokens, the bonus token of each round included."""
        return self.rounds + self.accepted

    @property
    def accept_length(self) -> float:
        """tokens / rounds: floor 1, ceiling K + 1; NaN without rounds."""
        return self.tokens / self.rounds if self.rounds else math.nan

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / proposed drafts; NaN when none was proposed."""
        return self.accepted / (self.num_steps * self.rounds) if self.num_steps and self.rounds else math.nan

    @property
    def joint(self) -> tuple[JointAcceptance, ...]:
        """A_1 .. A_K; accept length = 1 + their sum."""
        steps = range(1, self.num_steps + 1)
        return tuple(JointAcceptance(k, sum(self.histogram[k:]), self.rounds) for k in steps)

    @property
    def conditional(self) -> tuple[float, ...]:
        """a_k = A_k / A_(k-1) with A_0 = 1; NaN where no round got that far."""
        reached = [sum(self.histogram[k:]) for k in range(self.num_steps + 1)]
        return tuple(reached[k] / reached[k - 1] if reached[k - 1] else math.nan for k in range(1, len(reached)))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; figures that do not exist (no rounds) are null."""
        return {
            "num_steps": self.num_steps,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "accept_length": _number(self.accept_length),
            "ceiling": self.num_steps + 1,
            "acceptance_rate": _number(self.acceptance_rate),
            "joint": [
                {
                    "step": j.step,
                    "hits": j.hits,
                    "rounds": j.rounds,
                    "rate": _number(j.rate),
                    "standard_error": _number(j.standard_error),
                }
                for j in self.joint
            ],
            "conditional": [_number(a) for a in self.conditional],
            "histogram": list(self.histogram),
            "rounds_left_out": {"ended": self.ended, "clamped": self.clamped},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "AcceptanceCounts":
        """Inverse of `to_dict`; derived figures in `data` are computed anew."""
        out = data["rounds_left_out"]
        return cls(data["num_steps"], list(data["histogram"]), ended=out["ended"], clamped=out["clamped"])


@dataclass(frozen=True)
class ConversationRuns:
    """Run lengths of one answer.

    lengths: L_t for slots t from the first that serving drafts at (position prompt_len - 1) to the last whose next
        token is known: L_t drafts in a row from slot t equal the target's tokens.
    ended_by_limit: the answer was cut by a length limit (serving then clamps K near it), or the data were cut; false
        when it ended with a stop token, which serving cannot foresee, so that K is never clamped.
    """

    lengths: Sequence[int]
    ended_by_limit: bool = True


def run_lengths_to_tau(
    conversations: Iterable[ConversationRuns | Sequence[int]], num_steps: int, measured_steps: int | None = None
) -> AcceptanceCounts:
    """Replay serving over run lengths: start at the first slot, advance by min(L_t, K) + 1.

    Args:
        conversations: one an answer; a plain sequence stands for an answer cut by a limit.
        num_steps: K.
        measured_steps: how many draft steps the run lengths were measured with, where that is known.

    Returns:
        Counts of the replayed rounds; their accept length is the replayed tau(K).

    Raises ValueError when K exceeds `measured_steps`: run lengths were then cut too early and tau would be too low.
    """
    if measured_steps is not None and num_steps > measured_steps:
        raise ValueError(
            f"run lengths were measured with {measured_steps} draft steps and say nothing of K = {num_steps}"
        )
    counts = AcceptanceCounts(num_steps)
    for item in conversations:
        runs = item if isinstance(item, ConversationRuns) else ConversationRuns(item)
        slot = 0
        while slot < len(runs.lengths):
            tokens_left = len(runs.lengths) - slot
            proposed = usable_steps(num_steps, tokens_left) if runs.ended_by_limit else num_steps
            accepted = min(int(runs.lengths[slot]), proposed)
            ends = accepted + 1 >= tokens_left
            counts.add(accepted, clamped=proposed < num_steps, ends_request=ends)
            slot += accepted + 1
    return counts


@dataclass(frozen=True)
class StepComparison:
    """A_k replayed against served; `standard_error` is that of their difference under equal true rates."""

    replayed: JointAcceptance
    served: JointAcceptance

    @property
    def difference(self) -> float:
        return self.replayed.rate - self.served.rate

    @property
    def standard_error(self) -> float:
        total = self.replayed.rounds + self.served.rounds
        pooled = (self.replayed.hits + self.served.hits) / total
        return math.sqrt(pooled * (1 - pooled) * (1 / self.replayed.rounds + 1 / self.served.rounds))

    @property
    def deviation(self) -> float:
        """Difference in standard errors; 0 when both rates are 0 or both are 1."""
        return abs(self.difference) / self.standard_error if self.standard_error else 0.0


@dataclass(frozen=True)
class AcceptanceComparison:
    """Replayed against served counts of one K.

    relative_gap: |replayed - served| / served of accept length - 1 (infinite when only served accepted nothing).
    """

    replayed: AcceptanceCounts
    served: AcceptanceCounts
    steps: tuple[StepComparison, ...]
    relative_gap: float
    max_gap: float
    max_deviation: float

    @property
    def agrees(self) -> bool:
        return self.relative_gap <= self.max_gap and self.first_difference is None

    @property
    def first_difference(self) -> int | None:
        """The first k whose A_k are further apart than allowed."""
        return next((s.served.step for s in self.steps if s.deviation > self.max_deviation), None)

    def describe(self) -> str:
        """One line for the accept lengths, one for each A_k with its counts."""
        lines = [
            f"K = {self.served.num_steps}: accept length replayed {self.replayed.accept_length:.3f}, "
            f"served {self.served.accept_length:.3f}, gap {self.relative_gap:.1%} (at most {self.max_gap:.0%}); "
            f"rounds left out {self.replayed.left_out} and {self.served.left_out}"
        ]
        for step in self.steps:
            ours, theirs = step.replayed, step.served
            lines.append(
                f"  A_{theirs.step}: replayed {ours.rate:.3f} ({ours.hits}/{ours.rounds}), "
                f"served {theirs.rate:.3f} ({theirs.hits}/{theirs.rounds}), "
                f"{step.deviation:.1f} standard errors apart (at most {self.max_deviation:g})"
            )
        return "\n".join(lines)


def compare(
    replayed: AcceptanceCounts, served: AcceptanceCounts, max_gap: float = 0.1, max_deviation: float = 3.0
) -> AcceptanceComparison:
    """Hold a prediction against what was served.

    Args:
        replayed, served: counts of the same K.
        max_gap: allowed `relative_gap`.
        max_deviation: allowed difference of each A_k, in standard errors.

    Raises ValueError when K differs or either side counted no round.
    """
    if replayed.num_steps != served.num_steps:
        raise ValueError(
            f"replayed K = {replayed.num_steps} against served K = {served.num_steps}: compare equal K only"
        )
    if not replayed.rounds or not served.rounds:
        raise ValueError(f"nothing to compare: {replayed.rounds} rounds replayed, {served.rounds} served")
    expected, actual = replayed.accept_length - 1, served.accept_length - 1
    gap = abs(expected - actual) / actual if actual else (math.inf if expected else 0.0)
    steps = tuple(StepComparison(r, s) for r, s in zip(replayed.joint, served.joint, strict=True))
    return AcceptanceComparison(replayed, served, steps, gap, max_gap, max_deviation)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value

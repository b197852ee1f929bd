"""What a round costs and which of its terms loses: measured milliseconds in, words out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from slipstream.engine.speed_forecast import RoundCosts, SpeedOption, needed_conditional
from slipstream.tasks.statistics import fitted_line

Term = Literal["draft", "verify", "rest", "acceptance"]


@dataclass(frozen=True)
class RoundTime:
    """Milliseconds of a round of K, from an engine's counters, over `rounds` rounds. At K = 0 a round is a plain step.

    A round is that of a batch: it takes as long for each of its requests.
    """

    num_steps: int
    draft_ms: float
    verify_ms: float
    rest_ms: float
    rounds: int

    @property
    def total_ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.rest_ms


def round_time(num_steps: int, seconds: Mapping[str, float], rounds: int) -> RoundTime:
    """From seconds by part (draft, verify, rest) and the rounds of the same time. Raises ValueError without rounds."""
    if not rounds:
        raise ValueError(f"no round of K = {num_steps} was measured")
    parts = {part: 1000 * seconds[part] / rounds for part in ("draft", "verify", "rest")}
    return RoundTime(num_steps, parts["draft"], parts["verify"], parts["rest"], rounds)


def costs_of(times: Sequence[RoundTime]) -> RoundCosts:
    """The costs of every K, from one or more measurements of each, K = 0 among them.

    Verify is taken as measured at each width. Drafting grows by the same time a step, so a line through all K is less
    noisy than differences. What is left of a round does not depend on K.
    Raises ValueError when K = 0 was not measured.
    """
    plain = [time.total_ms for time in times if time.num_steps == 0]
    rounds = [time for time in times if time.num_steps > 0]
    if not plain:
        raise ValueError("no plain step was measured")
    if not rounds:
        return RoundCosts(median(plain), {}, (), 0.0)
    start, step = fitted_line([time.num_steps for time in rounds], [time.draft_ms for time in rounds])
    step = max(step, 0.0)
    verify_ms = {
        k + 1: median(time.verify_ms for time in rounds if time.num_steps == k) for k in {t.num_steps for t in rounds}
    }
    draft_ms = [max(start + step, 0.0), *[step] * (max(time.num_steps for time in rounds) - 1)]
    return RoundCosts(median(plain), verify_ms, draft_ms, max(median(time.rest_ms for time in rounds), 0.0))


@dataclass(frozen=True)
class LosingTerm:
    """Why speculation does not win at this K: the term, and a sentence with its figures."""

    term: Term
    why: str


def losing_term(option: SpeedOption, replayed: float | None = None) -> LosingTerm:
    """Names the term that speculation loses by.

    Args:
        option: measured cost and accept length of a K > 0 that is slower than no speculation.
        replayed: accept length that held-out data predict, where known.

    A cost loses when the break-even length is above the ceiling, or when speculation would win without it. Acceptance
    loses when the replayed length would have won and the served one does not, and when no single cost is to blame.
    """
    name, ms = option.dearest_term
    term: Term = "draft" if name == "draft" else "verify" if name == "verify" else "rest"
    length, needed, ceiling = option.accept_length, option.break_even, option.ceiling
    if needed > ceiling:
        return LosingTerm(
            term,
            f"{term}: {ms:.1f} ms a round beyond a plain step of {option.plain_step_ms:.1f} ms. Break-even is "
            f"{needed:.2f}, the ceiling at K = {option.num_steps} is {ceiling}: no draft can win at this K",
        )
    if replayed is not None and replayed > needed > length:
        return LosingTerm(
            "acceptance",
            f"acceptance: served {length:.2f}, replayed {replayed:.2f}, break-even {needed:.2f}. The replayed length "
            "would win, so what is served is not what was trained: look at parity",
        )
    without = (option.round_ms - ms) / option.plain_step_ms
    if length > without:
        return LosingTerm(
            term,
            f"{term}: {ms:.1f} ms a round beyond a plain step of {option.plain_step_ms:.1f} ms lift the break-even "
            f"length to {needed:.2f}; without them it is {without:.2f}, and accept length {length:.2f} would win",
        )
    conditional = needed_conditional(needed, option.num_steps)
    wanted = "" if conditional is None else f"; a conditional acceptance above {conditional:.2f} would reach it"
    return LosingTerm(
        "acceptance", f"acceptance: accept length {length:.2f} of {ceiling}, break-even {needed:.2f}{wanted}"
    )


def option_dict(option: SpeedOption) -> dict[str, Any]:
    """One K for JSON, derived figures included."""
    return {
        "num_steps": option.num_steps,
        "accept_length": option.accept_length,
        "ceiling": option.ceiling,
        "draft_ms": option.draft_ms,
        "verify_ms": option.verify_ms,
        "rest_ms": option.rest_ms,
        "round_ms": option.round_ms,
        "plain_step_ms": option.plain_step_ms,
        "break_even": option.break_even,
        "tokens_per_second": option.tokens_per_second,
        "speedup": option.speedup,
        "verdict": option.verdict,
    }

"""Two runs held against each other: by A_k and their sums, never by a rate, whose denominator holds K."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from slipstream.tasks.explain_log.run_figures import Run

Verdict = Literal["improved", "worse", "not shown to be improved"]
STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class Bounds:
    """What is known of a sum of A_1 .. A_k. counted: a figure, not a range."""

    low: float
    high: float
    counted: bool

    def __str__(self) -> str:
        return f"{self.low:.2f}" if self.counted else f"between {self.low:.2f} and {self.high:.2f}"


@dataclass(frozen=True)
class Comparison:
    """first_steps: drafts that both runs proposed. before, after: sum of their A_k. margin: what chance alone may make
    of a difference; None when no error is known. reasons: sentences for people."""

    names: tuple[str, str]
    verdict: Verdict
    first_steps: int
    before: Bounds
    after: Bounds
    margin: float | None
    reasons: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def partial_sum(run: Run, steps: int) -> Bounds:
    """A_1 + .. + A_steps of a run of K >= steps. Where only their sum over all K is known: A_k never rises with k, so
    the first k hold at least their share of it, and at most all of it."""
    assert run.num_steps is not None
    if run.joint is not None and len(run.joint) >= steps:
        total = sum(run.joint[:steps])
        return Bounds(total, total, True)
    if run.num_steps == steps:
        return Bounds(run.sum_joint, run.sum_joint, True)
    return Bounds(run.sum_joint * steps / run.num_steps, min(run.sum_joint, float(steps)), False)


def compare(before: Run, after: Run) -> Comparison | None:
    """Whether the second run's drafts are better than the first's; None where a K is not known."""
    if not before.num_steps or not after.num_steps:
        return None
    steps = min(before.num_steps, after.num_steps)
    first, second = partial_sum(before, steps), partial_sum(after, steps)
    margin = _margin(before, after)
    verdict: Verdict = "not shown to be improved"
    if margin is not None and second.low - first.high > margin:
        verdict = "improved"
    elif margin is not None and first.low - second.high > margin:
        verdict = "worse"
    reasons = (
        _of_sums(before, after, steps, first, second),
        _of_chance(before, after, margin),
        *_of_rates(before, after),
        *_of_more_steps(before, after),
        *_of_speed(before, after),
    )
    return Comparison((before.name, after.name), verdict, steps, first, second, margin, tuple(r for r in reasons if r))


def _margin(before: Run, after: Run) -> float | None:
    errors = (before.standard_error, after.standard_error)
    if None in errors:
        return None
    return STANDARD_ERRORS * math.hypot(*(error for error in errors if error is not None))


def _of_sums(before: Run, after: Run, steps: int, first: Bounds, second: Bounds) -> str:
    """The figures that decide."""
    was, now = (f"{run.accept_length:.2f} of {run.ceiling}" for run in (before, after))
    which = "A_1" if steps == 1 else f"A_1 + .. + A_{steps}"
    both = (
        "of the first draft, which both propose" if steps == 1 else f"of the {steps} first drafts, which both propose"
    )
    told = f"accept length {was} -> {now}; {both}, {which} is {first}, then {second}"
    if not (first.counted and second.counted):
        told += " (the rest is not in a mean length: a histogram or counts per position would tell)"
    return told


def _of_chance(before: Run, after: Run, margin: float | None) -> str:
    """How sure the figures are."""
    behind = " and ".join(
        "an unknown number of rounds" if run.rounds is None else f"about {run.rounds:.0f} rounds"
        for run in (before, after)
    )
    if margin is None:
        return f"{behind} are behind them, and no error of the means is known: no difference can be shown to be one"
    return (
        f"{behind} are behind them; a difference below {margin:.2f} may be chance ({STANDARD_ERRORS:g} standard errors)"
    )


def _of_rates(before: Run, after: Run) -> list[str]:
    """Why rates of different K say nothing."""
    if before.num_steps == after.num_steps or before.acceptance_rate is None or after.acceptance_rate is None:
        return []
    rates = f"accepted / proposed {before.acceptance_rate:.0%} -> {after.acceptance_rate:.0%}"
    if before.rate_printed is not None and after.rate_printed is not None:
        rates += f" and the printed rate {before.rate_printed:.0%} -> {after.rate_printed:.0%}"
    told = f"{rates} compare nothing: the denominator went from K = {before.num_steps} to {after.num_steps}"
    short, long = _by_steps(before, after)
    assert long.num_steps
    which = "first" if short is before else "second"
    share = short.sum_joint / long.num_steps
    return [
        f"{told}; the {which} run's {short.sum_joint:.2f} accepted drafts over K = {long.num_steps} are {share:.0%}"
    ]


def _by_steps(before: Run, after: Run) -> tuple[Run, Run]:
    """The run of the shorter chain, and that of the longer one."""
    return (before, after) if (before.num_steps or 0) <= (after.num_steps or 0) else (after, before)


def _of_more_steps(before: Run, after: Run) -> list[str]:
    """What the further steps of the longer chain won, if only K differs."""
    short, long = _by_steps(before, after)
    assert short.num_steps is not None
    assert long.num_steps is not None
    if short.num_steps == long.num_steps:
        return []
    won = long.sum_joint - short.sum_joint
    steps = f"{short.num_steps + 1} to {long.num_steps}"
    return [f"if draft, wiring and traffic were the same, steps {steps} together would add {won:.2f} tokens a round"]


def _of_speed(before: Run, after: Run) -> list[str]:
    """Where a change of speed came from: speed = length / round."""
    old, new = before.tokens_per_second, after.tokens_per_second
    if old is None or new is None or before.round_ms is None or after.round_ms is None:
        return []
    if before.running != after.running:
        return [f"speeds are not compared: {before.running} running, then {after.running}"]
    lengths, rounds = after.accept_length / before.accept_length, before.round_ms / after.round_ms
    return [
        f"{old:.1f} -> {new:.1f} tok/s ({new / old:.2f}x) = {lengths:.2f}x by accept length and {rounds:.2f}x by the "
        f"round ({before.round_ms:.1f} -> {after.round_ms:.1f} ms)"
    ]

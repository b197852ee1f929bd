"""Why a run is slower than hoped: expectation, flags, wiring, round cost; each with its number, in tokens a round.

With a stated accuracy p, where R(K) = 1 + p + ... + p^K, and break-even B:

    hoped - served = (p/(1-p) - R(K asked)) + (R(K asked) - R(K)) + (R(K) - served)     expectation, flags, wiring
    B - served     = (B - R(K)) + (R(K) - served)                                       round cost, wiring

so the numbers of a run add up, and none of them is an opinion.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.engine.speed_forecast import chain_accept_length
from slipstream.tasks.explain_log.observed import PRINTED_HALF_UNIT
from slipstream.tasks.explain_log.run_figures import Run

BROKEN = 1.05  # accept length below which a draft is not weak but out of work
LENGTH_RUNBOOK, SPEED_RUNBOOK = "accept-length-low.md", "slower-than-baseline.md"


@dataclass(frozen=True)
class Explanation:
    """tokens: what it explains of a round, 0 or less for nothing; None when the file cannot tell. proven: the file
    itself proves it, whatever the draft is worth."""

    name: str
    tokens: float | None
    proven: bool
    told: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Undecided:
    """What no log can tell, and what can."""

    what: str
    why: str
    how: str


UNDECIDED = (
    Undecided(
        "slots: which layers were captured, in which order, with which +1 of the engine",
        "any three states are equally wide, and the draft runs on all of them",
        "slipstream plan CONFIG compares names; slipstream parity CONFIG measures each slot against all N + 1 states",
    ),
    Undecided(
        "partial sums: a state taken before the all-reduce, or on one rank only",
        "the target's tokens stay right, and no line is printed",
        "slipstream parity CONFIG with the same tensor-parallel size",
    ),
    Undecided(
        "a stale or missing capture under CUDA graphs",
        "the draft reads the state of another step, and acceptance alone falls",
        "slipstream parity CONFIG: inputs A, B, A, each capture held against the eager one",
    ),
    Undecided(
        "the draft's own recurrence: the state it feeds back, positions, its KV after a rejection",
        "it shows only in A_k of k > 1, which a mean length does not hold",
        "slipstream parity CONFIG compares draft logits for each k",
    ),
    Undecided(
        "the draft itself, or prompts unlike those it was trained on",
        "a stated accuracy is of its own held-out data, teacher-forced",
        "slipstream stage train CONFIG replays held-out answers, slipstream bench CONFIG holds them against serving",
    ),
)


def ranked(run: Run) -> list[Explanation]:
    """The four. What is proven comes first, flags before the cost that they cause; then by tokens, the unknown last."""
    made = [_flags(run), _round_cost(run), _wiring(run), _expectation(run)]
    proven = [item for item in made if item.proven]
    rest = [item for item in made if not item.proven]
    return proven + sorted(rest, key=lambda item: -math.inf if item.tokens is None else item.tokens, reverse=True)


def verdict(run: Run) -> str:
    """What the file proves of the run, in a sentence."""
    if run.num_steps is None or run.ceiling is None:
        return f"accept length {run.accept_length:.2f}; K is not known, so neither a ceiling nor a verdict is given"
    length = f"accept length {run.accept_length:.2f} of {run.ceiling}"
    if run.break_even is None or run.speedup is None:
        missing = "no speed is in the file" if run.round_ms is None else "no baseline is stated (--baseline-tok-s)"
        return f"{length}; {missing}, so break-even is not known"
    need = f"{length}, break-even {run.break_even:.2f}"
    if not run.can_win:
        return (
            f"no draft could have won at K = {run.num_steps}: break-even {run.break_even:.2f} is above the ceiling "
            f"{run.ceiling}; a draft that is always right would reach {run.perfect_tokens_per_second:.1f} of "
            f"{run.baseline:g} tok/s"
        )
    if run.speedup < 1:
        assert run.plain_step_ms is not None
        return (
            f"slower than no speculation ({run.speedup:.2f}x): {need}; {run.break_even - run.accept_length:.2f} tokens "
            f"a round are missing, or the round must fall from {run.round_ms:.1f} to "
            f"{run.accept_length * run.plain_step_ms:.1f} ms"
        )
    return f"faster than no speculation ({run.speedup:.2f}x): {need}"


def _expectation(run: Run) -> Explanation:
    name = "expectation"
    if run.accuracy is None:
        return Explanation(name, None, False, "none is stated; --accuracy P holds the run against a projection from P")
    p, caveat = run.accuracy, "teacher-forced first-step accuracy is not what serving accepts"
    hoped = endless(p)
    k = asked_steps(run)
    if k is None or hoped is None:
        return Explanation(name, None, False, f"K is not known, so P = {p:.1%} projects nothing; {caveat}")
    right = chain_accept_length(p, k)
    direction = "too much" if hoped > right else "too little: it hid what was lost"
    told = (
        f"p/(1-p) = {hoped:.2f} holds for an endless chain without bonus token; the right form 1 + sum p^k gives "
        f"{right:.2f} at K = {k}"
    )
    if run.num_steps != k and run.projected is not None:
        told += f" as asked, {run.projected:.2f} at the K = {run.num_steps} in force"
    return Explanation(name, hoped - right, False, f"{told}; it promised {direction}. And {caveat}")


def _flags(run: Run) -> Explanation:
    name, asked, width = "flags", run.asked.verify_width, run.verify_width
    if run.effective.algorithm == "EAGLE" and abs(run.accept_length - 1) < PRINTED_HALF_UNIT:
        told = "algorithm EAGLE and accept length 1.00: what an EAGLE-3 head gives there, no state is captured for it"
        return Explanation(name, None, True, told)
    if asked is None or width is None or run.num_steps is None:
        if run.asked.known or width is None:
            return Explanation(name, None, False, "asked and in force cannot be compared from this file")
        if run.width_adjusted:
            return Explanation(
                name, None, True, f"the server changed the width; {width} is in force, asked is not printed"
            )
        return Explanation(name, None, False, "what was asked for is not in the file; compare it with what is in force")
    if asked == width:
        return Explanation(name, 0.0, False, f"none: width {width} was asked for and is in force")
    told = (
        f"verify width {asked} was asked for, {width} is in force: K = {asked - 1} became {run.num_steps}, the ceiling "
    )
    told += f"{asked} became {run.ceiling}"
    if run.tree:
        return Explanation(name, None, True, told)
    if run.asked.num_steps is not None and run.asked.num_steps + 1 != asked:
        told += f"; the line contradicts itself: steps {run.asked.num_steps} with topk 1 give width "
        told += f"{run.asked.num_steps + 1}"
    if run.accuracy is None:
        return Explanation(name, None, True, told)
    tokens = chain_accept_length(run.accuracy, asked - 1) - chain_accept_length(run.accuracy, run.num_steps)
    return Explanation(name, tokens, True, told)


def _wiring(run: Run) -> Explanation:
    name = "wiring"
    if run.accept_length < BROKEN:
        told = (
            f"accept length {run.accept_length:.2f}: next to nothing is ever accepted, so the draft does not do its "
            "work at all: tensors of another name, a missing head, or algorithm EAGLE for an EAGLE-3 head"
        )
        return Explanation(name, None if run.projected is None else run.projected - run.accept_length, True, told)
    if run.projected is None:
        constant = run.constant_conditional
        like = (
            ""
            if constant is None
            else f"{run.accept_length:.2f} is what a constant acceptance of {constant:.2f} gives; "
        )
        return Explanation(name, None, False, f"{like}nothing is stated to hold it against (--accuracy)")
    gap = run.projected - run.accept_length
    told = (
        f"served {run.accept_length:.2f} where P = {run.accuracy:.1%} at every step would give {run.projected:.2f}"
        f" (needs {run.constant_conditional:.2f} only)"
        if run.constant_conditional is not None
        else f"served {run.accept_length:.2f} where P would give {run.projected:.2f}"
    )
    return Explanation(
        name, gap, False, f"{told}: wrong states, order, recurrence, or a draft that is worth less than P"
    )


def _round_cost(run: Run) -> Explanation:
    name = "round cost"
    if run.break_even is None or run.round_ms is None or run.plain_step_ms is None or run.ceiling is None:
        return Explanation(name, None, False, "needs a speed in the file, K, and --baseline-tok-s")
    told = (
        f"{run.round_ms:.1f} ms a round, {run.round_ms - run.plain_step_ms:.1f} beyond a plain step of "
        f"{run.plain_step_ms:.1f}: break-even {run.break_even:.2f} of {run.ceiling}, a draft that is always right "
        f"would reach {run.perfect_tokens_per_second:.0f} tok/s"
    )
    if not run.can_win:
        told += ": no draft can win at this K"
    if run.projected is not None:
        at = run.projected / run.break_even
        told += f"; with P it would be {at:.2f}x"
        return Explanation(name, run.break_even - run.projected, not run.can_win, told)
    reach = run.accept_length if run.can_win else float(run.ceiling)
    if run.can_win and run.break_even > reach:
        told += "; a better draft or a cheaper round: without --accuracy the two cannot be told apart"
    return Explanation(name, run.break_even - reach, not run.can_win, told)


def endless(accuracy: float) -> float | None:
    """p / (1 - p), the projection that is shown to be wrong; None at p = 1."""
    return accuracy / (1 - accuracy) if accuracy < 1 else None


def asked_steps(run: Run) -> int | None:
    """K as asked for by the width; K in force where nothing else was asked."""
    return run.asked.verify_width - 1 if run.asked.verify_width else run.num_steps

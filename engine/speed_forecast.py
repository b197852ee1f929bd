"""What acceptance is worth: round cost, break-even length, and the K to serve with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.engine.errors import SlipstreamError


def break_even(round_ms: float, plain_step_ms: float) -> float:
    """Accept length at which a round is worth its price: milliseconds a round / milliseconds a plain step."""
    return round_ms / plain_step_ms


def chain_accept_length(conditional: float, num_steps: int) -> float:
    """Accept length of a chain whose every conditional acceptance is `conditional`: 1 + p + p^2 + ... + p^K."""
    return 1 + sum(conditional**k for k in range(1, num_steps + 1))


def needed_conditional(accept_length: float, num_steps: int) -> float | None:
    """Constant conditional acceptance that gives `accept_length` with K drafts; None when it exceeds the ceiling."""
    if accept_length > num_steps + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_accept_length(middle, num_steps) < accept_length else (low, middle)
    return high


@dataclass(frozen=True)
class RoundCosts:
    """Measured costs in milliseconds.

    plain_step_ms: a decode step without speculation. verify_ms: by verify width (K + 1). draft_ms: draft_ms[k - 1] is
    draft step k of a round. rest_ms: everything else in a round (accept, commit, gaps).
    """

    plain_step_ms: float
    verify_ms: Mapping[int, float]
    draft_ms: Sequence[float]
    rest_ms: float

    def covers(self, num_steps: int) -> bool:
        """Whether a round of K was measured."""
        return num_steps == 0 or (num_steps + 1 in self.verify_ms and num_steps <= len(self.draft_ms))


@dataclass(frozen=True)
class SpeedOption:
    """Expected speed of one K. The three terms (ms) add up to `round_ms`; at K = 0 the plain step is all of it."""

    num_steps: int
    accept_length: float
    draft_ms: float
    verify_ms: float
    rest_ms: float
    plain_step_ms: float

    @property
    def round_ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.rest_ms

    @property
    def ceiling(self) -> int:
        return self.num_steps + 1

    @property
    def break_even(self) -> float:
        return break_even(self.round_ms, self.plain_step_ms)

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.accept_length / self.round_ms

    @property
    def speedup(self) -> float:
        """Against no speculation."""
        return self.accept_length / self.break_even

    @property
    def can_win(self) -> bool:
        """False when even a perfect draft would lose: break-even above the ceiling."""
        return self.break_even <= self.ceiling

    @property
    def dearest_term(self) -> tuple[str, float]:
        """Name and milliseconds of the largest part of what a round costs beyond a plain step."""
        over = {"draft": self.draft_ms, "verify": self.verify_ms - self.plain_step_ms, "rest": self.rest_ms}
        return max(over.items(), key=lambda term: term[1])

    @property
    def verdict(self) -> str:
        """One sentence for people."""
        if self.num_steps == 0:
            return "speculation off"
        name, ms = self.dearest_term
        against = f"break-even {self.break_even:.2f}, ceiling {self.ceiling}"
        cost = f"the dearest term is {name}, {ms:.1f} ms a round beyond a plain step"
        if not self.can_win:
            return f"no draft can win at this K: {against}; {cost}"
        if self.speedup <= 1:
            needed = needed_conditional(self.break_even, self.num_steps)
            return (
                f"this draft does not win at this K: accept length {self.accept_length:.2f}, {against}; "
                f"it would need a conditional acceptance above {needed:.2f}, or a cheaper round ({cost})"
            )
        return f"wins {self.speedup:.2f}x: accept length {self.accept_length:.2f}, {against}"


@dataclass(frozen=True)
class SpeedForecast:
    """options: one a K, ascending, K = 0 first."""

    options: tuple[SpeedOption, ...]

    @property
    def best(self) -> SpeedOption:
        """The fastest K; the smallest of equals."""
        return max(self.options, key=lambda option: (option.tokens_per_second, -option.num_steps))

    def at(self, num_steps: int) -> SpeedOption:
        return next(option for option in self.options if option.num_steps == num_steps)


def expected_speed(costs: RoundCosts, tau: Mapping[int, float]) -> SpeedForecast:
    """Expected speed for each K of `tau`, and K = 0.

    Args:
        costs: measured costs.
        tau: K -> replayed tau(K), K >= 1 (an entry for 0 is ignored: its accept length is 1).

    Raises SlipstreamError on a cost that is not a positive finite number, an accept length outside 1..K + 1, or a K
    whose round was not measured.
    """
    _check(costs, tau)
    options = [SpeedOption(0, 1.0, 0.0, costs.plain_step_ms, 0.0, costs.plain_step_ms)]
    for k in sorted(k for k in tau if k > 0):
        draft_ms = sum(costs.draft_ms[:k])
        options.append(SpeedOption(k, tau[k], draft_ms, costs.verify_ms[k + 1], costs.rest_ms, costs.plain_step_ms))
    return SpeedForecast(tuple(options))


def _check(costs: RoundCosts, tau: Mapping[int, float]) -> None:
    named = {"plain_step_ms": costs.plain_step_ms}
    named |= {f"verify_ms[{width}]": ms for width, ms in costs.verify_ms.items()}
    for name, ms in named.items():
        if not (math.isfinite(ms) and ms > 0):
            raise SlipstreamError(f"{name} is {ms}", expected="a positive time", do="measure the round again")
    named = {"rest_ms": costs.rest_ms} | {f"draft_ms[{i}]": ms for i, ms in enumerate(costs.draft_ms)}
    for name, ms in named.items():
        if not (math.isfinite(ms) and ms >= 0):
            raise SlipstreamError(f"{name} is {ms}", expected="a time of 0 or more", do="measure the round again")
    for k, length in tau.items():
        if not costs.covers(k):
            raise SlipstreamError(
                f"no measured round for K = {k}",
                expected=f"a verify time at width {k + 1} and {k} draft times; measured were widths "
                f"{sorted(costs.verify_ms)} and {len(costs.draft_ms)} draft steps",
                do=f"measure K = {k}, or leave it out",
            )
        if not 1 <= length <= k + 1:
            raise SlipstreamError(
                f"accept length {length} at K = {k}",
                expected=f"1 .. {k + 1}: the bonus token is counted, and a round commits at most K + 1",
                do="check by which definition the length was counted",
            )

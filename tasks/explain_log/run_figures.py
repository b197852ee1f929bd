"""The figures of one run, from what its file says: length and ceiling, A_k, milliseconds a round, break-even."""

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slipstream.engine.engine_versions import Engine
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.speed_forecast import break_even, chain_accept_length, needed_conditional
from slipstream.tasks.explain_log.observed import PRINTED_HALF_UNIT, Positions, Section, Settings, most_frequent
from slipstream.tasks.explain_log.read import ReadFile
from slipstream.tasks.explain_log.width import Width, find_width
from slipstream.tasks.other_engines.metric_definitions import RUNBOOK, accept_length_from_rate

PRINTED_SHARE = 0.001  # three decimals a line, added up
_NAMED = re.compile(r"^\s*(?:sglang|vllm)\s*[=@-]*\s*", re.IGNORECASE)  # "sglang==0.5.9"


@dataclass(frozen=True)
class Run:
    """One run. What is None is not known from the file; `refused` says why, where the file holds something near it.

    name: file. accept_length: tokens a round and request, bonus included. standard_error: of it. rounds: behind it.
    joint: A_1 .. A_K. running: requests that the speed was printed with. tokens_per_second: of one stream.
    width_adjusted: the server warned that it set another width than was asked for.
    baseline: tokens/s of one stream without speculation, as the user states it. accuracy: per-step accuracy likewise.
    """

    name: str
    engine: str
    source: str
    version: str | None
    version_from: str
    asked: Settings
    effective: Settings
    num_steps: int | None
    verify_width: int | None
    width_from: str
    width_adjusted: bool
    accept_length: float
    standard_error: float | None
    error_from: str
    rounds: float | None
    rate_printed: float | None
    rate_meaning: str
    joint: tuple[float, ...] | None
    tree: bool
    running: int | None
    tokens_per_second: float | None
    round_ms: float | None
    baseline: float | None
    accuracy: float | None
    notes: tuple[str, ...]
    refused: tuple[str, ...]

    @property
    def ceiling(self) -> int | None:
        return None if self.num_steps is None else self.num_steps + 1

    @property
    def sum_joint(self) -> float:
        """Sum of A_k: accepted drafts a round."""
        return self.accept_length - 1

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts / proposed drafts, of a chain."""
        return None if not self.num_steps or self.tree else self.sum_joint / self.num_steps

    @property
    def plain_step_ms(self) -> float | None:
        return None if self.baseline is None else 1000 / self.baseline

    @property
    def break_even(self) -> float | None:
        if self.round_ms is None or self.plain_step_ms is None:
            return None
        return break_even(self.round_ms, self.plain_step_ms)

    @property
    def speedup(self) -> float | None:
        return None if self.break_even is None else self.accept_length / self.break_even

    @property
    def can_win(self) -> bool | None:
        """False when even a draft that is always right would be slower than no speculation."""
        return None if self.break_even is None or self.ceiling is None else self.break_even <= self.ceiling

    @property
    def perfect_tokens_per_second(self) -> float | None:
        """Of a draft that is always right, at this round."""
        return None if self.round_ms is None or self.ceiling is None else 1000 * self.ceiling / self.round_ms

    @property
    def projected(self) -> float | None:
        """Accept length of a chain whose every conditional acceptance is `accuracy`: 1 + sum of p^k, k = 1..K."""
        if self.accuracy is None or self.num_steps is None or self.tree:
            return None
        return chain_accept_length(self.accuracy, self.num_steps)

    @property
    def constant_conditional(self) -> float | None:
        """The constant conditional acceptance that gives this accept length."""
        return None if self.num_steps is None else needed_conditional(self.accept_length, self.num_steps)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: fields, and what follows from them."""
        derived = (
            "ceiling", "sum_joint", "acceptance_rate", "plain_step_ms", "break_even", "speedup", "can_win",
            "perfect_tokens_per_second", "projected", "constant_conditional",
        )  # fmt: skip
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        settings = {name: vars(fields[name]) for name in ("asked", "effective")}
        return {**fields, **settings, **{name: getattr(self, name) for name in derived}}


def figures(
    read: ReadFile, *, version: str | None = None, baseline: float | None = None, accuracy: float | None = None
) -> Run:
    """The figures of a file.

    Args:
        read: the file.
        version: of its engine, as the user states it; else what the file says of itself.
        baseline: tokens/s of one stream without speculation.
        accuracy: the per-step accuracy that a projection started from, 0 to 1.

    Raises SlipstreamError (F12) when no accept length can be had by a documented definition.
    """
    section = read.section
    stated = _NAMED.sub("", version) if version else section.version
    origin = "--engine-version" if version else section.version_from
    notes = [*read.notes, *section.notes]
    width = find_width(section, stated)
    length, rounds = _length(section, stated, width)
    positions = _believed(section)
    error, error_from = _standard_error(section, positions)
    speed = _speed(section, notes)
    if section.width_adjusted:
        notes.append("the server warned that it set the width to steps + 1, without naming either value")
    if version and section.version and stated != section.version:
        notes.append(f"--engine-version says {version}, the file says {section.version}: the former is taken")
    return Run(
        name=str(read.path),
        engine=section.engine,
        source=section.source,
        version=stated,
        version_from=origin,
        asked=section.asked,
        effective=section.effective,
        num_steps=width.num_steps,
        verify_width=width.verify_width,
        width_from=width.where,
        width_adjusted=section.width_adjusted,
        accept_length=length,
        standard_error=error,
        error_from=error_from,
        rounds=rounds,
        rate_printed=section.fit.rate if section.fit.pairs else None,
        rate_meaning=_meaning(width),
        joint=_joint(positions, width.num_steps, length),
        tree=(section.effective.topk or section.asked.topk or 1) > 1,
        running=speed[0],
        tokens_per_second=speed[1],
        round_ms=speed[2],
        baseline=baseline,
        accuracy=accuracy,
        notes=tuple(dict.fromkeys([*notes, *width.notes])),
        refused=tuple(dict.fromkeys([*section.refused, *width.refused])),
    )


def _meaning(width: Width) -> str:
    """What the printed rate is, and why that is known; "" when it is refused."""
    if width.definition is None:
        return ""
    return f"{width.definition.formula}, that of {width.definition.where}: {width.definition_from}"


def _length(section: Section, version: str | None, width: Width) -> tuple[float, float | None]:
    """(accept length, rounds behind it)."""
    positions = section.positions
    if section.rounds and section.accepted is not None:
        return 1 + section.accepted / section.rounds, section.rounds
    if positions and positions.rounds:
        return 1 + positions.accepted / positions.rounds, positions.rounds
    if section.lengths.lines:
        if section.lengths.lowest < 1 - PRINTED_HALF_UNIT:
            raise SlipstreamError(
                f"a printed accept length of {section.lengths.lowest:.2f}: below 1, so the bonus token is not counted "
                "in it, and by which definition it was counted is not known",
                expected="accept lengths from 1 to K + 1",
                do="give the log of a release whose definitions are known, unpatched, or its metrics page",
                runbook=RUNBOOK,
                fault="F12",
            )
        per_line = section.log_interval if section.source == "log" and section.engine == "sglang" else None
        return section.lengths.mean, section.lengths.weight * per_line if per_line else None
    if not section.fit.pairs:
        raise SlipstreamError(
            f"the {section.source} counts {section.rounds or 0:g} rounds, and no accepted drafts",
            expected="both, as the engines print them",
            do="give the whole page or log",
            runbook=RUNBOOK,
        )
    return accept_length_from_rate(Engine.SGLANG, version, section.fit.rate, width.verify_width), None


def _believed(section: Section) -> Positions | None:
    """Counts per position, where they can be what they are called: they never rise with the position, and their sum is
    the number of accepted drafts. Else they are refused, and None."""
    positions = section.positions
    if positions is None or not positions.rounds:
        return None
    off = 2 * PRINTED_SHARE * positions.rounds if section.source == "log" else 0.0
    rising = any(later > earlier + off for earlier, later in pairwise([positions.rounds, *positions.hits]))
    same_rounds = section.source != "log" and positions.rounds == section.rounds  # counts of the very same rounds
    counted = not same_rounds or section.accepted in (None, positions.accepted)
    if counted and not rising:
        return positions
    why = "rise with the position" if rising else f"add up to {positions.accepted:g}, not to {section.accepted:g}"
    section.refuse(f"accepted drafts by position {why}: no A_k from them")
    return None


def _standard_error(section: Section, positions: Positions | None) -> tuple[float | None, str]:
    """Of the accept length: from counts of rounds, else from the scatter between printed lines."""
    if positions and positions.rounds > 1 and section.source != "log":
        shares = [hits / positions.rounds for hits in positions.hits]
        mean_square = sum((2 * k - 1) * share for k, share in enumerate(shares, start=1))
        variance = max(mean_square - sum(shares) ** 2, 0.0)
        return math.sqrt(variance / positions.rounds), "counts of rounds"
    error = section.lengths.standard_error
    return error, f"scatter between {section.lengths.lines} lines" if error is not None else ""


def _speed(section: Section, notes: list[str]) -> tuple[int | None, float | None, float | None]:
    """(running requests, tokens/s of one stream, milliseconds a round)."""
    with_prefill = sum(speed.lines for speed in section.speeds_with_prefill.values())
    common = most_frequent(section.speeds)
    if common and with_prefill:
        notes.append(f"{with_prefill} lines whose interval held a prefill or idle time are left out of the speed")
    elif not common:
        common = most_frequent(section.speeds_with_prefill)
        if common:
            notes.append("every interval may hold a prefill or idle time: a round takes at most the time given")
    if not common:
        return None, None, None
    running, speed = common
    if len(section.speeds) > 1:
        others = sum(s.lines for s in section.speeds.values()) - speed.lines
        notes.append(
            f"speed from the {speed.lines} lines with {running} running; {others} with another number are not used"
        )
    if running > 1:
        notes.append(
            f"{running} running: a round serves them all and takes as long for each, so ms a round = length x "
            f"{running} / tokens/s; the baseline must be of one stream among as many"
        )
    return running, speed.tokens_per_second, speed.round_ms


def _joint(positions: Positions | None, num_steps: int | None, length: float) -> tuple[float, ...] | None:
    """A_k where counted, and A_1 of K = 1, which is all there is of the sum. A histogram is cut at the longest run that
    occurred: A_k beyond is 0."""
    if positions is None or not positions.rounds:
        return (length - 1,) if num_steps == 1 else None
    shares = [hits / positions.rounds for hits in positions.hits]
    if num_steps is not None and len(shares) <= num_steps:
        shares += [0.0] * (num_steps - len(shares))
    return tuple(shares)

"""What a file says, gathered while it is streamed: running sums only, so that a log of gigabytes needs no memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slipstream.tasks.other_engines.metric_definitions import SGLANG_DEFINITIONS, RateDefinition

EngineName = Literal["sglang", "vllm", "slipstream"]
PRINTED_HALF_UNIT = 0.005  # two decimals
LARGEST_WIDTH = 1024  # rows a round; no engine verifies as many
DEFAULT_LOG_INTERVAL = 40  # SGLang's --decode-log-interval, in decode iterations


@dataclass
class Settings:
    """Speculation as asked for, or as in force. None where the file does not say. where: what it was read from."""

    num_steps: int | None = None
    verify_width: int | None = None
    topk: int | None = None
    algorithm: str | None = None
    adaptive: bool = False
    where: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that nobody serves with: the line is damaged."""
        if max(self.num_steps or 0, self.verify_width or 0, self.topk or 0) > LARGEST_WIDTH:
            raise ValueError(f"{self.describe()}: no such width")

    @property
    def known(self) -> bool:
        return self.num_steps is not None or self.verify_width is not None

    def describe(self) -> str:
        """`steps 1, topk 1, tokens 16`."""
        named = (("steps", self.num_steps), ("topk", self.topk), ("tokens", self.verify_width))
        return ", ".join(f"{name} {value}" for name, value in named if value is not None) or "not in the file"


@dataclass
class LengthMean:
    """Weighted mean of printed accept lengths; its error from their scatter (West's running update)."""

    lines: int = 0
    weight: float = 0.0
    mean: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf
    _squares: float = 0.0
    _weights_squared: float = 0.0

    def add(self, length: float, weight: float = 1.0) -> None:
        self.lines += 1
        self.weight += weight
        self._weights_squared += weight * weight
        step = length - self.mean
        self.mean += step * weight / self.weight
        self._squares += weight * step * (length - self.mean)
        self.lowest, self.highest = min(self.lowest, length), max(self.highest, length)

    @property
    def standard_error(self) -> float | None:
        """Of the mean, from the scatter between lines; None with fewer than three lines."""
        if self.lines < 3:
            return None
        effective = self.weight**2 / self._weights_squared
        variance = self._squares / self.weight * effective / (effective - 1)
        return math.sqrt(max(variance, 0.0) / effective)


@dataclass
class Speed:
    """Round times printed with one number of running requests."""

    lines: int = 0
    round_ms_sum: float = 0.0
    length_sum: float = 0.0

    def add(self, length: float, running: int, tokens_per_second: float) -> None:
        """tokens_per_second: of the server, all running requests together."""
        if length <= 0:  # such a length is refused elsewhere
            return
        self.lines += 1
        self.length_sum += length
        self.round_ms_sum += 1000 * length * running / tokens_per_second

    @property
    def round_ms(self) -> float:
        return self.round_ms_sum / self.lines

    @property
    def tokens_per_second(self) -> float:
        """Of one stream."""
        return 1000 * self.length_sum / self.round_ms_sum


@dataclass
class RateFit:
    """Which definitions of the printed rate fit every printed pair (length, rate), and with which widths."""

    half_unit: float = PRINTED_HALF_UNIT
    pairs: int = 0
    rate_sum: float = 0.0
    _ranges: dict[RateDefinition, tuple[float, float]] = field(default_factory=dict)

    def add(self, length: float, rate: float) -> None:
        self.pairs += 1
        self.rate_sum += rate
        for definition in SGLANG_DEFINITIONS:
            low, high = self._ranges.get(definition, (2.0, math.inf))
            here = definition.width_range(length, rate, self.half_unit)
            self._ranges[definition] = (max(low, here[0]), min(high, here[1]))

    @property
    def rate(self) -> float:
        return self.rate_sum / self.pairs

    def widths(self, definition: RateDefinition, limit: int = 256) -> list[int]:
        """Whole widths that a definition allows for all pairs; [] when it fits none of them."""
        low, high = self._ranges.get(definition, (2.0, math.inf))
        first, last = math.ceil(low - 1e-9), math.floor(min(high, limit) + 1e-9)
        return list(range(max(first, 2), last + 1))

    def fitting(self, width: int | None) -> dict[RateDefinition, list[int]]:
        """The definitions that fit, with their widths; only those that allow `width` where it is known."""
        found = {definition: self.widths(definition) for definition in SGLANG_DEFINITIONS}
        return {d: widths for d, widths in found.items() if widths and (width is None or width in widths)}


@dataclass
class Positions:
    """Rounds and, for k = 1.., in how many of them the first k drafts were all accepted."""

    rounds: float = 0.0
    hits: list[float] = field(default_factory=list)

    def add(self, rounds: float, hits: list[float]) -> None:
        self.hits += [0.0] * (len(hits) - len(self.hits))
        for k, number in enumerate(hits):
            self.hits[k] += number
        self.rounds += rounds

    @classmethod
    def of_histogram(cls, histogram: list[int]) -> "Positions":
        """histogram[a] = rounds that accepted a drafts."""
        return cls(float(sum(histogram)), [float(sum(histogram[k:])) for k in range(1, len(histogram))])

    @property
    def accepted(self) -> float:
        return sum(self.hits)


@dataclass
class Section:
    """One start of one server in a file, or one page.

    rounds, accepted: exact counts, where there are any. notes: what a reader must know. refused: figures that the file
    holds and that are not used, with the reason.
    """

    engine: EngineName
    source: str
    line: int = 1
    version: str | None = None
    version_from: str = ""
    asked: Settings = field(default_factory=Settings)
    effective: Settings = field(default_factory=Settings)
    width_adjusted: bool = False
    log_interval: int = DEFAULT_LOG_INTERVAL
    lengths: LengthMean = field(default_factory=LengthMean)
    speeds: dict[int, Speed] = field(default_factory=dict)
    speeds_with_prefill: dict[int, Speed] = field(default_factory=dict)
    fit: RateFit = field(default_factory=RateFit)
    positions: Positions | None = None
    rounds: float | None = None
    accepted: float | None = None
    plain_lines: int = 0
    plain_speeds: dict[int, Speed] = field(default_factory=dict)
    adaptive_changes: int = 0
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def has_figures(self) -> bool:
        counted = bool(self.rounds) or bool(self.positions and self.positions.rounds)
        return counted or self.lengths.lines > 0 or self.fit.pairs > 0

    def note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)

    def refuse(self, words: str) -> None:
        if words not in self.refused:
            self.refused.append(words)


def most_frequent(speeds: Mapping[int, Speed]) -> tuple[int, Speed] | None:
    """The number of running requests that most lines were printed with, and its times; None without lines."""
    speeds = {running: speed for running, speed in speeds.items() if speed.lines}
    if not speeds:
        return None
    return max(speeds.items(), key=lambda item: (item[1].lines, -item[0]))

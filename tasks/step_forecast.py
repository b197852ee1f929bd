"""What a round is expected to take before anything ran there: the byte floor, and what a measured step took beyond it.

The floor of a step on these GPUs follows from shapes (byte_floor.py). How much longer a step takes was measured on one
H200, by rows of the step. On GPUs of another bandwidth two readings bound what to expect: all that a step takes grows
as its bytes do, or what it takes beyond its bytes (launches, waits) lasts as long there. Neither has sums over ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.engine.config import MAX_NUM_STEPS
from slipstream.tasks.byte_floor import Floor, floors
from slipstream.tasks.facts import Facts


@dataclass(frozen=True)
class MeasuredSteps:
    """Milliseconds of a step of one rank's share of Kimi-K2.5 at TP = 8, on one H200, collectives left out.

    Args:
        who: whose step.
        ms: rows of the step -> (byte floor at 4.3 TB/s, measured).
    """

    who: str
    ms: Mapping[int, tuple[float, float]]

    def beyond(self, rows: int) -> float:
        """Milliseconds over the floor; linear between rows that were measured."""
        return self._between({at: took - floor for at, (floor, took) in self.ms.items()}, rows)

    def efficiency(self, rows: int) -> float:
        """Floor / measured."""
        return self._between({at: floor / took for at, (floor, took) in self.ms.items()}, rows)

    @staticmethod
    def _between(values: Mapping[int, float], rows: int) -> float:
        below, above = max(at for at in values if at <= rows), min(at for at in values if at >= rows)
        share = (rows - below) / (above - below) if above > below else 0.0
        return values[below] + share * (values[above] - values[below])


@dataclass(frozen=True)
class Curve:
    """Accept lengths that others published, by K, the bonus token included.

    Args:
        what: draft, target, data.
        sampling: of the target.
        rule: when a draft was accepted.
        lengths: K -> accept length.
    """

    what: str
    sampling: str
    rule: str
    lengths: Mapping[int, float]


@dataclass(frozen=True)
class Expected:
    """A round of K: milliseconds, at least and at most."""

    num_steps: int
    least_ms: float
    most_ms: float

    def tokens_per_second(self, accept_length: float) -> tuple[float, float]:
        """At least, at most."""
        return 1000 * accept_length / self.most_ms, 1000 * accept_length / self.least_ms


# 2026-11-30, tests/benchmarks/kimi_rank.py, experts as distinct as uniform routing makes them. vLLM 0.24 with Marlin on
# the same share and card: 6.77, 7.35, 7.70, 7.70, 8.05.
MEASURED = MeasuredSteps(
    "this engine",
    {1: (1.40, 3.97), 2: (1.74, 4.48), 4: (2.40, 5.67), 8: (3.63, 7.39), 16: (5.80, 11.36)},
)
# Floor / measured of a draft's steps: our engine, Llama-3.1-8B sizes, K = 3 on an H200 (tests/benchmarks/NOTES.md).
DRAFT_EFFICIENCY = 0.85
_HEAD = "lightseekorg/kimi-k2.5-eagle3-mla before Kimi-K2.5-NVFP4, SPEED-Bench coding, thinking"
_RULE = "vLLM's: a greedy draft stands where it is the very token that the target samples"
CURVES = (
    Curve(
        f"{_HEAD} on",
        "T = 1.0, top-p 0.95",
        _RULE,
        {1: 1.83, 2: 2.43, 3: 2.88, 4: 3.24, 5: 3.46, 6: 3.62, 7: 3.71, 8: 3.77},
    ),
    Curve(
        f"{_HEAD} off",
        "T = 0.6, top-p 0.95",
        _RULE,
        {1: 1.80, 2: 2.33, 3: 2.75, 4: 3.06, 5: 3.25, 6: 3.43, 7: 3.46, 8: 3.51},
    ),
)


def expected_rounds(facts: Facts) -> tuple[Expected, ...]:
    """K = 0 to the longest chain that the engine serves; empty where `floors` is."""
    found = floors(facts, MAX_NUM_STEPS)
    return tuple(_expected(floor) for floor in found)


def _expected(floor: Floor) -> Expected:
    rows, drafts = floor.num_steps + 1, floor.draft_ms / DRAFT_EFFICIENCY
    readings = floor.step_ms / MEASURED.efficiency(rows), floor.step_ms + MEASURED.beyond(rows)
    return Expected(floor.num_steps, min(readings) + drafts, max(readings) + drafts)


def best_expected(found: tuple[Expected, ...], lengths: Mapping[int, float]) -> tuple[Expected, ...]:
    """The K of most tokens a second by either reading, K = 0 included: one, or two where they differ."""
    lengths = {0: 1.0, **lengths}
    asked = [one for one in found if one.num_steps in lengths]
    best = [max(asked, key=lambda one: one.tokens_per_second(lengths[one.num_steps])[end]) for end in (0, 1)]
    return tuple(dict.fromkeys(sorted(best, key=lambda one: one.num_steps)))

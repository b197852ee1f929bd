"""Percentiles and confidence intervals, with the number of values they rest on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = (50, 95, 99)
CONFIDENCE = 0.95
RESAMPLES = 10_000


def summary(values: Sequence[float]) -> dict[str, Any]:
    """mean, p50, p95, p99, count. Null without values; a high percentile of few values is their largest."""
    if not values:
        return {"mean": None, **{f"p{p}": None for p in PERCENTILES}, "count": 0}
    array = np.asarray(values, dtype=np.float64)
    percentiles = np.percentile(array, PERCENTILES, method="higher")
    return {
        "mean": float(array.mean()),
        **{f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)},
        "count": len(values),
    }


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval. groups: independent units that were resampled."""

    estimate: float
    low: float
    high: float
    groups: int
    confidence: float = CONFIDENCE


def speedup(
    baseline_ms: Sequence[float], speculation_ms: Sequence[float], groups: Sequence[str], seed: int = 0
) -> Interval:
    """How many times faster speculation is, over interleaved pairs.

    Args:
        baseline_ms, speculation_ms: milliseconds for the same tokens of each pair.
        groups: what a pair belongs to (its prompt). Repeats of a prompt are alike, so prompts are resampled, not pairs.

    Returns: ratio of summed times, with a bootstrap interval over the groups (percentile, fixed seed).
    Raises ValueError without pairs. With one group the interval is the point: nothing is known of other prompts.
    """
    names = sorted(set(groups))
    if not names:
        raise ValueError("no pair was measured")
    index = {name: i for i, name in enumerate(names)}
    base, spec = np.zeros(len(names)), np.zeros(len(names))
    for b, s, group in zip(baseline_ms, speculation_ms, groups, strict=True):
        base[index[group]] += b
        spec[index[group]] += s
    drawn = np.random.default_rng(seed).integers(0, len(names), size=(RESAMPLES, len(names)))
    ratios = base[drawn].sum(axis=1) / spec[drawn].sum(axis=1)  # [RESAMPLES]
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Interval(float(base.sum() / spec.sum()), float(low), float(high), len(names))


def fitted_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least squares y = intercept + slope * x. With one point (or one x) the slope is 0."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    if math.isclose(spread, 0.0):
        return mean_y, 0.0
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    return mean_y - slope * mean_x, slope

"""A server's own counters: read before and after, the difference is what happened between."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from slipstream.engine.acceptance import AcceptanceCounts
from slipstream.engine.errors import SlipstreamError

PARTS = ("prefill", "draft", "verify", "rest")
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Counters:
    """What an engine did since it started, or between two moments.

    seconds: wall time by part of a step. rounds: of the engine, each for all requests of its batch. acceptance: rounds
    of single requests, by K in force.
    """

    seconds: Mapping[str, float]
    rounds: int
    acceptance: Mapping[int, AcceptanceCounts]

    def __sub__(self, earlier: "Counters") -> "Counters":
        """What happened since `earlier`, of the same server."""
        rounds = {k: counts.since(earlier.of(k)) for k, counts in self.acceptance.items()}
        seconds = {part: self.seconds[part] - earlier.seconds[part] for part in PARTS}
        return Counters(seconds, self.rounds - earlier.rounds, rounds)

    def __add__(self, other: "Counters") -> "Counters":
        rounds = {k: AcceptanceCounts.from_dict(counts.to_dict()) for k, counts in self.acceptance.items()}
        for k, counts in other.acceptance.items():
            rounds.setdefault(k, AcceptanceCounts(k)).merge(counts)
        seconds = {part: self.seconds[part] + other.seconds[part] for part in PARTS}
        return Counters(seconds, self.rounds + other.rounds, rounds)

    def of(self, num_steps: int) -> AcceptanceCounts:
        """The rounds of one K."""
        return self.acceptance.get(num_steps, AcceptanceCounts(num_steps))

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": dict(self.seconds),
            "rounds": self.rounds,
            "acceptance": [counts.to_dict() for counts in self.acceptance.values()],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Counters":
        """From `to_dict`, or from the `stats` of a server."""
        counts = [AcceptanceCounts.from_dict(entry) for entry in data["acceptance"]]
        seconds = {part: float(data["seconds"][part]) for part in PARTS}
        return cls(seconds, int(data["rounds"]), {c.num_steps: c for c in counts})


NOTHING = Counters(dict.fromkeys(PARTS, 0.0), 0, {})


def read_settings(url: str) -> dict[str, Any]:
    """Effective settings of a server of ours, its counters under `stats`. Raises SlipstreamError when it is gone."""
    try:
        answer = httpx.get(f"{url}/slipstream/settings", timeout=TIMEOUT_SECONDS, trust_env=False)
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise SlipstreamError(
            f"the server at {url} does not tell its settings: {type(error).__name__}: {error}",
            expected="a running Slipstream server",
            do="look at the end of the server's log, then run the same command again: what is finished is kept",
        ) from error


def read_counters(url: str) -> Counters:
    """The counters of a server as of now."""
    return Counters.from_dict(read_settings(url)["stats"])

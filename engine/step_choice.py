"""Which K a round runs: always the engine's, or that which gives the most tokens a second. Tokens are the same."""

from collections.abc import Mapping
from typing import Protocol

import torch

from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels.all_gather import all_gather

# Milliseconds of a round: requests that it is captured for -> K -> them.
RoundTimes = Mapping[int, Mapping[int, float]]

# Rounds of a request whose outcome counts; older ones fade.
WINDOW = 256
# Fewer outcomes than that say nothing yet.
ENOUGH = 32.0
# A round of the largest K every so often, where a smaller one runs: to hear whether that has changed.
PROBE_EVERY = 64
# A larger K must be better by this share: two that are alike would take turns. A smaller one is taken at once, so that
# speculation does not go on where it has begun to lose.
MARGIN = 0.02


class StepChoice(Protocol):
    """Chooses K. All ranks call it with the same, in the same order, and so choose the same."""

    def choose(self, batch: int, traced: bool = False) -> int:
        """K of a round of so many requests; traced: of one of them everything is recorded, the draft's steps too."""

    def note(self, num_steps: int, num_valid: int, accepted: int) -> None:
        """What a round of K gave one request."""

    def forget(self) -> None:
        """What was noted so far is nobody's."""


class FixedSteps:
    """Always the same K."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def choose(self, batch: int, traced: bool = False) -> int:
        return self.num_steps

    def note(self, num_steps: int, num_valid: int, accepted: int) -> None:
        pass

    def forget(self) -> None:
        pass


class PayingSteps:
    """The K with the most tokens a millisecond, by measured times and by what was accepted lately.

    Args:
        round_ms: for every size of a round and every K in question, 0 among them.

    The time of K = 0 holds the draft's first pass over what was committed: a later round may speculate, and would find
    holes in the draft's keys where the features of skipped rounds were overwritten. So K = 0 is chosen for what it
    really costs here, which is more than a server without a draft pays.

    Acceptance is kept as the share of k-th drafts that stood among those whose predecessors did; it does not depend on
    the K in force. So what a smaller K would give is known from the rounds of a larger one, and a few of the largest
    (`PROBE_EVERY`) keep the rest up to date. Until there are enough outcomes the largest K runs, and where a request
    is traced: its rounds are compared with each other, step by step.
    """

    def __init__(self, round_ms: RoundTimes) -> None:
        self.round_ms = round_ms
        self.largest = max(max(times) for times in round_ms.values())
        self.forget()

    def forget(self) -> None:
        self._tried = [0.0] * (self.largest + 1)  # [k]: faded count of k-th drafts whose predecessors stood
        self._stood = [0.0] * (self.largest + 1)
        self._current: dict[int, int] = {}  # size -> K
        self._since_probe = 0

    def choose(self, batch: int, traced: bool = False) -> int:
        if traced or self._tried[1] < ENOUGH:
            return self.largest
        size = min(size for size in self.round_ms if size >= batch)
        best = self._best(size)
        self._since_probe = 0 if best == self.largest else self._since_probe + 1
        if self._since_probe >= PROBE_EVERY:
            self._since_probe = 0
            return self.largest
        return best

    def note(self, num_steps: int, num_valid: int, accepted: int) -> None:
        tried = min(num_steps, num_valid, accepted + 1)
        if not tried:
            return
        for k in range(1, self.largest + 1):
            self._tried[k] *= 1 - 1 / WINDOW
            self._stood[k] *= 1 - 1 / WINDOW
        for k in range(1, tried + 1):
            self._tried[k] += 1
            self._stood[k] += accepted >= k

    def tokens(self, num_steps: int) -> float:
        """Expected of a round of K: 1 + A_1 + .. + A_K."""
        expected, joint = 1.0, 1.0
        for k in range(1, num_steps + 1):
            joint *= self._stood[k] / self._tried[k] if self._tried[k] else 0.0
            expected += joint
        return expected

    def _best(self, size: int) -> int:
        speeds = {k: self.tokens(k) / ms for k, ms in self.round_ms[size].items()}
        best = max(speeds, key=lambda k: (speeds[k], -k))
        current = self._current.setdefault(size, best)
        if speeds[best] > speeds[current] * (1 + MARGIN if best > current else 1):
            self._current[size] = best
        return self._current[size]


def slowest(parallel: TensorParallel, round_ms: RoundTimes) -> RoundTimes:
    """The longest that any rank has measured, the same on all. All ranks call it."""
    if parallel.size == 1:
        return round_ms
    places = [(size, k) for size, times in round_ms.items() for k in times]
    own = torch.tensor([round_ms[size][k] for size, k in places], dtype=torch.float64)
    everybody = all_gather(own, [len(places)] * parallel.size, parallel.group)  # size x [n]
    worst = torch.stack(everybody).amax(dim=0).tolist()  # size x [n] -> [n]
    found: dict[int, dict[int, float]] = {}
    for (size, k), ms in zip(places, worst, strict=True):
        found.setdefault(size, {})[k] = ms
    return found

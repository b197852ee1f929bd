"""What an engine has done so far."""

from dataclasses import dataclass, field

from slipstream.engine.acceptance import AcceptanceCounts


@dataclass
class EngineStats:
    """Counts and seconds since the engine was made.

    acceptance: K in force -> counts. steps: calls of `Engine.step`. rounds: that gave something to a request; what was
    launched before the host knew that the last request had ended is not counted. draft_seconds and verify_seconds are
    those of rounds by the device's clock, sampling and commit in the latter; rest_seconds is what lay between launches
    while there was work. waited_seconds: in which the host had nothing to do but to wait for a result.
    """

    acceptance: dict[int, AcceptanceCounts] = field(default_factory=dict)
    steps: int = 0
    rounds_of: dict[int, int] = field(default_factory=dict)  # K -> rounds, each for all requests of its batch
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rest_seconds: float = 0.0
    waited_seconds: float = 0.0
    _last_end_ns: int = 0  # of the last launch that was counted, on the device's clock; 0: there was no work since

    def counts(self, num_steps: int) -> AcceptanceCounts:
        """The rounds of that K."""
        found = self.acceptance.get(num_steps)
        if found is None:
            found = self.acceptance[num_steps] = AcceptanceCounts(num_steps)
        return found

    @property
    def rounds(self) -> int:
        """Of every K."""
        return sum(self.rounds_of.values())

    def add_round(self, num_steps: int, stamps_ns: tuple[int, int, int]) -> None:
        """Counts a round of K and its time: its start, the draft's end and its end, on the device's clock."""
        self.rounds_of[num_steps] = self.rounds_of.get(num_steps, 0) + 1
        start, draft_end, end = stamps_ns
        if self._last_end_ns:
            self.rest_seconds += max(0, start - self._last_end_ns) * 1e-9
        self.draft_seconds += (draft_end - start) * 1e-9
        self.verify_seconds += (end - draft_end) * 1e-9
        self._last_end_ns = end

    def add_chunk_time(self, end_ns: int, host_seconds: float) -> None:
        """Counts the time of a prefill chunk, which leaves no stamp of its start.

        Args:
            end_ns: its end, on the device's clock.
            host_seconds: from its launch until its result was there, by the host's clock: no less than what it took.
        """
        since_last = (end_ns - self._last_end_ns) * 1e-9 if self._last_end_ns else host_seconds
        took = min(host_seconds, since_last)
        self.prefill_seconds += took
        self.rest_seconds += since_last - took
        self._last_end_ns = end_ns

    def note_idle(self) -> None:
        """Nothing is left to do: the time until the next launch is nobody's."""
        self._last_end_ns = 0

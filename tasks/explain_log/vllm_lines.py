"""What the lines of a vLLM server say (V1 engine), and its older line of another meaning, which is refused.

    (APIServer pid=1) INFO 08-04 20:51:08 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 3.49, Accepted
        throughput: 0.12 tokens/s, Drafted throughput: 0.34 tokens/s, Accepted: 92 tokens, Drafted: 259 tokens,
        Per-position acceptance rate: 0.757, 0.622, 0.432, Avg Draft acceptance rate: 35.5%

Its names and their order moved; the counts stand in every form, so that everything here is computed from them. The line
with the speed ("Engine 000: ...") comes right before it, for the same interval.
"""

import re

from slipstream.tasks.explain_log.observed import Positions, Section, Settings, Speed

_LENGTH = re.compile(r"Mean acceptance length: (\d+(?:\.\d+)?)")
_ACCEPTED = re.compile(r"Accepted: (\d+) tokens")
_DRAFTED = re.compile(r"Drafted: (\d+) tokens")
_POSITIONS = re.compile(r"Per-position acceptance rate: ((?:\d\.\d+(?:, |$|\b))+)")
_ENGINE = re.compile(
    r"(Engine \d+).*?Avg prompt throughput: (\d+(?:\.\d+)?) tokens/s, Avg generation throughput: "
    r"(\d+(?:\.\d+)?) tokens/s,"
    r" Running: (\d+) reqs"
)
_VERSION = re.compile(r"vLLM API server version v?(\S+)|LLM engine \(v([^)\s]+)\)")
_STEPS = re.compile(r"num_spec(?:ulative)?_tokens['\"]?\s*[=:]\s*(\d+)")
_METHOD = re.compile(r"\bmethod['\"]?\s*[=:]\s*['\"](\w+)")
_DUMP = "Dumping input data"  # a crash prints the settings once more
OLD_LINE = "Speculative metrics: "


def version(line: str) -> str | None:
    """The version that a start-up line names."""
    found = None if _DUMP in line else _VERSION.search(line)
    return (found.group(1) or found.group(2)) if found else None


def settings(line: str) -> tuple[Settings | None, Settings | None]:
    """(asked, in force) as far as one start-up line says."""
    steps, method = _STEPS.search(line), _METHOD.search(line)
    if steps is None or _DUMP in line:
        return None, None
    k = int(steps.group(1))
    in_force = "SpeculativeConfig(" in line
    where = "the start-up log (speculative_config)" if in_force else "the launch command in the log"
    found = Settings(k, k + 1, 1, method.group(1) if method else None, where=where)
    return (None, found) if in_force else (found, None)


class SpecLines:
    """Reads the lines of one server."""

    def __init__(self) -> None:
        self._busy: dict[str, bool] = {}
        self._interval: tuple[float, int, bool] | None = None

    def read(self, line: str, section: Section) -> bool:
        """Adds one line to the section; whether it was one of ours, whole."""
        engine = _ENGINE.search(line)
        if engine:
            name, prompt, generation, running = engine.groups()
            alone = float(prompt) == 0.0 and int(running) > 0 and self._busy.get(name, False)
            self._busy[name] = int(running) > 0
            self._interval = (float(generation), int(running), alone)
            return True
        if OLD_LINE in line and "SpecDecoding" not in line:
            section.refuse(
                'figures of "Speculative metrics" (vLLM before its V1 engine, and early V1): their definitions are not '
                "documented here, so they are not converted"
            )
            return True
        accepted, drafted = _ACCEPTED.search(line), _DRAFTED.search(line)
        if "SpecDecoding metrics" not in line or not accepted or not drafted:
            return False
        self._add(line, section, int(accepted.group(1)), int(drafted.group(1)))
        return True

    def _add(self, line: str, section: Section, accepted: int, drafted: int) -> None:
        shares = _POSITIONS.search(line)
        rates = [float(x) for x in shares.group(1).strip().rstrip(",").split(", ")] if shares else []
        printed = _LENGTH.search(line)
        k = section.effective.num_steps or section.asked.num_steps or len(rates)
        if not k:
            section.refuse("lines that print neither K nor a rate per position: rounds are drafted tokens / K")
        if not drafted or not k:
            return
        rounds = rounds_behind(accepted, drafted, k, float(printed.group(1)) if printed else None, section)
        section.rounds = (section.rounds or 0.0) + rounds
        section.accepted = (section.accepted or 0.0) + accepted
        length = 1 + accepted / rounds
        section.lengths.add(length, rounds)
        if rates:
            if not section.effective.known and not section.asked.known:
                section.effective = Settings(k, k + 1, 1, where="the rates per position in its lines")
            section.positions = section.positions or Positions()
            section.positions.add(rounds, [rate * rounds for rate in rates])
        if self._interval and self._interval[0] > 0 and self._interval[1] > 0:
            tokens, running, alone = self._interval
            speeds = section.speeds if alone else section.speeds_with_prefill
            speeds.setdefault(running, Speed()).add(length, running, tokens)
        self._interval = None


def rounds_behind(accepted: int, drafted: int, k: int, printed: float | None, section: Section) -> float:
    """Rounds of an interval: drafted / K, unless the printed mean says that some proposed fewer than K."""
    rounds = drafted / k
    if printed is None or abs(1 + accepted / rounds - printed) <= 0.006 or printed <= 1.02:
        return rounds
    section.note(f"some rounds proposed fewer than {k} drafts: rounds are taken from the printed mean length there")
    return accepted / (printed - 1)

"""What an engine makes of a launch: one row of asked / effective / visible / what to write so that nothing changes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slipstream.engine.engine_versions import READ, Engine
from slipstream.tasks.other_engines.launch_facts import Launch

# error: what was asked is changed, contradicted, or the start fails. warning: a choice for what was left out, or
# something that depends on what this machine does not show. note: as asked, with something to know.
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Effect:
    """One row.

    Args:
        row: its number in the table of silent changes, such as "1".
        asked: the keys with value and origin.
        effective: what the engine makes of it.
        visible: how one would notice.
        ways: what to write so that nothing changes; any one of them will do.
        severity: see above.
        fault: id of the incident's fault, or "".
        releases: those in which it is so, where the release asked is not known; empty: in each that it may be.
    """

    row: str
    asked: str
    effective: str
    visible: str
    ways: tuple[str, ...]
    severity: Severity = "error"
    fault: str = ""
    releases: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The releases in words: `0.5.9 to 0.5.11, 0.5.14`; "" where there is nothing to say."""
        runs: list[list[str]] = []
        for release in READ[Engine.SGLANG]:
            if release not in self.releases:
                runs.append([])
            elif runs and runs[-1]:
                runs[-1].append(release)
            else:
                runs.append([release])
        return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs if run)


Rule = Callable[[Launch], Iterable[Effect]]


def run_rules(rules: Sequence[Rule], launches: Sequence[Launch]) -> tuple[Effect, ...]:
    """Every effect of a launch.

    Args:
        launches: the same launch for each release that it may be; one when the release is known.

    Returns: what holds in all of them as it is; what holds in some only as a warning that names them.
    """
    found: dict[Effect, list[str]] = {}
    for launch in launches:
        for rule in rules:
            for effect in rule(launch):
                found.setdefault(effect, []).append(launch.version.text)
    result = []
    for effect, releases in found.items():
        if len(releases) == len(launches):
            result.append(effect)
        else:
            severity: Severity = "warning" if effect.severity == "error" else effect.severity
            result.append(replace(effect, severity=severity, releases=tuple(releases)))
    return tuple(sorted(result, key=lambda effect: (_order(effect.row), effect.releases)))


def _order(row: str) -> tuple[bool, int, str]:
    digits = "".join(c for c in row if c.isdigit())
    return (not row[:1].isdigit(), int(digits or 0), row)

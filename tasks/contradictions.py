"""What a check is, and what it finds.

A check is a named function from facts to findings. All of them run, so that one look shows everything that is wrong.
Switching one off (`skip`) is for tests, which show that the fault then passes.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.facts import Facts

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One contradiction (or, as a warning, one thing to know).

    Args:
        check: id of the check.
        found: the values that contradict each other, each with where it came from.
        expected: what must hold.
        ways: the ways to agree; any one of them will do.
        fault: id of the incident's fault, or "".
        severity: only an error stops.
        runbook: file name under `runbooks/`, where there is one.
    """

    check: str
    found: str
    expected: str
    ways: tuple[str, ...]
    fault: str = ""
    severity: Severity = "error"
    runbook: str = ""

    def __str__(self) -> str:
        title = f"{self.fault}: {self.found}" if self.fault else self.found
        ways = "; or ".join(self.ways)
        lines = [title, f"  expected: {self.expected}", *([f"  do: {ways}"] if ways else [])]
        return "\n".join([*lines, *([f"  runbook: runbooks/{self.runbook}"] if self.runbook else [])])


class Contradictions(SlipstreamError):
    """All contradictions of a deployment in one error."""

    exit_code = 2

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        if len(findings) == 1:
            only = findings[0]
            do = "; or ".join(only.ways)
            super().__init__(only.found, expected=only.expected, do=do, runbook=only.runbook, fault=only.fault)
            return
        text = "\n".join(str(finding) for finding in findings)
        super().__init__(f"{len(findings)} contradictions:\n{text}")


@dataclass(frozen=True)
class Check:
    """A named check.

    Args:
        id: its name; a fault of the incident where it catches one.
        words: says in a sentence what it keeps from happening.
        run: from facts to findings.
        engines: values of `server.engine` that it concerns; mostly our own engine and its stages alone.
    """

    id: str
    words: str
    run: Callable[[Facts], Iterable[Finding]]
    engines: tuple[str, ...] = ("slipstream",)


def run_checks(checks: Sequence[Check], facts: Facts, skip: Collection[str] = ()) -> list[Finding]:
    """Runs every check that concerns the engine, but for the ids in `skip`.

    Raises ValueError for an id that no check has.
    """
    unknown = set(skip) - {check.id for check in checks}
    if unknown:
        raise ValueError(f"no check is called {sorted(unknown)}; there are {[check.id for check in checks]}")
    engine = facts.deployment.server.engine
    wanted = [check for check in checks if check.id not in skip and engine in check.engines]
    return [finding for check in wanted for finding in check.run(facts)]


def refuse(findings: Sequence[Finding]) -> None:
    """Raises Contradictions when there is an error among the findings."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise Contradictions(errors)

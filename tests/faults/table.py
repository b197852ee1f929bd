"""The table of the faults, at the end of a run: a pytest plugin, which tests/conftest.py registers.

Every module here declares what it shows, once:

    CAUGHT = [("F1", "plan", "verify width 16 contradicts num_steps 1")]     # fault, where, its words in short

What modules declare travels with the reports of their tests: with several workers, one process runs the tests and
another prints the table.
"""

from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
declared: dict[str, list[tuple[str, str, str]]] = {}  # file -> what its module declares
seconds: Counter[str] = Counter()
failed: set[str] = set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reads what the modules of this folder declare."""
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == HERE:
            item.user_properties.append(("caught", getattr(item.module, "CAUGHT", [])))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up a module's time, its fixtures included."""
    file = report.nodeid.partition("::")[0]
    declared[file] = dict(report.user_properties).get("caught", [])
    seconds[file] += report.duration
    if report.failed:
        failed.add(file)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table: each fault, where it is caught, in which words, in how many seconds of its module."""
    rows = sorted(
        (int(fault.removeprefix("F")), where, words, file)
        for file, lines in declared.items()
        for fault, where, words in lines
    )
    if not rows:
        return
    terminalreporter.section("faults")
    width = max(len(where) for _, where, _, _ in rows)
    for number, where, words, file in rows:
        verdict = "NOT SHOWN" if file in failed else "caught"
        terminalreporter.line(f"F{number:<3} {verdict:<9} {where:<{width}} {seconds[file]:6.1f} s  {words}")

"""What logs of speculation mean, as tables for people and as JSON for programs."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from slipstream.engine.errors import SlipstreamError
from slipstream.flows.tables import plain_table
from slipstream.tasks.explain_log.compare import Comparison, compare, partial_sum
from slipstream.tasks.explain_log.explanations import (
    LENGTH_RUNBOOK,
    SPEED_RUNBOOK,
    UNDECIDED,
    endless,
    ranked,
    verdict,
)
from slipstream.tasks.explain_log.read import read_file
from slipstream.tasks.explain_log.run_figures import Run, figures

UNKNOWN = "not known"


class WrongOption(SlipstreamError):
    """A command line that cannot be meant."""

    exit_code = 2


def explain(
    files: Sequence[Path], *, baseline: float | None, version: str | None, accuracy: float | None
) -> tuple[list[Run], list[Comparison]]:
    """Reads the files and holds each run against the one before it. Raises SlipstreamError on what cannot be read."""
    if baseline is not None and not 0 < baseline < math.inf:
        raise WrongOption(f"--baseline-tok-s is {baseline:g}", expected="tokens per second, above 0", do="correct it")
    if accuracy is not None and not 0 <= accuracy <= 1:
        raise WrongOption(f"--accuracy is {accuracy:g}", expected="a share from 0 to 1, as 0.747", do="correct it")
    runs = [figures(read_file(path), version=version, baseline=baseline, accuracy=accuracy) for path in files]
    return runs, [made for before, after in pairwise(runs) if (made := compare(before, after))]


def as_dict(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Everything that is shown, for JSON."""
    return {
        "runs": [
            {**run.to_dict(), "verdict": verdict(run), "explanations": [item.to_dict() for item in ranked(run)]}
            for run in runs
        ],
        "comparisons": [comparison.to_dict() for comparison in comparisons],
        "undecided": [vars(item) for item in UNDECIDED],
        "runbooks": [LENGTH_RUNBOOK, SPEED_RUNBOOK],
    }


def show(runs: Sequence[Run], comparisons: Sequence[Comparison], console: Console) -> None:
    """Prints figures side by side, then each run's verdict and explanations, the comparisons, and what stays open."""
    console.print(_figures(runs))
    for run in runs:
        console.print()
        _run(run, console)
    for comparison in comparisons:
        console.print()
        _comparison(comparison, console)
    console.print()
    console.print(_undecided())
    console.print(Text(f"runbooks: runbooks/{LENGTH_RUNBOOK}, runbooks/{SPEED_RUNBOOK}", "dim"))


ROWS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("engine, source", lambda run: f"{run.engine} {run.source}"),
    ("version", lambda run: f"{run.version or UNKNOWN}{_origin(run.version_from)}"),
    ("asked", lambda run: run.asked.describe()),
    ("in force", lambda run: run.effective.describe()),
    ("K", lambda run: f"{_or(run.num_steps)}{_origin(run.width_from)}"),
    ("accept length (ceiling)", lambda run: f"{run.accept_length:.2f} ({_or(run.ceiling)})"),
    ("  error, rounds behind it", lambda run: f"{_error(run)}, {_rounds(run)}"),
    ("accepted / proposed", lambda run: _share(run.acceptance_rate)),
    ("  rate as printed", lambda run: _printed(run)),
    ("sum of A_k", lambda run: f"{run.sum_joint:.2f}"),
    ("  A_k", lambda run: _joint(run)),
    ("tok/s of a stream (running)", lambda run: f"{_one(run.tokens_per_second)} ({_or(run.running)})"),
    ("ms a round", lambda run: _one(run.round_ms)),
    ("break-even accept length", lambda run: _two(run.break_even)),
    ("can any draft win at this K", lambda run: {None: UNKNOWN, True: "yes", False: "no"}[run.can_win]),
    ("tok/s if always right", lambda run: _one(run.perfect_tokens_per_second)),
)
PROJECTION: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("projected: p/(1-p), wrong", lambda run: _two(endless(run.accuracy or 0.0))),
    ("projected: 1 + sum p^k at this K", lambda run: _two(run.projected)),
)


def _figures(runs: Sequence[Run]) -> Table:
    baseline, accuracy = runs[0].baseline, runs[0].accuracy
    against = (
        "no baseline stated" if baseline is None else f"baseline {baseline:g} tok/s, {1000 / baseline:.1f} ms a step"
    )
    stated = "" if accuracy is None else f"; accuracy stated {accuracy:.1%}"
    table = plain_table(f"What the files say ({against}{stated})", "", *[Path(run.name).name for run in runs])
    for name, cell in ROWS if accuracy is None else (*ROWS, *PROJECTION):
        table.add_row(Text(name, "dim" if name.startswith(" ") else ""), *[Text(cell(run)) for run in runs])
    return table


def _run(run: Run, console: Console) -> None:
    told = verdict(run)
    won = run.speedup is not None and run.speedup >= 1
    console.print(Text.assemble((f"{Path(run.name).name}: ", "bold"), (told, "green" if won else "bold red")))
    table = plain_table("", "explanation", "tokens a round", "")
    for item in ranked(run):
        number = "-" if item.tokens is None else f"{item.tokens:+.2f}"
        name = f"{item.name} (proven)" if item.proven else item.name
        style = "" if item.proven or (item.tokens or 0) > 0 else "dim"
        table.add_row(name, number, Text(item.told), style=style)
    console.print(table)
    if run.rate_printed is not None and run.rate_meaning:
        console.print(Text.assemble(("rate ", "dim"), (f"{run.rate_printed:.0%} is {run.rate_meaning}", "dim")))
    for words in run.refused:
        console.print(Text.assemble(("refused ", "yellow"), words))
    for words in run.notes:
        console.print(Text.assemble(("note ", "dim"), (words, "dim")))


def _comparison(comparison: Comparison, console: Console) -> None:
    before, after = (Path(name).name for name in comparison.names)
    colour = {"improved": "bold green", "worse": "bold red"}.get(comparison.verdict, "bold yellow")
    console.print(Text.assemble((f"{before} -> {after}: ", "bold"), (comparison.verdict, colour)))
    for reason in comparison.reasons:
        console.print(f"  - {escape(reason)}", highlight=False)


def _undecided() -> Table:
    table = plain_table("What no log can decide", "what", "why", "what can")
    for item in UNDECIDED:
        table.add_row(item.what, item.why, item.how)
    return table


def _origin(words: str) -> str:
    return f" ({words})" if words else ""


def _or(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _one(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"


def _two(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "not given" if value is None else f"{value:.0%}"


def _error(run: Run) -> str:
    return "error not known" if run.standard_error is None else f"+- {run.standard_error:.2f} ({run.error_from})"


def _rounds(run: Run) -> str:
    return "rounds not known" if run.rounds is None else f"about {run.rounds:.0f}"


def _printed(run: Run) -> str:
    if run.rate_printed is None:
        return "none"
    return f"{run.rate_printed:.0%}" + ("" if run.rate_meaning else " (refused, see below)")


def _joint(run: Run) -> str:
    if run.joint is not None:
        return " ".join(f"{a:.2f}" for a in run.joint)
    known = "" if not run.num_steps else f"; A_1 is {partial_sum(run, 1)}"
    return f"only their sum is in the file{known}"

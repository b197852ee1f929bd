"""`slipstream bench engine` and `slipstream bench kernels`: what is timed on the card at hand, as tables and rows."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream.engine.bench.cases import CASES, Case, Outcome, run_cases, write_rows
from slipstream.engine.bench.ceiling import read_ceiling
from slipstream.engine.bench.kernels import Measured, measure_kernels
from slipstream.engine.bench.parts import RoundParts
from slipstream.engine.bench.sizes import SIZES
from slipstream.engine.device import device_name, resolve_device
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.packed_weights import products_for

WORDS = ("engine", "kernels")
_KERNELS_SHOWN = 16


def bench(word: str, sizes: str | None, rows: Path | None, parts: bool, command: str) -> None:
    """Times and prints.

    Args:
        word: one of WORDS.
        sizes: names of model sizes with commas between; None: all.
        rows: of `engine`, the record file that the figures are written to.
        parts: of `engine`, profile the kernels of a round as well.
        command: that was given, for the record.

    Raises SlipstreamError without a card, and for an unknown size.
    """
    known = [name for name, size in SIZES.items() if word == "engine" or not size.int4_group]  # ops are timed in bf16
    names = sizes.split(",") if sizes else known
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SlipstreamError(
            f"--sizes names {', '.join(unknown)}", expected=f"some of {', '.join(known)}", do="correct --sizes"
        )
    resolve_device("cuda")
    console = Console()
    products, ceiling = products_for("cuda"), read_ceiling()
    console.print(
        f"{device_name('cuda')}: reads {ceiling / 1e12:.2f} TB/s; matrix products: {products.kernels} "
        f"({products.reason}, {products.compile_seconds:.1f} s to compile and load)",
        highlight=False,
    )
    if word == "kernels":
        for name in names:
            console.print(kernel_table(SIZES[name].name, list(measure_kernels(SIZES[name], ceiling))))
        return
    bench_engine([case for case in CASES if case.size in names], ceiling, rows, parts, command, console)


def bench_engine(
    cases: Sequence[Case], ceiling: float, rows: Path | None, parts: bool, command: str, console: Console
) -> None:
    """Runs the cases one after the other; what is done is recorded at once, for a later case may fail."""
    commit, outcomes = _commit(), []
    for outcome in run_cases(cases, ceiling, parts=parts):
        outcomes.append(outcome)
        console.print(line_of(outcome), highlight=False)
        if outcome.parts is not None:
            console.print(profile_table(outcome.case, outcome.parts))
        if rows is not None:
            write_rows(rows, [outcome.row(commit, command)])
    console.print(case_table(outcomes))
    console.print(parts_table(outcomes))


def line_of(outcome: Outcome) -> str:
    case, timing = outcome.case, outcome.timing
    return f"{case.name} batch {case.batch} K={case.num_steps}: {timing.ms:.3f} ms, spread {timing.spread:.1%}"


def case_table(outcomes: Sequence[Outcome]) -> Table:
    """Milliseconds a step or round against the floor and the goal."""
    table = Table(
        *("case", "batch", "K", "ms", "spread", "tok/s", "floor ms", "of ceiling", "goal ms", "reached"),
        title="Milliseconds a step (K = 0) or round, wall time of the public call",
    )
    for outcome in outcomes:
        case, timing = outcome.case, outcome.timing
        reached = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[outcome.reached]
        table.add_row(
            case.name,
            str(case.batch),
            str(case.num_steps),
            f"{timing.ms:.3f}",
            f"{timing.spread:.1%}",
            f"{timing.tokens_per_second:,.0f}",
            f"{outcome.floor_ms:.3f}",
            f"{outcome.share:.0%}",
            "" if case.goal_ms is None else f"{case.goal_ms:.2f}",
            reached,
        )
    return table


def parts_table(outcomes: Sequence[Outcome]) -> Table:
    """Where a round's time goes: the device's own clock, and the host beside it."""
    table = Table(
        *("case", "batch", "K", "draft ms", "verify ms", "between launches ms", "host ms"),
        title="Parts of a round: draft and verify by the device's clock; host: its work beside waiting",
    )
    for outcome in outcomes:
        parts = outcome.timing.parts
        figures = (parts.draft, parts.verify, parts.rest, parts.host)
        table.add_row(
            outcome.case.name, str(outcome.case.batch), str(outcome.case.num_steps), *(f"{one:.3f}" for one in figures)
        )
    return table


def profile_table(case: Case, parts: RoundParts) -> Table:
    """Kernels of a round, by the profiler."""
    table = Table(
        *("kernel", "us a round", "calls", "us a call"),
        title=f"{case.name} batch {case.batch} K={case.num_steps}: {parts.span_us:.0f} us a round, of it "
        f"{parts.busy_us:.0f} in kernels (overlap once), {parts.gaps_us:.0f} in gaps",
    )
    for kernel in parts.kernels[:_KERNELS_SHOWN]:
        each = kernel.us / max(kernel.calls, 1e-9)
        table.add_row(kernel.name[:80], f"{kernel.us:.1f}", f"{kernel.calls:.1f}", f"{each:.2f}")
    rest = parts.kernels[_KERNELS_SHOWN:]
    if rest:
        us, calls = sum(kernel.us for kernel in rest), sum(kernel.calls for kernel in rest)
        table.add_row(f"{len(rest)} others", f"{us:.1f}", f"{calls:.1f}", f"{us / max(calls, 1e-9):.2f}")
    return table


def kernel_table(name: str, measured: Sequence[Measured]) -> Table:
    """Every op of a size."""
    table = Table(
        *("op", "rows", "us", "MB", "TB/s", "of ceiling", "error"),
        title=f"Kernels at the sizes of {name}, in a graph, weights and caches cold",
    )
    for one in measured:
        rate = one.num_bytes / one.us / 1e6
        table.add_row(
            one.name,
            str(one.rows),
            f"{one.us:.2f}",
            f"{one.num_bytes / 1e6:.2f}",
            f"{rate:.2f}",
            f"{one.share:.0%}",
            f"{one.error:.1e}",
        )
    return table


def _commit() -> str:
    """Of the sources that run; "unknown" outside of a repository."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"

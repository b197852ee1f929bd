"""`slipstream run`, `roll`: a flow with its Prefect server, its progress and its end, for a person at a terminal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from slipstream.configs.load import load
from slipstream.flows.prefect_server import prefect_server
from slipstream.flows.progress import RichReporter
from slipstream.flows.signals import unwinding_signals
from slipstream.tasks.gates import GatesFailed
from slipstream.tasks.lock import workdir_lock
from slipstream.tasks.manifest import MANIFEST, read_json
from slipstream.tasks.stage_runner import stage_folder

LOG_WIDTH = 120  # columns of tables in a log, whose width nobody tells us


def run_lifecycle(
    config: Path, overrides: Sequence[str] = (), console: Console | None = None
) -> dict[str, dict[str, Any]]:
    """Runs the whole lifecycle of a deployment and prints its table.

    Returns: stage -> {"status", "seconds"}.
    Raises SlipstreamError for people; KeyboardInterrupt or SystemExit when it was ended from outside. In every case
    nothing that it started is left running, but for the server with `server.after: keep`.
    """
    console = _wide(console or Console())
    deployment = load(config, overrides).deployment
    report = stage_folder(deployment, deployment.host.workdir, "report")
    with _at_a_terminal(deployment.host.workdir, console) as reporting:
        from slipstream.flows.lifecycle import lifecycle

        try:
            with reporting():
                stages = lifecycle(str(config), list(overrides))
        except GatesFailed:
            _print_report(report, console)  # the figures say more than the error
            raise
        _print_report(report, console)
        return stages


def run_roll(config: Path, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Replaces the servers on all hosts of a deployment, as flow `roll` does, and prints where they answer."""
    console = _wide(Console())
    with _at_a_terminal(load(config, overrides).deployment.host.workdir, console) as reporting:
        from slipstream.flows.roll import roll

        with reporting():
            rows = roll(str(config), list(overrides))
        for row in rows:
            console.print(f"{row['host']}: {row['base_url']} (pid {row['pid']})", highlight=False)
        return rows


def _wide(console: Console) -> Console:
    if not console.is_terminal:
        console.width = max(console.width, LOG_WIDTH)
    return console


@contextmanager
def _at_a_terminal(workdir: Path, console: Console) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """A Prefect server for flows that a person watches. Yields what shows their progress while they run."""
    with unwinding_signals(), workdir_lock(workdir), prefect_server(workdir):
        from slipstream.flows.deployed import REPORTER  # only now: prefect reads its settings when imported

        @contextmanager
        def reporting() -> Iterator[None]:
            with RichReporter(console) as reporter:
                token = REPORTER.set(reporter)
                try:
                    yield
                finally:
                    REPORTER.reset(token)

        yield reporting


def _print_report(folder: Path, console: Console) -> None:
    """The table of the finished report."""
    from slipstream.tasks.report_text import rich_report

    console.print(rich_report(read_json(folder / MANIFEST)["figures"], folder / "report.html"))

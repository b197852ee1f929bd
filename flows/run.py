"""`slipstream run`: the flow with its Prefect server, its progress and its end, for a person at a terminal."""

from collections.abc import Sequence
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
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, LOG_WIDTH)
    deployment = load(config, overrides).deployment
    workdir = deployment.host.workdir
    with unwinding_signals(), workdir_lock(workdir), prefect_server(workdir):
        from slipstream.flows.deployed import REPORTER  # only now: prefect reads its settings when imported
        from slipstream.flows.lifecycle import lifecycle

        token = None
        try:
            with RichReporter(console) as reporter:
                token = REPORTER.set(reporter)
                stages = lifecycle(str(config), list(overrides))
        except GatesFailed:
            _print_report(stage_folder(deployment, workdir, "report"), console)  # the figures say more than the error
            raise
        finally:
            if token is not None:
                REPORTER.reset(token)
        _print_report(stage_folder(deployment, workdir, "report"), console)
        return stages


def _print_report(folder: Path, console: Console) -> None:
    """The table of the finished report."""
    from slipstream.tasks.report_text import rich_report

    console.print(rich_report(read_json(folder / MANIFEST)["figures"], folder / "report.html"))

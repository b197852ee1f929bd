"""Launching in place of the server that runs, with the way back: what flows `serve` and `stage` share."""

from typing import TYPE_CHECKING

from prefect.transactions import transaction

from slipstream.flows.deployed import Deployed
from slipstream.flows.events import tell
from slipstream.tasks.registry import get_stage
from slipstream.tasks.stage import StageResult

if TYPE_CHECKING:
    from prefect.transactions import Transaction


def replace_server(here: Deployed) -> StageResult:
    """Runs stage launch in a transaction: whatever ends it before its server is proven, stage restore undoes it.

    Launch makes room itself, on the host, under one mark (tasks/last_good.py): there is no moment between two tasks in
    which a server is stopped and nobody knows that it shall come back.
    """

    def bring_back(_: "Transaction") -> None:
        figures = here.run(get_stage("restore")).figures
        tell(f"server.{figures['server']}", here.workdir, pid=figures.get("pid"))

    with transaction() as way_back:
        way_back.on_rollback_hooks.append(bring_back)  # of the whole: a task's own are not called when it fails itself
        return here.tasks(get_stage("launch"))

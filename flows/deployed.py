"""What every flow of a deployment holds while it runs: the host's slot, the workdir, the way to its stages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import get_run_logger
from prefect.context import FlowRunContext
from prefect.settings import get_current_settings

from slipstream.configs.load import load
from slipstream.flows.host_limit import host_limit
from slipstream.flows.log_reporter import LogReporter
from slipstream.flows.run_record import run_record
from slipstream.flows.stage_task import StageTasks
from slipstream.tasks.lock import patient_workdir_lock
from slipstream.tasks.reporting import Reporter
from slipstream.tasks.stage_runner import StageRunner, stage_runner

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

LOCK_SECONDS = 120.0  # a hook may still be cleaning up after the run before us
# The listener is no parameter of a flow: parameters are stored, and a deployed run has nobody who watches.
REPORTER: ContextVar[Reporter | None] = ContextVar("reporter", default=None)


@dataclass(frozen=True)
class Deployed:
    """A deployment in a flow run: `run` runs a stage plainly, `tasks` as a Prefect task, `reporter` is told."""

    deployment: "Deployment"
    workdir: Path
    run: StageRunner
    tasks: StageTasks
    reporter: Reporter


@contextmanager
def deployed(config: str, overrides: Sequence[str], *, force: bool = False) -> Iterator[Deployed]:
    """Opens a deployment for the flow run that we are in; waits for another flow of its host, and locks its workdir."""
    deployment = load(config, overrides).deployment
    workdir, logger = deployment.host.workdir, get_run_logger()
    reporter = REPORTER.get() or LogReporter(logger)
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None

    def say(text: str) -> None:
        logger.warning("%s", text)

    run_id, api = str(context.flow_run.id), str(get_current_settings().api.url)
    with (
        host_limit(deployment, say),
        patient_workdir_lock(workdir, LOCK_SECONDS, say),
        run_record(workdir, run_id, context.flow.name if context.flow else "", api),
        stage_runner(deployment, workdir, reporter, force=force) as run,
    ):
        tasks = StageTasks(run, deployment, workdir, reporter, refresh=force)
        yield Deployed(deployment, workdir, run, tasks, reporter)

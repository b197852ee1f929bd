"""The flow: from a package to a benchmarked speculative server and back to a clean machine.

One flow with a Prefect task for each stage. The stages' own manifests decide what is skipped, not Prefect's cache, so
that a stage run by hand and one run here are the same. Whatever happens, servers that the run started are stopped,
but for `server.after: keep` after a run that ended well, and on a far host that cannot be reached any more.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, State

from slipstream.configs.load import load
from slipstream.flows.plan import make_plan
from slipstream.tasks import gates
from slipstream.tasks.checks import refuse, refuse_other_engine
from slipstream.tasks.hosts.host import HostUnreachable
from slipstream.tasks.lock import workdir_lock
from slipstream.tasks.registry import all_stages, get_stage
from slipstream.tasks.reporting import NullReporter, Reporter
from slipstream.tasks.stage import Stage, StageResult
from slipstream.tasks.stage_runner import stage_runner

# The listener is no parameter of the flow: parameters are stored, and a deployed run has nobody who watches.
REPORTER: ContextVar[Reporter | None] = ContextVar("reporter", default=None)


@flow(name="lifecycle", description=__doc__, persist_result=False)
def lifecycle(config: str, overrides: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Runs all stages of a deployment.

    Args:
        config: path of the deployment's YAML file.
        overrides: `section.field=value` each.

    Returns: stage -> {"status": "done" | "skipped", "seconds"}.
    Raises what a stage raises; SlipstreamError when a gate fails, after the report is written.
    """
    deployment = load(config, overrides or ()).deployment
    refuse_other_engine(deployment, "the lifecycle")
    workdir, reporter = deployment.host.workdir, REPORTER.get() or NullReporter()
    with workdir_lock(workdir), stage_runner(deployment, workdir, reporter) as run:
        keep = False
        try:
            run(get_stage("cleanup"))  # servers of an earlier run that was killed
            refuse(make_plan(config, overrides or ()).findings)
            results = [_as_task(stage, run) for stage in all_stages()]
            report = results[-1]
            _publish(report)
            gates.require(report.figures["gates"])
            keep = deployment.server.after == "keep"
        except HostUnreachable:
            keep = True  # nothing can be stopped there now: what runs goes on, and the next run finds it
            raise
        finally:
            if not keep:
                run(get_stage("cleanup"))  # outside of Prefect: it has to work when the flow is being torn down
    return {result.name: {"status": result.status, "seconds": result.seconds} for result in results}


def _as_task(stage: Stage, run_stage: Callable[[Stage], StageResult]) -> StageResult:
    """Runs a stage as a Prefect task of its name. A skipped stage shows as state `Skipped`."""

    results: list[StageResult] = []

    def run() -> State[None]:
        result = run_stage(stage)
        results.append(result)  # not the task's own result, which Prefect would store
        if result.status == "skipped":
            return Completed(name="Skipped", message="its fingerprint is unchanged")
        return Completed(message=f"{result.seconds:.1f} s")

    # A new task for each stage, without parameters: Prefect would walk through and store them.
    task(name=stage.name, task_run_name=stage.name, cache_policy=NO_CACHE, persist_result=False)(run)()
    return results[0]


def _publish(report: StageResult) -> None:
    """The report as Prefect artifacts: table, summary, link to the page."""
    page = report.dir / "report.html"
    create_table_artifact(key="slipstream-table", table=report.figures["table"], description=report.figures["verdict"])
    create_markdown_artifact(key="slipstream-report", markdown=report.figures["markdown"])
    create_link_artifact(key="slipstream-page", link=page.absolute().as_uri(), link_text="report.html")

"""Shares of the prompts over the hosts of a deployment: mapped tasks, by one of Prefect's task runners.

Threads of this process do for any number of hosts: each waits for its host and computes nothing. Ray is for clusters
whose workers see this project and its working directory, by the same paths (extra `ray`).
"""

from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task, unmapped
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from slipstream.configs.load import load
from slipstream.engine.errors import SlipstreamError
from slipstream.flows.log_reporter import LogReporter
from slipstream.tasks.hosts.fleet import SHARED_STAGES, fetched_share, lay_shares, run_share, stop_shares
from slipstream.tasks.hosts.open_host import each_deployment, open_host

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment
    from slipstream.flows.deployed import Deployed

WHOLE = SHARED_STAGES[1:]  # what the shares do the work of


@task(name="share", task_run_name="share-{number}-of-{count}", cache_policy=NO_CACHE, persist_result=False)
def share(number: int, count: int, config: str, overrides: list[str]) -> str:
    """Answers and extracts one share on a host of the deployment that lives. Returns the folder that it was fetched to.

    Needs nothing of the flow's memory: a task runner may carry it to another process.
    """
    deployment, logger = load(config, overrides).deployment, get_run_logger()
    workdir = deployment.host.workdir
    found = fetched_share((number, count), deployment, workdir)
    if found is not None:
        logger.info("share %d of %d lies here already", number, count)
        return str(found)
    return str(run_share(number, deployment, workdir, LogReporter(logger), count=count))


def fan_out(here: "Deployed", config: str, overrides: list[str]) -> int:
    """Has the shares done and laid where the whole run's stages take them as done work. Returns their number.

    Nothing happens on one host, and where the whole is done. The whole run's own host must live; of the others, what a
    dead one had is done by another. Raises what a share raises, once the others were stopped.
    """
    deployment, count = here.deployment, len(here.deployment.host.each)
    if count < 2 or here.run.look(WHOLE[-1:])[0].done:
        return 0

    def say(text: str) -> None:
        here.reporter.say("extract", text, markup=False)

    task: Any = share  # its result may be awaitable for map, which that of a plain function is not
    with task_runner(deployment) as runner:
        futures = runner.map(
            task, {"number": range(count), "count": unmapped(count), "config": unmapped(config),
                    "overrides": unmapped(overrides)},
        )  # fmt: skip
        try:
            for future in futures:
                future.result()
        except BaseException:
            stop_shares(deployment, here.workdir, say)  # threads follow their jobs: they end with them
            raise
    host = open_host(each_deployment(deployment)[0])
    try:
        return lay_shares(host, deployment, here.workdir, say)
    finally:
        host.close()


def task_runner(deployment: "Deployment") -> "TaskRunner[Any]":
    """The task runner that host.task_runner names. Raises SlipstreamError where it is not installed."""
    if deployment.host.task_runner == "threads":
        return ThreadPoolTaskRunner(max_workers=len(deployment.host.each))
    try:
        from prefect_ray import RayTaskRunner
    except ImportError as error:
        raise SlipstreamError(
            f"host.task_runner = ray needs the package prefect-ray: {error}",
            expected="Slipstream with its extra ray",
            do="pip install 'slipstream[flows,ray]', or host.task_runner: threads, which does for any number of hosts",
        ) from error
    runner: TaskRunner[Any] = RayTaskRunner()
    return runner

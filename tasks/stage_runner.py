"""Where a deployment's stages run: on this machine, or on its far host. Whoever runs stages asks here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.tasks.checks import refuse_far_host
from slipstream.tasks.registry import all_stages
from slipstream.tasks.reporting import Reporter
from slipstream.tasks.stage import Stage, StageResult, run_stage

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

FROM_HOST = "from-host"  # below the working directory here: what was fetched for people


@contextmanager
def stage_runner(
    deployment: "Deployment", workdir: Path, reporter: Reporter, *, force: bool = False
) -> Iterator[Callable[[Stage], StageResult]]:
    """Yields what runs one stage and follows it to its end.

    Args:
        deployment: names the host.
        workdir: of the stages here; on a far host its name is that of the run there.
        reporter: told what the stages tell.
        force: repeat what is done.

    On a far host a stage is a job, which goes on when we are interrupted; the cleanup first stops those that still run.
    """
    if deployment.host.kind == "local":
        yield lambda stage: run_stage(stage, deployment, workdir, reporter, force=force)
        return
    from slipstream.tasks.hosts.far_stage import run_far_stage, stop_far_stages
    from slipstream.tasks.hosts.open_host import open_host

    host = open_host(deployment)

    def run(stage: Stage) -> StageResult:
        if stage not in all_stages():
            refuse_far_host(deployment, f"a stage {stage.name} that was changed here")
        if stage.name == "cleanup":
            stop_far_stages(host, workdir, lambda text: reporter.say(stage.name, text, markup=False))
        return run_far_stage(host, stage.name, deployment, workdir, reporter, force=force)

    try:
        yield run
    finally:
        host.close()


def stage_folder(deployment: "Deployment", workdir: Path, stage: str) -> Path:
    """Where a finished stage's manifest is on this machine."""
    return workdir / stage if deployment.host.kind == "local" else workdir / FROM_HOST / stage

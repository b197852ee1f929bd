"""Where a deployment's stages run: on this machine, or on its far host. Whoever runs stages asks here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.checks import refuse_far_host
from slipstream.tasks.registry import get_stage, is_registered
from slipstream.tasks.reporting import Reporter
from slipstream.tasks.stage import Stage, StageResult, run_stage
from slipstream.tasks.stage_look import StageLook, look_at

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment
    from slipstream.tasks.hosts.host import Host

FROM_HOST = "from-host"  # below the working directory here: what was fetched for people
ENDS_STAGES = ("cleanup", "restore")  # these first stop what of the run's stages still runs on a far host


class StageRunner(Protocol):
    """Runs stages of one deployment where they run."""

    def __call__(self, stage: Stage) -> StageResult:
        """Runs a stage and follows it to its end."""

    def look(self, names: Sequence[str]) -> list[StageLook]:
        """What lies there of the named stages; starts and changes nothing."""


class _Here:
    def __init__(self, deployment: "Deployment", workdir: Path, reporter: Reporter, force: bool) -> None:
        self._deployment, self._workdir, self._reporter, self._force = deployment, workdir, reporter, force

    def __call__(self, stage: Stage) -> StageResult:
        return run_stage(stage, self._deployment, self._workdir, self._reporter, force=self._force)

    def look(self, names: Sequence[str]) -> list[StageLook]:
        return [look_at(get_stage(name), self._deployment, self._workdir) for name in names]


class _Far:
    def __init__(self, host: "Host", deployment: "Deployment", workdir: Path, reporter: Reporter, force: bool) -> None:
        self._host, self._deployment, self._workdir = host, deployment, workdir
        self._reporter, self._force = reporter, force

    def __call__(self, stage: Stage) -> StageResult:
        from slipstream.tasks.hosts.far_stage import run_far_stage, stop_far_stages

        if not is_registered(stage):
            refuse_far_host(self._deployment, f"a stage {stage.name} that was changed here")
        together = self._deployment.training.hosts == "all" and bool(self._deployment.host.more)
        if stage.name in ENDS_STAGES:

            def say(text: str) -> None:
                self._reporter.say(stage.name, text, markup=False)

            left = stop_far_stages(self._host, self._workdir, say)
            if self._deployment.host.more:
                from slipstream.tasks.hosts.fleet import stop_shares

                stop_shares(self._deployment, self._workdir, say)
            if together:
                from slipstream.tasks.hosts.far_training import stop_nodes

                stop_nodes(self._deployment, self._workdir, say)
            if left:
                return self._and_refuse(stage, left)
        if stage.name == "train" and together:
            from slipstream.tasks.hosts.far_training import train_over_hosts

            return train_over_hosts(self._host, self._deployment, self._workdir, self._reporter, force=self._force)
        if stage.name == "restore" and self._deployment.host.more:
            from slipstream.tasks.hosts.replicas import read_roll, take_back

            if read_roll(self._workdir) is not None:
                return take_back(self._deployment, self._workdir, self._reporter)
        return run_far_stage(self._host, stage.name, self._deployment, self._workdir, self._reporter, force=self._force)

    def _and_refuse(self, stage: Stage, left: list[SlipstreamError]) -> StageResult:
        """Runs an end all the same; then raises for what was left before it, and in it."""
        from slipstream.tasks.cleanup import refuse_left
        from slipstream.tasks.hosts.far_stage import FarStageFailed, run_far_stage

        try:
            run_far_stage(self._host, stage.name, self._deployment, self._workdir, self._reporter, force=self._force)
        except FarStageFailed as error:
            left = [*left, error]
        refuse_left(left)
        raise AssertionError("something was left")

    def look(self, names: Sequence[str]) -> list[StageLook]:
        from slipstream.tasks.hosts.far_look import far_looks

        return far_looks(self._host, names, self._deployment, self._workdir)


@contextmanager
def stage_runner(
    deployment: "Deployment", workdir: Path, reporter: Reporter, *, force: bool = False
) -> Iterator[StageRunner]:
    """Yields what runs one stage and follows it to its end.

    Args:
        deployment: names the host.
        workdir: of the stages here; on a far host its name is that of the run there.
        reporter: told what the stages tell.
        force: repeat what is done.

    On a far host a stage is a job, which goes on when we are interrupted; the cleanup first stops those that still run.
    """
    if deployment.host.kind == "local":
        yield _Here(deployment, workdir, reporter, force)
        return
    from slipstream.tasks.hosts.open_host import open_host

    host = open_host(deployment)
    try:
        yield _Far(host, deployment, workdir, reporter, force)
    finally:
        host.close()


def stage_folder(deployment: "Deployment", workdir: Path, stage: str) -> Path:
    """Where a finished stage's manifest is on this machine."""
    return workdir / stage if deployment.host.kind == "local" else workdir / FROM_HOST / stage

"""Stages run by hand, one after the other, without Prefect: on this machine, or on the deployment's far host."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment
    from slipstream.tasks.reporting import Reporter
    from slipstream.tasks.stage import Stage, StageResult

# Stages that start the deployment's server or need it; all others prepare a draft, whoever serves it.
SERVING_STAGES = ("tune", "launch", "benchmark")


def run_stages(
    names: tuple[str, ...],
    config: Path,
    overrides: list[str] | None,
    workdir: Path | None,
    *,
    as_json: bool,
    force: bool,
) -> "list[StageResult]":
    """Runs stages of the registry one after the other on the deployment's host, without Prefect.

    On a far host Ctrl-C ends only our looking on: what runs there goes on.
    """
    from slipstream.tasks.registry import get_stage

    return run_each(tuple(map(get_stage, names)), config, overrides, workdir, as_json=as_json, force=force)


def run_each(
    stages: "tuple[Stage, ...]",
    config: Path,
    overrides: list[str] | None,
    workdir: Path | None,
    *,
    as_json: bool,
    force: bool,
) -> "list[StageResult]":
    """The same for stages that are in no registry; those run on this machine only."""
    from slipstream.configs.load import load
    from slipstream.flows.signals import unwinding_signals
    from slipstream.tasks.checks import refuse_other_engine
    from slipstream.tasks.stage_runner import stage_runner

    deployment = load(config, overrides or ()).deployment
    for stage in stages:
        if stage.name in SERVING_STAGES:
            refuse_other_engine(deployment, f"stage {stage.name}")
    directory = deployment.host.workdir if workdir is None else workdir
    with (
        unwinding_signals(),
        _reporter(as_json) as reporter,
        stage_runner(deployment, directory, reporter, force=force) as run,
    ):
        return [run(stage) for stage in stages]


def stop_replicas(deployment: "Deployment", workdir: Path, *, as_json: bool) -> None:
    """Ends the servers that a roll has left on the further hosts of a deployment, where there are any."""
    if not deployment.host.more:
        return
    from slipstream.flows.signals import unwinding_signals
    from slipstream.tasks.hosts.replicas import stop_others

    with unwinding_signals(), _reporter(as_json) as reporter:
        stop_others(deployment, workdir, reporter)


@contextmanager
def _reporter(as_json: bool) -> "Iterator[Reporter]":
    """JSON lines for programs, bars for a person."""
    if as_json:
        from slipstream.tasks.reporting import JsonLinesReporter

        yield JsonLinesReporter(sys.stdout)
        return
    from slipstream.flows.progress import RichReporter

    with RichReporter() as reporter:
        yield reporter

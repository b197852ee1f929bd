"""What happens when a flow run ends badly: hooks that need nothing of the flow's memory.

Prefect calls them in the flow's own process after a failure, and in the worker's after a cancellation or a crash. There
the flow, its locks and its working directory are gone. What runs on the host is known from records on disk, so the
hook runs a stage that reads them, in a process of its own that stands where the deployment's flows stand. A run that
never got its working directory, or took its note there back, has left nothing: what runs there is another's.

Prefect's worker calls hooks by keyword: the parameters must be called flow, flow_run and state.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.client.orchestration import get_client
from prefect.logging.loggers import flow_run_logger

from slipstream.configs.load import load
from slipstream.flows.events import tell
from slipstream.flows.run_record import AFTER, UNWOUND, read_run
from slipstream.tasks.process import python_module

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun, State

IN_USE = " is in use by process "  # the words of tasks.lock.WorkdirInUse
LIMIT_SECONDS = 900.0
RECONNECT_SECONDS = 60  # to a far host; the run's own patience ended with it
AGAIN_SECONDS = 5.0
AWAY = " cannot be reached: "  # the words of tasks.hosts.ssh_connection


def stop_what_ran(flow: "Flow[..., Any]", flow_run: "FlowRun", state: "State[Any]") -> None:
    """Stops all that the run started and left, by the records on its host."""
    _afterwards(AFTER["lifecycle"], flow, flow_run, state)


def bring_back(flow: "Flow[..., Any]", flow_run: "FlowRun", state: "State[Any]") -> None:
    """Stops what was half launched, and brings the last good server back, unless a clean end had stopped it."""
    _afterwards(AFTER["serve"], flow, flow_run, state)


def _afterwards(stage: str, flow: "Flow[..., Any]", flow_run: "FlowRun", state: "State[Any]") -> None:
    parameters = flow_run.parameters
    how = str(state.type.value).lower()
    tell(f"run.{how}", Path(str(parameters.get("config", ""))).with_suffix(""), flow=flow.name, message=state.message)
    if str(flow_run.id) in UNWOUND:
        return  # our own process: it has cleaned up on its way out
    logger = flow_run_logger(flow_run, flow)
    directory = _directory(flow_run)
    workdir = (
        directory / load(directory / parameters["config"], parameters.get("overrides") or ()).deployment.host.workdir
    )
    holder = read_run(workdir)
    if holder is None or holder.flow_run_id != str(flow_run.id):
        whose = "no run's" if holder is None else f"of {holder.flow} run {holder.flow_run_id}"
        logger.info("%s", f"stage {stage} is left out: {workdir} is {whose}, and what runs there is not this run's")
        return
    overrides = [*(parameters.get("overrides") or ()), f"host.reconnect_seconds={RECONNECT_SECONDS}"]
    words = ["stage", stage, str(parameters["config"]), "--json", *(w for o in overrides for w in ("--set", o))]
    deadline = time.monotonic() + RECONNECT_SECONDS
    while True:
        done = subprocess.run(
            [*python_module("slipstream.flows.cli"), *words],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        # A command does not wait for a host that it has not reached yet; after a run that did reach it, we do.
        if done.returncode == 0 or AWAY not in done.stdout or time.monotonic() + AGAIN_SECONDS > deadline:
            break
        time.sleep(AGAIN_SECONDS)
    for line in done.stdout.splitlines():
        logger.info("%s", _words(line))
    if done.returncode and IN_USE in done.stdout:
        logger.info("another run has the working directory by now, and what is in it")
    elif done.returncode:
        raise RuntimeError(
            f"stage {stage} after the run ended with exit code {done.returncode}; by hand: "
            f"`slipstream stage {stage} {parameters['config']}` (runbooks/left-over-server.md)"
        )


def _directory(flow_run: "FlowRun") -> Path:
    """Where the deployment's flows stand, so that relative paths mean the same; for a script run, where we stand."""
    if flow_run.deployment_id is None:
        return Path.cwd()
    with get_client(sync_client=True) as client:
        steps = client.read_deployment(flow_run.deployment_id).pull_steps or []
    for step in steps:
        for name, inputs in step.items():
            if name.endswith("set_working_directory"):
                return Path(str(inputs["directory"]))
    return Path.cwd()


def _words(line: str) -> str:
    """A line of `--json` as a person reads it."""
    try:
        event = json.loads(line)
        return str(event.get("text") or event.get("error") or f"{event['stage']} {event['event']}")
    except (ValueError, KeyError, AttributeError):
        return line

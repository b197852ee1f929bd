"""`slipstream up`: a Prefect server and a worker for a project, with its deployments and the hosts' limits.

Both are detached processes with state files below one folder, so that the same command finds them running, and
`--stop` ends them and proves it. Database, results and profiles are in that folder, too; nothing goes to the home.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from slipstream.engine.errors import SlipstreamError
from slipstream.flows import prefect_server as own_server
from slipstream.tasks.cleanup import check_port
from slipstream.tasks.lock import workdir_lock
from slipstream.tasks.ports import free_port
from slipstream.tasks.process import (
    STATE_SUFFIX,
    Detached,
    ProcessIdentity,
    ProcessRecord,
    forget,
    group_members,
    is_alive,
    read_record,
    signal_group,
    start_detached,
    stop_group,
    tail,
)

POOL = "local"
PREFECT_FILE = "prefect.yaml"
SERVER, WORKER = f"server{STATE_SUFFIX}", f"worker{STATE_SUFFIX}"
COMMAND_SECONDS = 180.0
WORKER_STOP_SECONDS = 30.0
FLOW_STOP_SECONDS = 900.0  # a flow run stops its servers and brings one back, or a hook after it does: minutes, by size
TELL_SECONDS = 15.0
# The worker asks for work this often; Prefect's own 10 s make a person wait.
QUERY_SECONDS = "2"


@dataclass(frozen=True)
class Up:
    """What runs: the API's URL, the page's, and a line for each thing that was done or found."""

    api: str
    page: str
    said: tuple[str, ...]


@dataclass(frozen=True)
class Stopped:
    """A line for each thing that was ended or found, and why others were left."""

    said: tuple[str, ...]
    left: tuple[SlipstreamError, ...]


def up(project: Path, home: Path, port: int) -> Up:
    """Starts what is not running yet: server, work pool, deployments of `project`/prefect.yaml, limits, worker.

    Args:
        project: directory in which the flows shall stand.
        home: folder of server and worker.
        port: of the server; 0 for any free one. A running server keeps its own.

    Raises SlipstreamError when there is no prefect.yaml, when the port is held, when something does not start.
    """
    file = project / PREFECT_FILE
    if not file.is_file():
        raise SlipstreamError(
            f"there is no {PREFECT_FILE} in {project}",
            expected="the deployments of the flows",
            do="give the command in the project's directory; the one of Slipstream's sources is an example",
            runbook="prefect-server.md",
        )
    deployments = _deployments(file)
    with workdir_lock(home, setting="--home", option="--home"):
        said: list[str] = []
        given = os.environ.get("PREFECT_API_URL")
        with _environment(home):
            api = given or _server(home, port, said)
            with _environment(home, PREFECT_API_URL=api):
                _register(project, deployments, said)
                _worker(home, api, said)
    page = api.removesuffix("/api")
    return Up(api, page, tuple(said))


def stop(home: Path) -> Stopped:
    """Ends the worker, with its flow runs, then the server, also on a full disk. Returns a line for each.

    Raises SlipstreamError, once the other one has ended, for one whose record is damaged or that does not end.
    """
    said, left = [], []
    with workdir_lock(home, setting="--home", option="--home", needs_room=False):
        for state, what, seconds in (
            (WORKER, "worker", WORKER_STOP_SECONDS),
            (SERVER, "server", own_server.STOP_SECONDS),
        ):
            try:
                record = read_record(home / state)
                if record is None or not group_members(record.identity):
                    said.append(f"{what}: not running")
                else:
                    if state == WORKER:
                        said += _end_flow_runs(record.identity.pid)
                    report = stop_group(record.identity, drain_seconds=seconds)
                    said.append(f"{what}: stopped (process {record.identity.pid}, {report.seconds:.1f} s)")
                forget(home / state)
            except SlipstreamError as error:
                left.append(error)
                said.append(f"{what}: left: {error.found}")
    return Stopped(tuple(said), tuple(left))


def _end_flow_runs(worker: int, tell: Callable[[str], None] = print) -> list[str]:
    """Ends the worker's flow runs, which lead groups of their own, while the worker lives to clean up after them.

    A worker that is stopped leaves them running, with nobody to tell how they ended. All are told at once, and waited
    for until they and their hooks have made good, since a server that is loaded again takes its time.

    Returns a line for each.
    """
    try:
        process = psutil.Process(worker)
        runs = [identity for child in process.children() if (identity := ProcessIdentity.of(child.pid)) is not None]
        runs = [identity for identity in runs if identity.pgid == identity.pid]
        for identity in runs:
            signal_group(identity, signal.SIGTERM)
        started = told = time.monotonic()
        deadline = started + FLOW_STOP_SECONDS
        said, left = [], list(runs)
        while (left or process.children()) and time.monotonic() < deadline:  # their hooks are its children, too
            for identity in [one for one in left if not group_members(one)]:
                left.remove(identity)
                said.append(f"flow run of process {identity.pid}: ended ({time.monotonic() - started:.1f} s)")
            if time.monotonic() > told + TELL_SECONDS:
                told = time.monotonic()
                who = ", ".join(str(one.pid) for one in left) or "what is done after them"
                tell(f"waiting for flow runs to make good (process {who}), {told - started:.0f} s so far")
            time.sleep(0.1)
        for identity in left:
            stop_group(identity, drain_seconds=0)
            said.append(
                f"flow run of process {identity.pid}: killed after {FLOW_STOP_SECONDS:.0f} s; `slipstream abandon`"
            )
        return said
    except psutil.NoSuchProcess:
        return []


@contextmanager
def _environment(home: Path, **more: str) -> Iterator[None]:
    """Prefect's settings for us and for what we start; set before prefect is imported, and outranking any .env."""
    before = dict(os.environ)
    own = {**own_server.SETTINGS, "PREFECT_SERVER_UI_ENABLED": "true", "PREFECT_HOME": str(home.absolute())}
    os.environ.update({**{name: os.environ.get(name, value) for name, value in own.items()}, **more})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _server(home: Path, port: int, said: list[str]) -> str:
    record = _running(home / SERVER, own_server.STOP_SECONDS, "server", said)
    if record is not None:
        api = str(record.notes["api"])
        which = f"process {record.identity.pid}, since {record.started}"
        if not own_server.becomes_healthy(lambda: is_alive(record.identity), api):
            raise SlipstreamError(
                f"Prefect's server runs ({which}), and {api} does not answer",
                expected=f"an answer within {own_server.HEALTHY_SECONDS:.0f} s",
                do=f"read {record.log}; then `slipstream up --stop`, and this command again",
                runbook="prefect-server.md",
            )
        said.append(f"server: runs already ({which})")
        return api
    try:
        check_port(own_server.ADDRESS, port)
    except SlipstreamError as error:
        raise SlipstreamError(
            error.found,
            expected="a free port for Prefect's server; what holds it was not started from here, and is left alone",
            do="give --port 0 for any free one; or, if a Prefect server of yours is there, "
            f"`export PREFECT_API_URL=http://{own_server.ADDRESS}:{port}/api`: then only a worker is started, for it",
            runbook="prefect-server.md",
            fault=error.fault,
        ) from error
    started, api = own_server.start(home, port or free_port(), ui=True)
    said.append(f"server: started (process {started.identity.pid}), database {home / 'prefect.db'}")
    return api


def _register(project: Path, deployments: list[dict[str, Any]], said: list[str]) -> None:
    """Work pool, deployments and limits. Each is made or brought up to date, so that it may be repeated."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    from slipstream.configs.load import load
    from slipstream.flows.host_limit import create_limit, limit_name

    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(POOL)
        except ObjectNotFound:
            _prefect(project, "work-pool", "create", POOL, "--type", "process")
            said.append(f"work pool {POOL}: created")
    _prefect(project, "--no-prompt", "deploy", "--all")
    said.append(f"deployments: {len(deployments)} of {project / PREFECT_FILE}")
    configs = dict.fromkeys(str(entry["parameters"]["config"]) for entry in deployments)
    for name in dict.fromkeys(configs):
        path = project / name
        deployment = load(path).deployment
        made = create_limit(deployment)
        said.append(f"limit {limit_name(deployment)}: {'created' if made else 'there'} (one flow at a time)")


def _worker(home: Path, api: str, said: list[str]) -> None:
    record = _running(home / WORKER, WORKER_STOP_SECONDS, "worker", said)
    if record is not None and record.notes["api"] == api:
        said.append(f"worker: runs already (process {record.identity.pid}, since {record.started})")
        return
    if record is not None:  # of another server: its runs are told to that one
        said += _end_flow_runs(record.identity.pid)
        stop_group(record.identity, drain_seconds=WORKER_STOP_SECONDS)
    worker = start_detached(
        [sys.executable, "-P", "-m", "prefect", "worker", "start", "--pool", POOL, "--name", f"worker-{home.name}"],
        log=home / "worker.log",
        state_file=home / WORKER,
        env={"PREFECT_WORKER_QUERY_SECONDS": os.environ.get("PREFECT_WORKER_QUERY_SECONDS", QUERY_SECONDS)},
        notes={"api": api},
    )
    _wait_online(worker)
    said.append(f"worker: started (process {worker.identity.pid}), pool {POOL}, log {worker.record.log}")


def _wait_online(worker: Detached) -> None:
    """Waits until the server has heard of a worker of the pool."""
    from prefect.client.orchestration import get_client

    deadline = time.monotonic() + COMMAND_SECONDS
    with get_client(sync_client=True) as client:
        online = False
        while not online or worker.exit_code() is not None:  # one that was killed counts as online for a while
            online = any(str(one.status).endswith("ONLINE") for one in client.read_workers_for_work_pool(POOL))
            if worker.exit_code() is not None or time.monotonic() > deadline:
                raise SlipstreamError(
                    f"Prefect's worker did not start; its last lines: {tail(Path(worker.record.log)) or 'none'}",
                    expected=f"a worker of pool {POOL} within {COMMAND_SECONDS:.0f} s",
                    do=f"read {worker.record.log}",
                    runbook="prefect-server.md",
                )
            time.sleep(0.2)


def _prefect(project: Path, *words: str) -> None:
    """A command of Prefect's, in the project's directory. Raises SlipstreamError with its last lines."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "prefect", *words],
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    if done.returncode:
        raise SlipstreamError(
            f"`prefect {' '.join(words)}` ended with {done.returncode}: {done.stdout.strip()[-800:]}",
            expected="exit code 0",
            do=f"correct {project / PREFECT_FILE}, or what it names",
            runbook="prefect-server.md",
        )


def _deployments(file: Path) -> list[dict[str, Any]]:
    """The entries of prefect.yaml. Raises SlipstreamError for one without a config, or by a file's path."""
    try:
        entries = list(yaml.safe_load(file.read_text(encoding="utf-8"))["deployments"])
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise SlipstreamError(f"{file} has no list of deployments: {error}", expected="Prefect's form") from None
    for entry in entries:
        if ".py:" in str(entry.get("entrypoint", "")) or not (entry.get("parameters") or {}).get("config"):
            raise SlipstreamError(
                f"{file}: deployment {entry.get('name')} has entrypoint {entry.get('entrypoint')} and parameters "
                f"{entry.get('parameters')}",
                expected="a module as entrypoint (slipstream.flows.lifecycle:lifecycle) and parameters.config",
                do="write it as the others of Slipstream's prefect.yaml",
                runbook="prefect-server.md",
            )
    return entries


def _running(state_file: Path, drain_seconds: float, what: str, said: list[str]) -> ProcessRecord | None:
    """Who runs by a record; None for nobody. What a killed leader left of its group is ended first."""
    record = read_record(state_file)
    if record is None or is_alive(record.identity):
        return record
    report = stop_group(record.identity, drain_seconds=drain_seconds)
    rest = len(report.ended + report.killed)
    if rest:
        said.append(f"{what}: ended {rest} processes that a killed one (process {record.identity.pid}) had left")
    return None

"""A stage on the deployment's far host: the same `slipstream stage` runs there as a job, and is followed from here.

What the stages write stays on the host, below `runs/`, where the next stage reads it. Prompts travel from here; a
target or a draft named by a path lies there. The job goes on when we are interrupted; the same command finds it.
"""

import getpass
import json
import re
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import sha256_file
from slipstream.tasks.facts import HOLDOUT, prompts_path
from slipstream.tasks.hosts.follow import follow
from slipstream.tasks.hosts.host import Host, Job, JobStatus
from slipstream.tasks.hosts.host_lock import GPU_LOCK, LOCK_FOLDER
from slipstream.tasks.hosts.jobs import JOBS
from slipstream.tasks.hosts.provision import CURRENT
from slipstream.tasks.manifest import MANIFEST, write_json
from slipstream.tasks.registry import DRAIN, NAMES, get_stage
from slipstream.tasks.reporting import Reporter
from slipstream.tasks.stage import StageResult
from slipstream.tasks.stage_runner import FROM_HOST

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

RUNS = "runs"
DISK_FULL = "disk-full.md"
COMMAND_SECONDS = 180.0  # beside what a server may take to end: memory of GPUs, the port, the interpreter
INPUTS = "inputs"
OWN_PROMPTS = ("builtin", HOLDOUT)
WITHOUT_GPUS = ("resolve", "cleanup", "drain", "report")  # these may run beside another owner's job
FETCHED = ("report/report.html",)  # for people; everything else is read where it was written


class FarStageFailed(SlipstreamError):
    """A stage that ended on the far host with an error of its own; `exit_code` is that of the command there."""

    def __init__(self, found: str, *, exit_code: int, do: str, fault: str) -> None:
        super().__init__(found, expected="a stage that ends well", do=do, runbook="run-failed.md", fault=fault)
        self.exit_code = exit_code


def run_far_stage(
    host: Host,
    stage: str,
    deployment: "Deployment",
    workdir: Path,
    reporter: Reporter,
    *,
    force: bool = False,
    lock_folder: str = LOCK_FOLDER,
    env: Mapping[str, str] | None = None,
) -> StageResult:
    """Runs a stage on the host, or finds it running there, and follows it to its end.

    Args:
        host: the deployment's.
        stage: its name.
        deployment: as written here; its copy for the host is made of it.
        workdir: names the run on the host; what people look at is fetched into it.
        reporter: told what the stage tells there.
        force: repeat what is done.
        lock_folder: of the host's locks.
        env: variables of the stage there.

    Raises FarStageFailed with the stage's own words, and HostUnreachable; in the latter case the job goes on.
    """
    try:
        return _as_a_job(host, stage, deployment, workdir, reporter, force=force, lock_folder=lock_folder, env=env)
    except SlipstreamError as error:
        if get_stage(stage).needs_room or error.runbook != DISK_FULL:
            raise
        reporter.warn(stage, f"{error.found}; it runs there without a job")
        return _as_a_command(host, stage, deployment, workdir, reporter)


def _as_a_job(
    host: Host,
    stage: str,
    deployment: "Deployment",
    workdir: Path,
    reporter: Reporter,
    *,
    force: bool,
    lock_folder: str,
    env: Mapping[str, str] | None,
) -> StageResult:
    """In a session of its own, found again by the same question."""
    name = run_name(workdir)
    python = environment_python(host)
    base = host.directory
    config = send_deployment(host, deployment, base, name)
    command = (python, "-P", "-m", "slipstream.flows.cli", "stage", stage, config, "--json")
    job = Job(
        stage_job(name, stage),
        (*command, "--force") if force else command,
        env=env or {},
        owner=owner_of(name),
        locks=() if stage in WITHOUT_GPUS else (GPU_LOCK,),
        lock_folder=lock_folder,
    )
    status = host.start(job)
    if (
        status.attached and status.state != "running"
    ):  # an earlier run of it: whether it is still right, the stage knows
        status = host.start(replace(job, run=f"{time.time():.3f}"))
    elif status.attached:
        reporter.say(stage, f"found it running on {host.name} since {status.started}", markup=False)
    heard = _Heard(stage, reporter)
    ended = follow(host, status, heard.line)
    if ended.exit_code != 0 or heard.finished is None:
        raise _failed(host, ended, heard)
    folder = _fetch(host, stage, name, workdir)
    finished = heard.finished
    return StageResult(stage, finished["status"], finished["seconds"], finished["figures"], folder)


def _as_a_command(host: Host, stage: str, deployment: "Deployment", workdir: Path, reporter: Reporter) -> StageResult:
    """Writes nothing on the host but what the stage does, and ends with the connection: the deployment is its input."""
    name = run_name(workdir)
    seconds = deployment.server.shutdown_timeout_seconds + COMMAND_SECONDS
    words = (environment_python(host), "-P", "-m", "slipstream.flows.cli", "stage", stage, "/dev/stdin", "--json")
    done = host.run(words, stdin=json.dumps(_values_there(deployment, host.directory, name)), seconds=seconds)
    heard = _Heard(stage, reporter)
    for line in (*done.stdout.splitlines(), *done.stderr.splitlines()):
        heard.line(line)
    if done.exit_code != 0 or heard.finished is None:
        last = "\n".join(heard.other[-15:]) or "none"
        words_there = heard.failed["error"] if heard.failed is not None else f"its last lines:\n{last}"
        found = f"{words_there}\n  where: on {host.name}, exit code {done.exit_code}"
        raise FarStageFailed(found, exit_code=max(done.exit_code, 1), do="", fault="")
    folder, finished = _fetch(host, stage, name, workdir), heard.finished
    return StageResult(stage, finished["status"], finished["seconds"], finished["figures"], folder)


def stop_far_stages(host: Host, workdir: Path, say: Callable[[str], None]) -> list[SlipstreamError]:
    """Stops what of a run's stages still runs on the host, each with its whole group. Servers are the cleanup's.

    Returns why jobs of the run were left, as errors: those whose record is damaged.
    """
    stages = {f"{run_name(workdir)}-{stage}": stage for stage in (*NAMES, DRAIN.name)}
    left = []
    for status in host.jobs(f"{run_name(workdir)}-"):
        if status.name in stages and status.members:
            host.stop(status.name)
            say(f"stopped stage {stages[status.name]} on {host.name}, which ran since {status.started}")
        if status.state == "damaged":
            found, do = f"job {status.name} on {host.name}: {status.why}", f"look there in {JOBS}/{status.name}"
            left.append(SlipstreamError(found, expected="a job that can be read", do=do, runbook="left-over-server.md"))
    return left


def run_name(workdir: Path) -> str:
    """The name of a run on a host, and the first part of its jobs' names: that of its working directory here."""
    return re.sub(r"[^a-z0-9._-]", "-", workdir.name.lower()).lstrip("._-")[:40] or "default"


def stage_job(run: str, stage: str) -> str:
    """The name of a stage's job. Args: run: the run's name on the host."""
    return f"{run}-{stage}"


def owner_of(run: str) -> str:
    """Whose jobs a run's are: they share the host's locks. Args: run: its name on the host."""
    return f"{getpass.getuser()}@{socket.gethostname()}:{run}"


class _Heard:
    """The JSON lines of a stage, handed on to a listener here; other lines are kept for an error."""

    def __init__(self, stage: str, reporter: Reporter) -> None:
        self.finished: dict[str, Any] | None = None
        self.failed: dict[str, Any] | None = None
        self.other: list[str] = []
        self._stage, self._reporter = stage, reporter

    def line(self, text: str) -> None:
        try:
            event = json.loads(text)
            kind, stage = event.pop("event"), event.pop("stage")
        except (ValueError, KeyError, AttributeError, TypeError):
            self.other = [*self.other, text][-30:]
            return
        tell: dict[str, Callable[[], None]] = {
            "started": lambda: self._reporter.stage_started(stage, resumed=event["resumed"]),
            "progress": lambda: self._reporter.progress(stage, event.pop("done"), event.pop("total"), event),
            "say": lambda: self._reporter.say(stage, event["text"], markup=event["markup"]),
            "warn": lambda: self._reporter.warn(stage, event["text"]),
            "finished": lambda: self._reporter.stage_finished(stage, **event),
        }
        if kind == "failed":
            self.failed = event
        elif kind in tell:
            if kind == "finished" and stage == self._stage:
                self.finished = dict(event)
            tell[kind]()


def _failed(host: Host, ended: JobStatus, heard: _Heard) -> FarStageFailed:
    where = f"on {host.name} (log {ended.log})"
    code = ended.exit_code if ended.exit_code is not None and ended.exit_code > 0 else 1
    if heard.failed is not None:
        words = f"{heard.failed['error']}\n  where: {where}"
        return FarStageFailed(words, exit_code=code, do="", fault="")  # its own words say what to do
    how = f"{ended.state}{': ' + ended.why if ended.why else ''}, exit code {ended.exit_code}"
    last = "\n".join(heard.other[-15:]) or "none"
    words = f"the stage's job ended without a word {where}: {how}. Its last lines:\n{last}"
    do = "give the same command again: finished work is kept; where Slipstream has changed here, provision it first"
    return FarStageFailed(words, exit_code=code, do=do, fault="")


def environment_python(host: Host) -> str:
    """The Python of the environment that was provisioned last. Raises SlipstreamError where there is none."""
    current = host.read_json(CURRENT)
    if current is None:
        raise SlipstreamError(
            f"Slipstream is not installed on {host.name}",
            expected=f"an environment that {CURRENT} there names",
            do="run `slipstream host provision CONFIG` first",
            runbook="first-deployment.md",
        )
    return str(current["python"])


def send_deployment(host: Host, deployment: "Deployment", base: str, name: str) -> str:
    """Writes the deployment's copy for the host, where that host is local. Returns its path there."""
    values = _values_there(deployment, base, name)
    for section in ("data", "benchmark"):
        written = values[section]["prompts"]
        if written not in OWN_PROMPTS:
            values[section]["prompts"] = f"{base}/{_send_input(host, prompts_path(written))}"
    target = f"{RUNS}/{name}.deployment.json"  # JSON is YAML
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deployment"
        write_json(path, values)
        facts = host.file_facts(target)
        if facts is None or facts["sha256"] != sha256_file(path):
            host.put(path, target)
    return f"{base}/{target}"


def _values_there(deployment: "Deployment", base: str, name: str) -> dict[str, Any]:
    """The deployment as the host reads it, but for files that are sent there first."""
    values = deployment.model_dump(mode="json")
    values["host"] = {
        "kind": "local",
        "workdir": f"{base}/{RUNS}/{name}",
        "cache_dir": f"{base}/cache",
        "threads": deployment.host.threads,
    }
    return values


def _send_input(host: Host, path: Path) -> str:
    """A file of ours on the host, by its content. Returns its path below Slipstream's directory there."""
    if not path.is_file():
        raise SlipstreamError(f"there is no file {path}", expected="JSON lines of chats", do="correct the path")
    sha256 = sha256_file(path)
    target = f"{INPUTS}/{sha256[:16]}/{path.name}"
    if host.file_facts(target) is None:
        host.put(path, target)
    return target


def _fetch(host: Host, stage: str, name: str, workdir: Path) -> Path:
    """Brings the stage's manifest and what people look at; returns the folder that they are in."""
    folder = workdir / FROM_HOST / stage
    folder.mkdir(parents=True, exist_ok=True)
    for path in (f"{stage}/{MANIFEST}", *(path for path in FETCHED if path.startswith(f"{stage}/"))):
        host.get(f"{RUNS}/{name}/{path}", folder / Path(path).name)
    return folder

"""Detached jobs on the host they run on: start or attach, look, stop. Runs there, out of the archive.

A job is a folder: what was asked for, who runs it (state file), its log, and how it ended. All of it is on the host, so
that whoever asked may die, and a successor with the same question finds the same job.

    base/jobs/NAME/  job.json  job.state.json  begun.json  ended.json  SUBMISSION.log
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json
from slipstream.tasks.hosts.keeper import BEGUN, ENDED, SPEC, end
from slipstream.tasks.lock import guard
from slipstream.tasks.manifest import write_json
from slipstream.tasks.os_errors import takes_nothing
from slipstream.tasks.proc_stat import boot_id
from slipstream.tasks.process import (
    POLL_SECONDS,
    STATE_SUFFIX,
    ProcessRecord,
    forget,
    group_members,
    python_module,
    read_record,
    start_detached,
    stop_group,
    tail,
)

JOBS = "jobs"
STATE = f"job{STATE_SUFFIX}"
BEGIN_SECONDS = 60.0
LEAVE_SECONDS = 5.0


def start_job(base: Path, *, secrets: dict[str, str], env: dict[str, str], **spec: Any) -> dict[str, Any]:
    """Starts a job, or attaches to the one that the same submission started before, running or ended.

    Args:
        base: Slipstream's directory on this host.
        secrets: variables of the command that are written nowhere.
        env: its other variables.
        spec: name, submission (digest of all that was asked for), command, directory, owner, locks, lock_folder.

    Returns `job_status`, with `attached`. Raises SlipstreamError when a job of that name runs something else (F15),
    when a lock is held by another owner (F15), and when the command cannot be run.
    """
    folder = base / JOBS / spec["name"]
    folder.mkdir(parents=True, exist_ok=True)
    with guard(folder) as descriptor:
        old = _settled(folder, spec["submission"])
        if old is not None and old["submission"] == spec["submission"]:
            return {**old, "attached": True}
        if old is not None and old["members"]:
            raise SlipstreamError(
                f"job {spec['name']} runs something else on this host: {' '.join(old['command'])} "
                f"(processes {old['members']}, since {old['started']})",
                expected="one job of a name at a time",
                do="stop that job first, or give this one another name",
                runbook="left-over-server.md",
                fault="F15",
            )
        for name in (BEGUN, ENDED):
            (folder / name).unlink(missing_ok=True)
        write_json(folder / SPEC, {**spec, "variables": sorted([*env, *secrets])})
        started = start_detached(
            [*python_module("slipstream.tasks.hosts.keeper"), str(folder), str(descriptor)],
            log=folder / f"{spec['submission'][:12]}.log",
            state_file=folder / STATE,
            env={**env, **secrets},
            notes={key: spec[key] for key in ("submission", "command", "owner")},
            keep_open=(descriptor,),
        )
        _wait_until_begun(folder, started.record)
        now = _status(folder)
        assert now is not None
        return {**now, "attached": False}


def job_status(base: Path, *, name: str) -> dict[str, Any] | None:
    """What is known of a job; None when there is none of that name.

    `state` is running; exited (`exit_code`, -N: ended by signal N); stopped, by `stop_job`; or lost: it ended with its
    keeper, killed or by a reboot, and `why` says so. `members` are the living processes of its group.
    """
    folder = base / JOBS / name
    return _status(folder) if folder.is_dir() else None


def list_jobs(base: Path, *, prefix: str) -> list[dict[str, Any]]:
    """The status of every job whose name begins with `prefix`, by name.

    One whose record cannot be read has the state `damaged`, and `why`: it keeps nobody from the others.
    """
    found = (_status_or_why(folder) for folder in sorted((base / JOBS).glob("*")) if folder.name.startswith(prefix))
    return [status for status in found if status is not None]


def stop_job(base: Path, *, name: str, drain_seconds: float, kill_seconds: float) -> dict[str, Any] | None:
    """Ends a job's whole group and proves it; None when there is no job of that name.

    Raises SlipstreamError (F15) when a process survives even SIGKILL.
    """
    folder = base / JOBS / name
    if not folder.is_dir():
        return None
    with guard(folder):
        record = read_record(folder / STATE)
        if record is None:
            return None
        before = _ended(folder)
        report = stop_group(record.identity, drain_seconds=drain_seconds, kill_seconds=kill_seconds)
        if before is None and (report.ended or report.killed):
            after = _ended(folder) or {"exit_code": None}  # none: the keeper itself had to be killed
            try:
                end(folder, after["exit_code"], stopped=asdict(report))
            except OSError as error:
                if not takes_nothing(error):
                    raise  # a full disk keeps nothing from its end; it is told as lost from now on
        return {**(_status(folder) or {}), "ended_pids": report.ended, "killed_pids": report.killed}


def _status(folder: Path) -> dict[str, Any] | None:
    record = read_record(folder / STATE)
    if record is None:
        return None
    # In this order: a group that is gone has written all that it will ever write.
    members = [member.pid for member in group_members(record.identity)]
    ended = _ended(folder)
    log = Path(record.log)
    state, why = _state(record, members, ended)
    return {
        "name": folder.name,
        "submission": record.notes["submission"],
        "command": record.notes["command"],
        "owner": record.notes["owner"],
        "state": state,
        "why": why,
        "exit_code": None if ended is None else ended["exit_code"],
        "identity": {**asdict(record.identity), "session": record.identity.pgid},
        "members": members,
        "log": str(log),
        "log_bytes": log.stat().st_size if log.is_file() else 0,
        "started": record.started,
        "ended": None if ended is None else ended["ended"],
    }


def _status_or_why(folder: Path) -> dict[str, Any] | None:
    try:
        return _status(folder)
    except SlipstreamError as error:
        nothing: dict[str, Any] = {
            "submission": "",
            "command": [],
            "owner": "",
            "exit_code": None,
            "identity": {},
            "members": [],
        }
        told = {"name": folder.name, "state": "damaged", "why": f"{error.found}; {error.do}", "log": "", "log_bytes": 0}
        return {**nothing, **told, "started": "", "ended": None}


def _settled(folder: Path, submission: str) -> dict[str, Any] | None:
    """The status, once the keeper of an ended job has left: it writes how the job ended, and goes right after that."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while True:
        status = _status(folder)
        if status is None or status["submission"] == submission or status["state"] == "running":
            return status
        if not status["members"] or time.monotonic() > deadline:
            return status
        time.sleep(POLL_SECONDS)


def _state(record: ProcessRecord, members: list[int], ended: dict[str, Any] | None) -> tuple[str, str]:
    if ended is not None:
        return ("stopped", "stopped on request") if "stopped" in ended else ("exited", "")
    if members:
        return "running", ""
    if record.identity.boot_id != boot_id():
        return "lost", "the host was rebooted while it ran"
    return "lost", "it was killed together with its keeper"


def _ended(folder: Path) -> dict[str, Any] | None:
    path = folder / ENDED
    if not path.is_file():
        return None
    ended: dict[str, Any] = read_json(path, expected="how a job ended", do=f"delete {path}")
    return ended


def _wait_until_begun(folder: Path, record: ProcessRecord) -> None:
    """Waits for the keeper's word. A job that never ran leaves no record: the same submission may try again."""
    deadline = time.monotonic() + BEGIN_SECONDS
    while not (folder / BEGUN).is_file():
        gone = not group_members(record.identity)
        ended = _ended(folder)
        if ended is not None and "refused" in ended:
            stop_group(record.identity)
            forget(folder / STATE)
            raise SlipstreamError(**ended["refused"])
        if (gone and not (folder / BEGUN).is_file()) or time.monotonic() > deadline:
            stop_group(record.identity)
            forget(folder / STATE)
            raise SlipstreamError(
                f"the keeper of job {folder.name} did not start its command; its last lines: "
                f"{tail(Path(record.log)) or 'none'}",
                expected=f"a command that runs within {BEGIN_SECONDS:.0f} s",
                do=f"read {record.log}",
            )
        time.sleep(POLL_SECONDS)

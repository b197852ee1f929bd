"""What a host does when it is asked: one JSON request on standard input, one JSON answer on standard output.

Runs on the host, out of the archive (`archive.py`), with nothing but Python's standard library. No value ever stands on
a command line: the request carries them all.
"""

import getpass
import json
import os
import platform
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import sha256_file
from slipstream.tasks.hosts.commands import run_command
from slipstream.tasks.hosts.jobs import job_status, list_jobs, start_job, stop_job
from slipstream.tasks.hosts.machine_facts import machine_facts
from slipstream.tasks.os_errors import is_disk_full
from slipstream.tasks.proc_stat import boot_id
from slipstream.tasks.process import own_archive

MODULE = "slipstream.tasks.hosts.far_side"


def hello(base: Path) -> dict[str, Any]:
    """Who and what this host is, and what Slipstream's directory is called in full."""
    archive = own_archive()
    return {
        "host": socket.gethostname(),
        "user": _user(),
        "python": platform.python_version(),
        "boot_id": boot_id(),
        "time": time.time(),
        "directory": str(base),
        "archive": None if archive is None else sha256_file(Path(archive)),
    }


def settle_file(base: Path, *, temporary: str, target: str, sha256: str) -> None:
    """Renames an uploaded file to its name, if it is whole; else removes it and raises SlipstreamError."""
    path = base / temporary
    arrived = sha256_file(path)
    if arrived != sha256:
        path.unlink(missing_ok=True)
        raise SlipstreamError(
            f"{base / target} arrived with SHA-256 {arrived[:12]}...",
            expected=f"{sha256[:12]}..., as it was sent",
            do="send it again",
        )
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.replace(base / target)


def prepare_folder(base: Path, *, folder: str) -> dict[str, int]:
    """Makes a folder, and tells how many bytes its disk has free."""
    path = base / folder
    path.mkdir(parents=True, exist_ok=True)
    return {"free_bytes": shutil.disk_usage(path).free}


def file_facts(base: Path, *, path: str) -> dict[str, Any] | None:
    """Size and SHA-256 of a file; None when there is none."""
    file = base / path
    return {"bytes": file.stat().st_size, "sha256": sha256_file(file)} if file.is_file() else None


def remove_file(base: Path, *, path: str) -> None:
    """Removes a file, if it is there."""
    (base / path).unlink(missing_ok=True)


CALLS: dict[str, Callable[..., Any]] = {
    call.__name__: call
    for call in (
        hello,
        machine_facts,
        run_command,
        start_job,
        job_status,
        list_jobs,
        stop_job,
        settle_file,
        prepare_folder,
        file_facts,
        remove_file,
    )
}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`{"value": ...}`, `{"error": words for people}` or `{"broken": traceback}`."""
    base = Path.home() / request["base"]  # an absolute base stays what it is
    try:
        if not base.is_dir():
            base.mkdir(parents=True)
            base.chmod(0o700)  # logs and outputs are nobody else's
        return {"value": CALLS[request["call"]](base, **request["arguments"])}
    except SlipstreamError as error:
        return {"error": {key: getattr(error, key) for key in ("found", "expected", "do", "runbook", "fault")}}
    except OSError as error:
        if is_disk_full(error, base):
            free = shutil.disk_usage(base if base.is_dir() else Path.home()).free
            found = f"the disk of {base} is full ({free / 1e6:.1f} MB free): {error}"
            do = "free space there or set host.directory to a larger disk, then run the same command again"
            return {"error": {"found": found, "expected": "room on the host", "do": do, "runbook": "disk-full.md"}}
        found = f"the host's system refused {request['call']}: {error}"
        do = "correct the owner or the mode of that path, or set host.directory to another folder"
        return {"error": {"found": found, "expected": f"what user {_user()} may do below {base}", "do": do}}
    except Exception:
        return {"broken": traceback.format_exc()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def main() -> None:
    """Answers one request. The answer's line begins with the request's nonce: a login shell may print lines, too."""
    request = json.loads(sys.stdin.buffer.read())
    line = f"\n{request['nonce']} {json.dumps(answer(request))}\n"
    sys.stdout.write(line)
    sys.stdout.flush()


if __name__ == "__main__":
    main()

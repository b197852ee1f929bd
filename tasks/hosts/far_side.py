"""What a host does when it is asked: JSON requests on standard input, a line each, JSON answers on standard output.

Runs on the host, out of the archive (`archive.py`), with nothing but Python's standard library. No value ever stands on
a command line: the request carries them all.
"""

import getpass
import json
import os
import platform
import select
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
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
IDLE_SECONDS = 900.0  # then it ends: a connection that broke without a word leaves nobody behind


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
        "rsync": shutil.which("rsync") is not None,
    }


def settle_file(base: Path, *, temporary: str, target: str, sha256: str) -> None:
    """Renames an uploaded file to its name, if it is whole; else removes it and raises SlipstreamError."""
    path = base / temporary
    if not path.exists() and (base / target).is_file() and sha256_file(base / target) == sha256:
        return  # somebody else has sent the same file meanwhile
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


def prepare_folder(base: Path, *, folder: str, part: str) -> dict[str, int]:
    """Makes a folder, and tells how many bytes its disk has free and how many of a file `part` are there already."""
    path, begun = base / folder, base / part
    path.mkdir(parents=True, exist_ok=True)
    return {
        "free_bytes": shutil.disk_usage(path).free,
        "part_bytes": begun.stat().st_size if begun.is_file() else 0,
    }


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


def questions(descriptor: int, idle_seconds: float) -> Iterator[bytes]:
    """The lines of a descriptor, until its end, or until nobody has asked anything for `idle_seconds`."""
    rest = b""
    while select.select([descriptor], [], [], idle_seconds)[0]:
        block = os.read(descriptor, 65_536)
        *lines, rest = (rest + block).split(b"\n")
        if not block:
            lines, rest = [rest], b""
        yield from filter(None, lines)
        if not block:
            return


def main() -> None:
    """Answers until nobody asks. An answer's line begins with its request's nonce: a login shell may print, too."""
    asked = os.dup(sys.stdin.fileno())
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())  # no command of ours may swallow the next question
    os.chdir("/")
    for line in questions(asked, IDLE_SECONDS):
        request = json.loads(line)
        answered = f"\n{request['nonce']} {json.dumps(answer(request))}\n"
        try:
            sys.stdout.write(answered)
            sys.stdout.flush()
        except BrokenPipeError:  # whoever asked is gone; what was done stays done
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return


if __name__ == "__main__":
    main()

"""The keeper of a job: leads the job's session, starts the command, waits for it and keeps its exit code.

It outlives the SSH connection and whoever asked for the job. SIGTERM to the group is for the command; the keeper stays
until the command has ended, and only SIGKILL ends it earlier.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json
from slipstream.tasks.hosts.host_lock import LockHolder, held_by, holder_of, take_locks
from slipstream.tasks.manifest import write_json
from slipstream.tasks.process import NEUTRAL_DIRECTORY, ProcessIdentity

SPEC = "job.json"
BEGUN = "begun.json"  # the command runs
ENDED = "ended.json"  # its exit code, or why it never ran
NOT_STARTED = 127


def keep(folder: Path, guard_fd: int) -> None:
    """Runs the job of `folder` to its end. `guard_fd` holds the job's lock until the command runs or is refused."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a handler, not SIG_IGN: that the command would inherit
    spec = read_json(folder / SPEC, expected="the job that was written just before", do="start it again")
    try:
        folder_of_locks, holder = Path(spec["lock_folder"]), _holder(spec)
        take_locks(folder_of_locks, spec["locks"], holder)
        child = subprocess.Popen(
            spec["command"],
            cwd=spec["directory"] or NEUTRAL_DIRECTORY,
            env={**os.environ, **held_by(folder_of_locks, spec["locks"], holder)},
            stdin=subprocess.DEVNULL,
            close_fds=True,
        )
    except SlipstreamError as error:
        end(folder, None, refused=_words(error))
        return
    except OSError as error:
        found = f"the command of job {spec['name']} cannot be run: {error}"
        expected = "a program and a directory that are there"
        do = f"correct the command: {spec['command'][0]}"
        end(folder, NOT_STARTED, refused=_words(SlipstreamError(found, expected=expected, do=do)))
        return
    write_json(folder / BEGUN, {"pid": child.pid})
    os.close(guard_fd)
    end(folder, child.wait())


def end(folder: Path, code: int | None, **why: Any) -> None:
    """Notes how a job ended: exit code (-N: by signal N) or None where nobody could see it, and why."""
    write_json(folder / ENDED, {"exit_code": code, "ended": time.strftime("%Y-%m-%d %H:%M:%S%z"), **why})


def _holder(spec: dict[str, Any]) -> LockHolder:
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    return holder_of(spec["owner"], spec["name"], me)


def _words(error: SlipstreamError) -> dict[str, str]:
    return {key: getattr(error, key) for key in ("found", "expected", "do", "runbook", "fault")}


if __name__ == "__main__":
    keep(Path(sys.argv[1]), int(sys.argv[2]))

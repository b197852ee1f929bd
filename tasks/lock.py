"""One run at a time in a working directory. The lock names its holder; the lock of a dead holder is no lock."""

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.manifest import command_line, write_json
from slipstream.tasks.os_errors import takes_nothing
from slipstream.tasks.proc_stat import boot_id, process_start_time

LOCK = ".lock"
POLL_SECONDS = 0.2


class WorkdirInUse(SlipstreamError):
    """A living process holds the working directory."""


@contextmanager
def workdir_lock(
    workdir: Path, *, setting: str = "host.workdir", option: str = "--workdir", needs_room: bool = True
) -> Iterator[None]:
    """Holds `workdir` for this process; nested use by the same process is free.

    Args:
        workdir: the folder; it is made.
        setting, option: what names it in errors: in the deployment file, and on the command line.
        needs_room: False for what must also be done on a disk that takes nothing. There the folder itself is held,
            which others wait for without being told who it is; nested use would wait for itself.

    Raises SlipstreamError when a living process holds it, naming that process, and when it is no directory that can be
    written. A full disk stays an OSError.
    """
    path = workdir / LOCK
    me = {"pid": os.getpid(), "start_time": process_start_time(os.getpid()), "boot_id": boot_id()}
    held = ExitStack()
    with _usable(workdir, setting, option), held:
        held.enter_context(guard(workdir))
        holder = read_holder(path)
        nested = holder is not None and _same(holder, me)
        if holder is not None and not nested and _alive(holder):
            raise WorkdirInUse(
                f"{workdir} is in use by process {holder['pid']} "
                f"(`{holder.get('command', '?')}`, since {holder.get('since', '?')})",
                expected="one run at a time in a working directory",
                do=f"wait for it, stop it with `kill {holder['pid']}`, or choose another {setting}",
            )
        if not nested:
            try:
                write_json(path, {**me, "command": command_line(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
            except OSError as error:
                if needs_room or not takes_nothing(error):
                    raise
                held = held.pop_all()  # the guard is kept
    try:
        yield
    finally:
        held.close()
        if not nested:
            with guard(workdir):
                holder = read_holder(path)
                if holder is not None and _same(holder, me):
                    path.unlink(missing_ok=True)


@contextmanager
def patient_workdir_lock(workdir: Path, seconds: float, say: Callable[[str], None]) -> Iterator[None]:
    """The same, after waiting for up to `seconds` for who holds it; `say` is told who, once."""
    deadline, told = time.monotonic() + seconds, False
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(workdir_lock(workdir))
                break
            except WorkdirInUse as error:
                if time.monotonic() > deadline:
                    raise
                if not told:
                    say(f"waiting: {error.found}")
                    told = True
            time.sleep(POLL_SECONDS)
        yield


@contextmanager
def _usable(workdir: Path, setting: str, option: str) -> Iterator[None]:
    """Makes `workdir`; what the system says against it or against taking its lock becomes an error for people."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # its own error: `os_errors.explain_os_errors`
        lock, other = workdir / LOCK, setting if setting == option else f"{setting} (or {option})"
        file = next((path for path in (workdir, *workdir.parents) if _is(path.is_file)), None)
        if _is(lock.is_dir):
            found, do = f"{lock} is a directory", f"delete {lock} and run again"
        elif file is not None:
            below = "is" if file == workdir else f"lies below {file}, which is"
            found, do = f"{setting} {workdir} {below} a file", f"set {other} to another folder"
        else:
            found = f"{setting} {workdir} cannot be used: {error}"
            do = f"change its owner, or set {other} to another folder"
        expected = f"a directory that user {os.getuid()} can make and write"
        raise SlipstreamError(found, expected=expected, do=do) from error


def _is(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError:  # below a folder that may not be read
        return False


@contextmanager
def guard(folder: Path) -> Iterator[int]:
    """The moment of reading and taking a lock in a directory, for one process at a time.

    Yields the descriptor that holds it; the kernel frees it when we and all who inherited it have closed it or died.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def read_holder(path: Path) -> dict[str, Any] | None:
    """Who holds a lock; None for no file and for one that names no process."""
    try:
        holder = json.loads(path.read_text())
    except (OSError, ValueError):
        return None  # half written by a process that died: nobody holds it
    whole = isinstance(holder, dict) and all(type(holder.get(key)) is int for key in ("pid", "start_time"))
    return holder if whole else None  # without both it names no process


def _same(holder: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(holder.get(key) == other[key] for key in ("pid", "start_time", "boot_id"))


def _alive(holder: dict[str, Any]) -> bool:
    return holder.get("boot_id") == boot_id() and process_start_time(holder["pid"]) == holder.get("start_time")

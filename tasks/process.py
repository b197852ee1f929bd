"""Detached processes: start one, recognise it again later, stop it whole.

A process is started as leader of its own session, so that it outlives us and that everything it starts can be found by
group and session, whatever name it takes and whoever its parent has become. It is known by pid, group, start time and
boot; a name is never looked at.

    start_detached  ->  state file  ->  is_alive, group_members, stop_group

The state file is written by the process itself before it turns into its command (`main` below): there is no moment in
which it runs unrecorded, even if we are killed in between.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json
from slipstream.tasks.manifest import write_json
from slipstream.tasks.proc_stat import Member, boot_id, process_start_time, read_stat

POLL_SECONDS = 0.05
START_SECONDS = 60.0  # for the interpreter to come up and write the state file, on a very busy machine
NEUTRAL_DIRECTORY = "/"
STATE_SUFFIX = ".state.json"  # <workdir>/<name>.state.json names a process that runs in `workdir` started


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of one boot.

    Args:
        pid: its id, which the kernel gives to others later.
        pgid: its process group, equal to its session, since it leads both.
        start_time: clock ticks since boot (field 22 of /proc/PID/stat): tells it from a later holder of the pid.
        boot_id: tells the boot.
    """

    pid: int
    pgid: int
    start_time: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """The identity of a running process; None when there is none."""
        entry = read_stat(pid)
        return None if entry is None else cls(pid, entry.pgid, entry.start_time, boot_id())


@dataclass(frozen=True)
class ProcessRecord:
    """Contents of a state file: who runs, as what, and what its starter noted about it."""

    identity: ProcessIdentity
    command: tuple[str, ...]
    log: str
    started: str
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StopReport:
    """What it took to stop a group: pids that ended after SIGTERM, pids that needed SIGKILL, seconds in all."""

    ended: tuple[int, ...]
    killed: tuple[int, ...]
    seconds: float


@dataclass
class Detached:
    """A process that we started. `exit_code` is known while we live; the log and the state file outlive us."""

    record: ProcessRecord
    state_file: Path
    _child: subprocess.Popen[bytes]

    @property
    def identity(self) -> ProcessIdentity:
        return self.record.identity

    def exit_code(self) -> int | None:
        """Exit code (-N: ended by signal N), or None while it runs."""
        return self._child.poll()


def start_detached(
    command: Sequence[str],
    *,
    log: Path,
    state_file: Path,
    env: dict[str, str] | None = None,
    notes: dict[str, Any] | None = None,
    keep_open: Sequence[int] = (),
) -> Detached:
    """Starts `command` in its own session, with a neutral working directory and its output in `log`.

    Args:
        command: program and arguments, handed over as they are (no shell); for Python `python -P -m ...`.
        log: file for stdout and stderr; begun anew.
        state_file: where the identity is written.
        env: variables added to our own.
        notes: JSON values kept in the state file.
        keep_open: file descriptors that the command inherits, such as one that holds a lock until it lives.

    Raises SlipstreamError when `state_file` names a process that still runs, or when the command cannot be started.
    """
    old = read_record(state_file)
    if old is not None and group_members(old.identity):
        raise SlipstreamError(
            f"{state_file} names process {old.identity.pid}, which still runs: {' '.join(old.command)}",
            expected="that it was stopped before its successor starts",
            do="run `slipstream clean CONFIG`",
            fault="F15",
        )
    state_file.unlink(missing_ok=True)
    for folder in (log.parent, state_file.parent):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(_notes_file(state_file), notes or {})
    trampoline = [*python_module("slipstream.tasks.process"), str(state_file.absolute()), str(log.absolute())]
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*trampoline, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=NEUTRAL_DIRECTORY,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            pass_fds=keep_open,
        )
    record = _wait_for_record(state_file, child, log)
    return Detached(record, state_file, child)


def own_archive() -> str | None:
    """The archive that we run out of, on a host (tasks/hosts/archive.py); None where we are installed."""
    return getattr(globals().get("__loader__"), "archive", None)  # zipimport's


def python_module(name: str) -> list[str]:
    """The command that runs a module of ours by this Python: out of the archive where we run out of one ourselves."""
    archive = own_archive()
    return [sys.executable, "-P", "-m", name] if archive is None else [sys.executable, "-I", archive, name]


def _wait_for_record(state_file: Path, child: subprocess.Popen[bytes], log: Path) -> ProcessRecord:
    deadline = time.monotonic() + START_SECONDS
    while True:
        record = read_record(state_file)
        if record is not None:
            return record
        if child.poll() is not None or time.monotonic() > deadline:
            child.kill()
            raise SlipstreamError(
                f"the process could not be started (exit code {child.wait()}); its last lines: {tail(log) or 'none'}",
                expected=f"a state file at {state_file}",
                do=f"read {log}",
            )
        time.sleep(POLL_SECONDS)


def _notes_file(state_file: Path) -> Path:
    return state_file.with_name(f"{state_file.name}.notes")


def read_record(state_file: Path) -> ProcessRecord | None:
    """The record in a state file; None when there is no file. Raises SlipstreamError on a file that is not one."""
    if not state_file.is_file():
        return None
    expected = "keys identity, command, log, started, notes"
    do = f"look whether the process that it should name still runs, then delete {state_file}"
    value = read_json(state_file, expected=expected, do=do)
    try:
        identity = ProcessIdentity(**value["identity"])
        record = ProcessRecord(identity, tuple(value["command"]), value["log"], value["started"], value["notes"])
        numbers = (identity.pid, identity.pgid, identity.start_time)
        if not (all(type(number) is int for number in numbers) and isinstance(record.notes, dict)):
            raise TypeError(f"{identity}, notes {record.notes}")
        return record
    except (KeyError, TypeError) as error:
        raise SlipstreamError(
            f"{state_file} is not the state file of a process: {error!r}",
            expected=expected,
            do=do,
        ) from error


def forget(state_file: Path) -> None:
    """Removes the state file of a process that is proven gone."""
    state_file.unlink(missing_ok=True)
    _notes_file(state_file).unlink(missing_ok=True)


def is_alive(identity: ProcessIdentity) -> bool:
    """Same boot, same start time, and not a zombie."""
    return identity.boot_id == boot_id() and process_start_time(identity.pid) == identity.start_time


def group_members(identity: ProcessIdentity) -> list[Member]:
    """The living processes of the group and session that `identity` leads or led.

    Its children are found here after the leader's death too. While one of them lives the kernel does not give the
    leader's pid to anybody; a process that has it and another start time shows that the group ended long ago.
    """
    if identity.boot_id != boot_id():
        return []
    leader = read_stat(identity.pid)
    if leader is not None and leader.start_time != identity.start_time:
        return []
    return [
        member
        for member in _all_processes()
        if identity.pgid in (member.pgid, member.session) and member.start_time >= identity.start_time
    ]


def our_processes(folder: Path) -> set[int]:
    """Pids of the living processes that runs in `folder` started, and of jobs there, by their state files.

    Descendants are among them that lead sessions of their own, as torchrun's ranks do; those end with their parent.
    """
    pids: set[int] = set()
    for depth in ("*", "*/*", "*/*/*"):  # a server's, Prefect's, a job's
        for state_file in folder.glob(f"{depth}{STATE_SUFFIX}"):
            record = read_record(state_file)
            if record is not None:
                pids.update(member.pid for member in group_members(record.identity))
    everyone = _all_processes() if pids else []
    while more := {member.pid for member in everyone if member.parent in pids} - pids:
        pids |= more
    return pids


def stop_group(
    identity: ProcessIdentity,
    *,
    drain_seconds: float = 20.0,
    kill_seconds: float = 10.0,
    waiting: Callable[[int], None] | None = None,
) -> StopReport:
    """Ends a whole group: SIGTERM, time to drain, SIGKILL for the rest, and proof that nothing is left.

    Args:
        identity: the group's leader, alive or not.
        drain_seconds: wait after SIGTERM.
        kill_seconds: wait after SIGKILL.
        waiting: told the number of processes left, at every look.

    Raises SlipstreamError when a process survives even SIGKILL (it hangs in the kernel).
    """
    started = time.monotonic()
    seen: dict[int, Member] = {}
    killed: dict[int, Member] = {}
    for signal_number, seconds in ((signal.SIGTERM, drain_seconds), (signal.SIGKILL, kill_seconds)):
        deadline = time.monotonic() + seconds
        signalled: set[int] = set()
        while members := group_members(identity):
            new = [m for m in members if m.pid not in signalled]  # also those that were started meanwhile
            for member in new:
                _send(member, signal_number)
            signalled.update(m.pid for m in new)
            seen.update((m.pid, m) for m in members)
            if signal_number == signal.SIGKILL:
                killed.update((m.pid, m) for m in new)
            if waiting is not None:
                waiting(len(members))
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
    left = group_members(identity)
    if left:
        raise SlipstreamError(
            f"processes {[m.pid for m in left]} of group {identity.pgid} are still there after SIGKILL",
            expected="that SIGKILL ends them",
            do="they hang in the kernel (driver or file system): look with `cat /proc/PID/stack`; a reboot ends them",
            fault="F15",
        )
    ended = tuple(pid for pid in seen if pid not in killed)
    return StopReport(ended, tuple(killed), time.monotonic() - started)


def signal_group(identity: ProcessIdentity, signal_number: int) -> None:
    """Signals every living member of a group once, and waits for nothing."""
    for member in group_members(identity):
        _send(member, signal_number)


def tail(log: Path, lines: int = 20, max_bytes: int = 16_384) -> str:
    """The last lines of a log file; "" when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.path.getsize(log) - max_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _send(member: Member, signal_number: int) -> None:
    """Signals this very process: the descriptor is opened first, so the pid cannot pass to another in between."""
    try:
        descriptor = os.pidfd_open(member.pid)
    except ProcessLookupError:
        return
    try:
        if process_start_time(member.pid) == member.start_time:
            signal.pidfd_send_signal(descriptor, signal_number)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def _all_processes() -> list[Member]:
    found = (read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [member for member in found if member is not None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the state file of this process, then becomes the command: `python -P -m ... STATE LOG -- COMMAND`."""
    state_file, log, dashes, *command = sys.argv[1:] if arguments is None else arguments
    assert dashes == "--"  # split by hand: argparse would swallow a "--" of the command
    assert command
    identity = ProcessIdentity.of(os.getpid())
    assert identity is not None
    notes = _notes_file(Path(state_file))
    record = ProcessRecord(
        identity=identity,
        command=tuple(command),
        log=log,
        started=time.strftime("%Y-%m-%d %H:%M:%S%z"),
        notes=json.loads(notes.read_text()) if notes.is_file() else {},
    )
    write_json(Path(state_file), asdict(record))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()

"""Processes as /proc shows them: who lives, since when, in which group, and in which boot of the machine."""

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

NOT_VISIBLE = "not visible to us"


@dataclass(frozen=True)
class Member:
    """A living process: its parent, its group, its session, and the clock ticks since boot at which it started."""

    pid: int
    parent: int
    pgid: int
    session: int
    start_time: int


def read_stat(pid: int) -> Member | None:
    """A living process from /proc/PID/stat; None for one that is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold spaces
    if state in ("Z", "X"):
        return None
    parent, pgid, session = (int(field) for field in fields[:3])
    return Member(pid, parent, pgid, session, start_time=int(fields[18]))


def process_start_time(pid: int) -> int | None:
    """Clock ticks since boot at which `pid` started; None when it is gone or a zombie."""
    entry = read_stat(pid)
    return None if entry is None else entry.start_time


def boot_id() -> str:
    """Tells one boot of the machine from the next: a pid and start time mean nothing across boots."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def command_of(pid: int) -> str:
    """Command line of a process for people, its short name where it has none, NOT_VISIBLE where we may not look."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return words or Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return NOT_VISIBLE


def user_of(pid: int) -> str:
    """Name of a process's user, or its number; "another" where we may not look."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "another"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

"""Locks of a whole host, such as its GPUs: jobs of one owner share them, those of another are refused.

What a job detaches, such as the launched server, holds them too (`hold_too`). A lock is a directory with one file for
each holder: owner, pid, start time, boot id. It is held as long as a process of the holder's group lives, and so needs
no release: what a reboot or a SIGKILL leaves is the lock of nobody.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.lock import guard, read_holder
from slipstream.tasks.manifest import write_json
from slipstream.tasks.process import ProcessIdentity, group_members

# Seen by every user of the host, and gone or void after a reboot.
LOCK_FOLDER = "/tmp/slipstream-locks"
GPU_LOCK = "gpus"
HELD = "HOST_LOCKS_HELD"  # variable of a job's command: what the job holds


@dataclass(frozen=True)
class LockHolder:
    """Who holds a lock: the group of pid (of that start time and boot), for a job of an owner, since when."""

    owner: str
    job: str
    pid: int
    start_time: int
    boot_id: str
    since: str

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.pid, self.start_time, self.boot_id)

    def __str__(self) -> str:
        return f"job {self.job} of {self.owner} (process {self.pid}, since {self.since})"


def take_locks(folder: Path, names: Sequence[str], holder: LockHolder) -> None:
    """Takes every lock of `names` for `holder`, or none.

    Raises SlipstreamError (F15), naming who holds it, when a living group of another owner has one of them.
    """
    if not names:
        return
    _make(folder)
    with guard(folder):
        for name in names:
            others = [other for other in holders(folder, name) if other.owner != holder.owner]
            if others:
                raise SlipstreamError(
                    f"{name} of this host is held by {', '.join(map(str, others))}",
                    expected=f"that nobody but {holder.owner} uses it",
                    do="wait for its end, or ask its owner to stop it; nothing was started",
                    runbook="left-over-server.md",
                    fault="F15",
                )
        for name in names:
            _make(folder / name)
            write_json(folder / name / f"{holder.pid}-{holder.start_time}.json", asdict(holder))


def held_by(folder: Path, names: Sequence[str], holder: LockHolder) -> dict[str, str]:
    """The variable that tells a job's command what the job holds; none where it holds nothing."""
    told = {"folder": str(folder), "names": list(names), "owner": holder.owner, "job": holder.job}
    return {HELD: json.dumps(told)} if names else {}


def hold_too(identity: ProcessIdentity, environ: Mapping[str, str] = os.environ) -> bool:
    """Makes a group that our job detached a holder of the job's locks, for as long as it lives.

    Returns whether we are a job's command at all. The job still holds them itself: there is no moment in between.
    """
    told = environ.get(HELD)
    if told is None:
        return False
    held = json.loads(told)
    take_locks(Path(held["folder"]), held["names"], holder_of(held["owner"], held["job"], identity))
    return True


def holder_of(owner: str, job: str, identity: ProcessIdentity) -> LockHolder:
    """A holder since now."""
    return LockHolder(owner, job, identity.pid, identity.start_time, identity.boot_id, _now())


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S%z")


def holders(folder: Path, name: str) -> list[LockHolder]:
    """The living holders of a lock. Files of dead ones are removed where we may."""
    found = []
    for path in sorted((folder / name).glob("*.json")):
        value = read_holder(path)
        try:
            holder = None if value is None else LockHolder(**value)
        except TypeError:  # not a file of ours
            continue
        if holder is not None and group_members(holder.identity):
            found.append(holder)
        else:
            with suppress(OSError):  # another user's: it says nothing any more and lies there until the reboot
                path.unlink()
    return found


def _make(folder: Path) -> None:
    """A directory in which every user may add files and remove only his own."""
    try:
        folder.mkdir(parents=True)
        folder.chmod(0o1777)
    except FileExistsError:
        if folder.is_symlink() or not folder.is_dir():
            raise SlipstreamError(
                f"{folder} is no directory", expected="the directory of host locks", do=f"look who made {folder}"
            ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SlipstreamError(
            f"{folder} cannot be written by user {os.getuid()}",
            expected="a directory that every user may write (mode 1777)",
            do=f"have its owner run `chmod 1777 {folder}`",
        )

"""Segments of shared memory in /dev/shm: who holds them, and which of ours nobody holds any more.

A process that is killed leaves its segments behind, until the folder is full and the next one cannot start. A segment
is ours if it did not exist before our launch and processes of our group held it; a name is never looked at. It is
removed when no process holds it. All others are left alone.
"""

import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "/dev/shm"
# Names that servers and NCCL give their segments, for people: one of these that nobody holds was probably forgotten.
KNOWN_NAMES = ("sgl_shm_", "nccl-", "torch_", "psm_", "slipstream")


@dataclass(frozen=True)
class Segment:
    """One file in shared memory; device and inode tell it from a later one of the same name."""

    name: str
    device: int
    inode: int
    bytes: int
    uid: int

    @property
    def key(self) -> tuple[int, int]:
        return self.device, self.inode

    def __str__(self) -> str:
        return f"{self.name} ({self.bytes / 1e6:.1f} MB)"


def read_segments(folder: str = FOLDER) -> list[Segment]:
    """Every segment, by name; none where there is no such folder."""
    found = []
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue  # gone meanwhile
        if entry.is_file(follow_symlinks=False):
            found.append(Segment(entry.name, status.st_dev, status.st_ino, status.st_size, status.st_uid))
    return found


def held(segments: Iterable[Segment], pids: Iterable[int] | None = None) -> dict[tuple[int, int], list[int]]:
    """Which segments are mapped or open, by which processes, as far as we may look.

    Args:
        segments: the ones to look for.
        pids: processes to look at; None: all.

    Returns key of the segment -> pids; a segment that none of them holds is left out.
    """
    wanted = {segment.key for segment in segments}
    found: dict[tuple[int, int], list[int]] = {}
    if not wanted:
        return found
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pids is None else pids:
        for key in wanted & (_mapped(pid) | _open(pid)):
            found.setdefault(key, []).append(pid)
    return found


def holders_of(path: Path) -> list[int]:
    """Pids that have a file mapped or open, as far as we may look; none where there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return []
    file = Segment(path.name, status.st_dev, status.st_ino, status.st_size, status.st_uid)
    return held([file]).get(file.key, [])


def held_by_group(pids: Collection[int], before: Collection[tuple[int, int]]) -> list[Segment]:
    """The segments of our user that processes of a group hold and that were not there before it started."""
    segments = [one for one in read_segments() if one.uid == os.geteuid() and one.key not in before]
    holders = held(segments, pids)
    return [one for one in segments if one.key in holders]


def remove_unheld(ours: Iterable[Segment]) -> tuple[list[Segment], dict[Segment, list[int]]]:
    """Removes those of our segments that still exist and that no process holds.

    Returns (removed, those that stay -> pids that hold them).
    """
    keys = {segment.key for segment in ours}
    there = [one for one in read_segments() if one.key in keys and one.uid == os.geteuid()]
    holders = held(there)
    removed = [one for one in there if one.key not in holders]
    for one in removed:
        (Path(FOLDER) / one.name).unlink(missing_ok=True)
    return removed, {one: holders[one.key] for one in there if one.key in holders}


def forgotten(segments: Iterable[Segment]) -> list[Segment]:
    """Those with a name that servers give and that nobody holds: for people to look at."""
    named = [one for one in segments if one.name.startswith(KNOWN_NAMES)]
    holders = held(named)
    return [one for one in named if one.key not in holders]


def to_json(segments: Iterable[Segment]) -> list[dict[str, Any]]:
    """As JSON values; `from_json` reads them."""
    return [asdict(one) for one in segments]


def from_json(values: Iterable[dict[str, Any]]) -> list[Segment]:
    """From `to_json`."""
    return [Segment(**value) for value in values]


def _mapped(pid: int) -> set[tuple[int, int]]:
    """(device, inode) of the files that a process has mapped; none where we may not look."""
    found = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
            _, _, _, device, inode, *_ = line.split(None, 5)  # a path may follow, with spaces
            if inode != b"0":
                major, minor = device.split(b":")
                found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    except OSError:
        pass
    return found


def _open(pid: int) -> set[tuple[int, int]]:
    """(device, inode) of the files that a process has open; none where we may not look."""
    found = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                status = os.stat(entry.path)
            except OSError:
                continue
            found.add((status.st_dev, status.st_ino))
    except OSError:
        pass
    return found

"""TCP ports: is one free, who holds it."""

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slipstream.tasks.proc_stat import NOT_VISIBLE, command_of, user_of

POLL_SECONDS = 0.05
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTEN = "0A"  # state of a listening socket in these tables


@dataclass(frozen=True)
class PortHolder:
    """Who listens on a port. `pid` is None when the system does not tell us (another user's process)."""

    pid: int | None
    command: str
    user: str

    def __str__(self) -> str:
        return f"process {self.pid or '?'} of user {self.user}: `{self.command}`"


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen on `port` now. Connections of a closed server that still linger do not count."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. Better where it can be done: let the server bind port 0 and read which one it got."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_holders(port: int) -> list[PortHolder]:
    """The processes that listen on `port`, on any address. A listener that we may not see has pid None."""
    inodes = {inode for table in _TABLES for inode in _listening(Path(table), port)}
    if not inodes:
        return []
    pids = sorted(pid for pid in _numbers(Path("/proc")) if inodes & _sockets(pid))
    return [PortHolder(pid, command_of(pid), user_of(pid)) for pid in pids] or [
        PortHolder(None, NOT_VISIBLE, "another")
    ]


def _listening(table: Path, port: int) -> Iterator[str]:
    """Inodes of the sockets that listen on `port`, from a table of /proc/net."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
            yield fields[9]


def _sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets; none where we may not look."""
    found = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.add(os.readlink(entry.path).removeprefix("socket:[").removesuffix("]"))
    except OSError:
        pass
    return found


def _numbers(folder: Path) -> Iterator[int]:
    return (int(name) for name in os.listdir(folder) if name.isdigit())


def wait_port_free(host: str, port: int, seconds: float) -> bool:
    """Waits until `port` is free; False when it still is not after `seconds`."""
    deadline = time.monotonic() + seconds
    while not port_is_free(host, port):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True

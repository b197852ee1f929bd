"""TCP ports: is one free, who holds it."""

import errno
import socket
import time
from dataclasses import dataclass

import psutil

POLL_SECONDS = 0.05


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
    pids: dict[int | None, None] = {}
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            pids[connection.pid] = None
    return [_describe(pid) for pid in pids]


def _describe(pid: int | None) -> PortHolder:
    if pid is None:
        return PortHolder(None, "not visible to us", "another")
    try:
        process = psutil.Process(pid)
        return PortHolder(pid, " ".join(process.cmdline()) or process.name(), process.username())
    except psutil.Error:
        return PortHolder(pid, "not visible to us", "another")


def wait_port_free(host: str, port: int, seconds: float) -> bool:
    """Waits until `port` is free; False when it still is not after `seconds`."""
    deadline = time.monotonic() + seconds
    while not port_is_free(host, port):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True

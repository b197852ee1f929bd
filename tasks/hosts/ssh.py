"""A far host over SSH: one connection for all threads, made again when it breaks."""

import posixpath
import secrets
import shlex
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paramiko
from paramiko.ssh_exception import SSHException

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts.archive import FOLDER, build_archive
from slipstream.tasks.hosts.far_side import MODULE
from slipstream.tasks.hosts.host import HostUnreachable, Progress
from slipstream.tasks.hosts.rsync import RSYNC_FROM_BYTES, RsyncRefused, can_rsync, rsync
from slipstream.tasks.hosts.scripted import ScriptedHost
from slipstream.tasks.hosts.ssh_connection import SshConnection
from slipstream.tasks.hosts.ssh_target import SshTarget


class SshHost(ScriptedHost):
    """A far host.

    Args:
        target: where it is, and how to get there.
        base: Slipstream's directory there; a relative one lies in the home directory.
        python: a Python of 3.10 or newer there.
        command_seconds: limit of a short command.
        reconnect_seconds: how long a connection that broke may take to come back; the first one is not waited for.
    """

    def __init__(
        self,
        target: SshTarget,
        *,
        base: str,
        python: str = "python3",
        command_seconds: float = 60.0,
        reconnect_seconds: float = 600.0,
    ) -> None:
        super().__init__(base, command_seconds=command_seconds, reconnect_seconds=reconnect_seconds)
        self.target, self.python = target, python
        self._lock = threading.Lock()
        self._connection: SshConnection | None = None
        self._folder = ""  # `base` in full, known once connected
        self._rsync: bool | None = None  # whether both ends have it

    @property
    def name(self) -> str:
        return str(self.target.address)

    @property
    def _stands(self) -> bool:
        return self._connection is not None and self._connection.is_open

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _connected(self) -> SshConnection:
        """The connection, made anew where it broke; the archive lies on the host when it is handed out."""
        with self._lock:
            if self._connection is None or not self._connection.is_open:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                connection = SshConnection(self.target)
                try:
                    with _files(connection, self.name):
                        sftp = connection.sftp().client  # nobody else has it yet
                        self._folder = posixpath.join(sftp.normalize("."), self.base)
                        _ship(sftp, self._folder)
                except BaseException:
                    connection.close()
                    raise
                self._connection, self._reached = connection, True
            return self._connection

    def _exchange(self, request: bytes, mark: str, seconds: float) -> tuple[int, str]:
        connection = self._connected()
        path = posixpath.join(self._folder, build_archive().path)
        command = shlex.join([self.python, "-I", path, MODULE])
        code, output = connection.ask(command, request, mark.encode(), seconds)
        return code, output.decode(errors="replace")

    def _read(self, path: str, offset: int, max_bytes: int) -> bytes:
        connection = self._connected()
        with _files(connection, self.name):
            return connection.sftp().read(self._full_path(path), offset, max_bytes)

    def _send(self, source: Path, target: str, progress: Progress) -> str:
        if source.stat().st_size >= RSYNC_FROM_BYTES and self._rsynced(str(source), target, progress, to_host=True):
            return "rsync"
        connection = self._connected()
        with _files(connection, self.name):
            connection.sftp().send(source, self._full_path(target), progress)
        return "SFTP"

    def _fetch(self, source: str, target: Path, progress: Progress) -> str:
        connection = self._connected()
        with _files(connection, self.name):
            size = connection.sftp().size(self._full_path(source))
        if size >= RSYNC_FROM_BYTES and self._rsynced(source, str(target), progress, to_host=False):
            return "rsync"
        with _files(connection, self.name):
            connection.sftp().fetch(self._full_path(source), target, progress)
        return "SFTP"

    def _rsynced(self, source: str, destination: str, progress: Progress, *, to_host: bool) -> bool:
        """Whether rsync has done it; it is not asked again where it was refused once."""
        if self._rsync is None:
            self._rsync = can_rsync() and bool(self.hello()["rsync"])
        if not self._rsync:
            return False
        if to_host:
            destination = self._full_path(destination)
        else:
            source = self._full_path(source)
        try:
            rsync(self.target, source, destination, to_host=to_host, progress=progress)
        except RsyncRefused:
            self._rsync = False
        return self._rsync

    def _full_path(self, path: str) -> str:
        return posixpath.join(self._folder, path)


@contextmanager
def _files(connection: SshConnection, name: str) -> Iterator[None]:
    """A broken connection as HostUnreachable; what the host says against a path stays an OSError."""
    try:
        yield
    except SlipstreamError:
        raise
    except (SSHException, EOFError, TimeoutError, ConnectionError) as error:
        connection.close()
        raise HostUnreachable(f"{name}: a file transfer broke off: {error or type(error).__name__}") from error
    except OSError as error:
        if connection.is_open:
            raise
        raise HostUnreachable(f"{name}: a file transfer broke off: {error or type(error).__name__}") from error


def _ship(sftp: paramiko.SFTPClient, folder: str) -> None:
    """Sees that the archive lies in `folder` on the host: under a temporary name, then renamed."""
    archive = build_archive()
    path = posixpath.join(folder, archive.path)
    try:
        if sftp.stat(path).st_size == len(archive.data):
            return
    except FileNotFoundError:
        pass
    _make_folders(sftp, posixpath.join(folder, FOLDER))
    temporary = f"{path}.{secrets.token_hex(4)}"
    with sftp.open(temporary, "wb") as file:
        file.write(archive.data)
    sftp.posix_rename(temporary, path)


def _make_folders(sftp: paramiko.SFTPClient, path: str) -> None:
    try:
        if stat.S_ISDIR(sftp.stat(path).st_mode or 0):
            return
    except FileNotFoundError:
        pass
    _make_folders(sftp, posixpath.dirname(path))
    try:
        sftp.mkdir(path, 0o700)
    except OSError:
        if not stat.S_ISDIR(sftp.stat(path).st_mode or 0):  # another connection may just have made it
            raise

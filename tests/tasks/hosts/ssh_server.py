"""A real OpenSSH server on loopback, and a relay in front of it that can be cut or frozen. No mock of SSH anywhere."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from slipstream.configs.ssh_address import SshAddress
from slipstream.tasks.hosts.known_hosts import trust_key
from slipstream.tasks.hosts.ssh import SshHost
from slipstream.tasks.hosts.ssh_connection import shown_key
from slipstream.tasks.hosts.ssh_target import SshTarget


def find_sshd() -> str | None:
    """Where sshd is; it must be called by its full path."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def need_sshd() -> None:
    """Skips the test where there is no OpenSSH server; in CI that is a failure."""
    if find_sshd() is None:
        words = "no OpenSSH server here (Debian: apt-get install openssh-server)"
        if os.environ.get("CI"):
            pytest.fail(words)
        pytest.skip(words)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


class SshServer:
    """sshd in the foreground, with keys of its own, on `listen`."""

    listen = "127.0.0.1"

    def __init__(self, folder: Path, *lines: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        self.folder, self.port, self.lines = folder, self.own_port(), lines
        self.host_key, self.user_key = folder / "host_key", folder / "user_key"
        self.new_host_key()
        make_key(self.user_key)
        shutil.copy(f"{self.user_key}.pub", folder / "authorized_keys")
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def own_port(self) -> int:
        return free_port()

    def inside(self, command: list[str]) -> list[str]:
        """The command that runs `command` where the server shall be."""
        return command

    @property
    def address(self) -> SshAddress:
        return SshAddress(self.listen, self.port, getpass.getuser())

    def new_host_key(self, kind: str = "ed25519") -> None:
        for path in (self.host_key, self.folder / "host_key.pub"):
            path.unlink(missing_ok=True)
        make_key(self.host_key, kind)

    def start(self) -> None:
        sshd = find_sshd()
        assert sshd is not None
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd's empty folder; only root's sshd wants it
        config = self.folder / "sshd_config"
        config.write_text(
            "\n".join(
                [
                    *self.lines,  # sshd takes the first value of a key
                    f"Port {self.port}",
                    f"ListenAddress {self.listen}",
                    f"HostKey {self.host_key}",
                    f"AuthorizedKeysFile {self.folder / 'authorized_keys'}",
                    "StrictModes no",
                    "UsePAM no",
                    "PasswordAuthentication no",
                    "PermitRootLogin yes",
                    "MaxStartups 100",
                    "PidFile none",
                    *([] if any("sftp" in line for line in self.lines) else ["Subsystem sftp internal-sftp"]),
                    "",
                ]
            )
        )
        with (self.folder / "sshd.log").open("ab") as log:
            command = self.inside([sshd, "-D", "-e", "-f", str(config)])
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(self._answers)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "sshd.log").read_text()
        with contextlib.suppress(OSError), socket.create_connection((self.listen, self.port), 1) as probe:
            return probe.recv(4) == b"SSH-"
        return False

    def stop(self) -> None:
        """Ends the server; connections that stand go on, as with any sshd."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None

    def target(self, **changes) -> SshTarget:
        known = self.folder / "known_hosts"
        target = SshTarget(self.address, known, identity_file=self.user_key, connect_seconds=20.0)
        return SshTarget(**{**vars(target), **changes})

    def trust(self, address: SshAddress | None = None) -> None:
        """Trusts what the server shows now, under `address` (its own by default)."""
        trust_key(self.folder / "known_hosts", address or self.address, shown_key(self.target(), self.address))

    def host(self, base: Path, *, reconnect_seconds=30.0, command_seconds=30.0, python="python3", **changes) -> SshHost:
        return SshHost(
            self.target(**changes),
            base=str(base),
            python=python,
            command_seconds=command_seconds,
            reconnect_seconds=reconnect_seconds,
        )


class Relay:
    """A TCP relay to a port: `cut` ends what stands, `open` says whether new connections are taken, `freeze` lets
    them stand and carries nothing, as a network that is gone. `bytes_per_second`: a slow one, in each direction."""

    def __init__(self, port: int, *, to: str = "127.0.0.1", bytes_per_second: float = float("inf")) -> None:
        self._to, self.open, self._frozen = (to, port), True, threading.Event()
        self._seconds_per_byte = 1 / bytes_per_second
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self.carried_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> SshAddress:
        return SshAddress("127.0.0.1", self.port, getpass.getuser())

    def cut(self) -> None:
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def be_slow(self, bytes_per_second: float) -> None:
        self._seconds_per_byte = 1 / bytes_per_second

    def freeze(self) -> None:
        self._frozen.set()

    def thaw(self) -> None:
        self._frozen.clear()

    def close(self) -> None:
        self.open = False
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self.open:
                near.close()
                continue
            far = socket.create_connection(self._to)
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(65_536 if not self._seconds_per_byte else 4096):
                time.sleep(len(block) * self._seconds_per_byte)
                while self._frozen.is_set():
                    time.sleep(0.02)
                sink.sendall(block)
                self.carried_bytes += len(block)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> None:
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "test", "-f", str(path)]
    subprocess.run(command, check=True)

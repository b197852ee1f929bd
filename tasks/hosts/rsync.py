"""Large files by rsync over SSH, where both ends have it; it goes on where it was cut.

OpenSSH is told the same that our own connection holds to: the project's known-hosts file and no other, no questions.
"""

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.tasks.hosts.host import HostUnreachable, Progress
from slipstream.tasks.hosts.ssh_target import UNANSWERED_KEEPALIVES, SshTarget

RSYNC_FROM_BYTES = 16 << 20  # a smaller file is over before OpenSSH has connected a second time
UNKNOWN_OPTION, SHELL_NOT_CLEAN, NOT_FOUND = 1, 2, 127  # exit codes of rsync
CONNECTION_LOST = (10, 12, 30, 35, 255)


class RsyncRefused(Exception):
    """rsync cannot be used with this host: its shell prints, or it is not there after all."""


def rsync(target: SshTarget, source: str, destination: str, *, to_host: bool, progress: Progress) -> None:
    """One file by rsync; what is at its end already is not sent again.

    Raises HostUnreachable, RsyncRefused, and OSError where a file cannot be read or written.
    """
    with ssh_config(target) as config, tempfile.TemporaryFile() as errors:
        there = f"slipstream-host:{destination if to_host else source}"
        paths = [source, there] if to_host else [there, destination]
        options = ["--append", "--protect-args", "--info=progress2", "--no-human-readable", "--outbuf=N"]
        timeout = max(10, int((UNANSWERED_KEEPALIVES + 1) * target.keepalive_seconds))
        command = [
            "rsync",
            *options,
            f"--timeout={timeout}",
            "-e",
            shlex.join(["ssh", "-F", str(config)]),
            "--",
            *paths,
        ]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as running:
            assert running.stdout is not None
            try:
                for arrived in _arrived(running.stdout.fileno()):
                    progress(arrived)
            except BaseException:
                running.terminate()  # else leaving it waits for its end, and so do we when a signal ends us
                raise
        errors.seek(0)
        words = errors.read().decode(errors="replace").strip()[-500:]
    if running.returncode in CONNECTION_LOST and "command not found" not in words:
        raise HostUnreachable(f"{target.address}: rsync broke off: {words or running.returncode}")
    if running.returncode in (UNKNOWN_OPTION, SHELL_NOT_CLEAN, NOT_FOUND, *CONNECTION_LOST):
        raise RsyncRefused(words)
    if running.returncode != 0:
        raise OSError(f"rsync ended with exit code {running.returncode}: {words}")


def can_rsync() -> bool:
    """Whether this side has what it needs."""
    return shutil.which("rsync") is not None and shutil.which("ssh") is not None


@contextmanager
def ssh_config(target: SshTarget) -> Iterator[Path]:
    """A file for `ssh -F` in which `slipstream-host` is the target: the same way there, as strict as our own."""
    common = {
        "UserKnownHostsFile": f'"{target.known_hosts}"',
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "BatchMode": "yes",
        "ConnectTimeout": max(1, int(target.connect_seconds)),
        "ServerAliveInterval": max(1, int(target.keepalive_seconds)),
        "ServerAliveCountMax": UNANSWERED_KEEPALIVES,
        "ControlPath": "none",
        "UpdateHostKeys": "no",
    }
    if target.identity_file is not None:
        common["IdentityFile"] = f'"{target.identity_file}"'
    names = [*(f"slipstream-jump-{number}" for number in range(len(target.jumps))), "slipstream-host"]
    lines = []
    for name, address in zip(names, (*target.jumps, target.address), strict=True):
        lines += [f"Host {name}", f"  HostName {address.address}", f"  Port {address.port}"]
        lines += [] if address.user is None else [f"  User {address.user}"]
    if target.jumps:
        lines.append(f"  ProxyJump {','.join(names[:-1])}")
    lines += ["Host *", *(f"  {key} {value}" for key, value in common.items())]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ssh_config"
        path.write_text("\n".join(lines) + "\n")
        yield path


def _arrived(descriptor: int) -> Iterator[int]:
    """The bytes that rsync says have arrived, as it says so: `\\r  1234567  12%  10.00MB/s ...`."""
    rest = b""
    with open(descriptor, "rb", buffering=0, closefd=False) as told:
        while block := told.read(4096):
            *lines, rest = (rest + block).replace(b"\n", b"\r").split(b"\r")
            for words in map(bytes.split, lines):
                if words and words[0].replace(b",", b"").isdigit():
                    yield int(words[0].replace(b",", b""))

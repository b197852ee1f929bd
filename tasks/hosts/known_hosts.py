"""Host keys: the project's known-hosts file, and the refusal of whoever is not in it.

The file has OpenSSH's form, so that `ssh -o UserKnownHostsFile=FILE` and rsync hold to the same keys.
"""

from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry

from slipstream.configs.ssh_address import SshAddress
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import write_atomic

RUNBOOK = "host-key.md"


class HostKeyRefused(SlipstreamError):
    """A host that shows a key which nobody has trusted, or another one than before. Nothing was sent to it."""


class Refuse(paramiko.MissingHostKeyPolicy):
    """Refuses a host whose name has no key in `file`, and says how to trust it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise unknown_key(hostname, key, self.file)


def unknown_key(name: str, key: paramiko.PKey, file: Path) -> HostKeyRefused:
    """The error for a host that is not in the known-hosts file."""
    return HostKeyRefused(
        f"{name} is not known: it shows the key {describe(key)}",
        expected=f"a key of {name} in {file}",
        do="compare that fingerprint with what the host's owner tells you, then run `slipstream host trust CONFIG`",
        runbook=RUNBOOK,
    )


def changed_key(name: str, shown: paramiko.PKey, known: paramiko.PKey, file: Path) -> HostKeyRefused:
    """The error for a host that shows another key than the known one."""
    return HostKeyRefused(
        f"{name} shows another key than before: {describe(shown)}",
        expected=f"{describe(known)}, as in {file}",
        do="do not go on: ask the host's owner whether it was installed anew. Only then run "
        "`slipstream host trust CONFIG --replace`",
        runbook=RUNBOOK,
    )


def describe(key: paramiko.PKey) -> str:
    """Type and fingerprint, as `ssh-keygen -l` shows them."""
    return f"{key.get_name()} {key.fingerprint}"


def known_keys(file: Path, name: str) -> list[paramiko.PKey]:
    """The keys of a host in the file; none when there is no file."""
    return [entry.key for entry, _ in _entries(file) if entry is not None and name in entry.hostnames and entry.key]


def trust_key(file: Path, address: SshAddress, key: paramiko.PKey) -> None:
    """Writes a host's key to the file, in the place of any other of that host. Other lines stay as they are."""
    name, lines = address.known_as, []
    for entry, line in _entries(file):
        if entry is None or name not in entry.hostnames:
            lines.append(line)
        elif others := [other for other in entry.hostnames if other != name]:
            lines.append(line.replace(line.split()[0], ",".join(others), 1))
    lines.append(f"{name} {key.get_name()} {key.get_base64()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, ("\n".join(lines) + "\n").encode())


def _entries(file: Path) -> list[tuple[HostKeyEntry | None, str]]:
    """Every line, with its entry where it is one. Raises SlipstreamError for a key that cannot be read."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    found: list[tuple[HostKeyEntry | None, str]] = []
    for number, line in enumerate(lines, 1):
        is_comment = not line.strip() or line.lstrip().startswith("#")
        try:
            entry = None if is_comment else HostKeyEntry.from_line(line)
        except Exception as error:  # paramiko raises its own and binascii's
            raise SlipstreamError(
                f"{file}:{number} is not a line of a known-hosts file: {error}",
                expected="NAME TYPE KEY",
                do=f"correct or delete that line of {file}",
                runbook=RUNBOOK,
            ) from error
        found.append((entry, line))
    return found

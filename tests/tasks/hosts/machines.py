"""Two far hosts on this machine, each in Linux namespaces of its own: network, processes, mounts, name, shared memory.

A host has an address of its own at the end of a virtual cable that can be pulled (`unplug`), a disk of a chosen size,
and a boot: `power_off` ends every process on it at once, and the next `power_on` has another boot id. Its sshd is
OpenSSH's. The files of this machine are seen there as they are, so that the same Python runs.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from slipstream.configs.host import Host as HostSection
from slipstream.tasks.hosts.host_lock import LOCK_FOLDER
from slipstream.tasks.hosts.provision import CURRENT
from slipstream.tasks.reporting import NullReporter

# What the host's first process does before it is sshd. Arguments: name, disk, size of the disk, shared memory, boot id,
# home directory and what lies over it ("" for nothing), folder of the locks; then the command.
FIRST = """
set -e
hostname "$1"
mount -t tmpfs -o "size=$3" tmpfs "$2"
mount -t tmpfs -o "size=$4" tmpfs /dev/shm
mount --bind "$5" /proc/sys/kernel/random/boot_id
[ -z "$7" ] || mount --bind "$7" "$6"
mount -t tmpfs -o mode=1777 tmpfs "$8"
shift 8
exec "$@"
"""


def why_not() -> str:
    """Why no such host can be made here; "" where it can."""
    if os.getuid() != 0:
        return "only root makes network namespaces"
    missing = [name for name in ("ip", "unshare", "mount", "hostname") if shutil.which(name) is None]
    if missing:
        return f"no {missing[0]} here (Debian: apt-get install iproute2 util-linux)"
    probe = f"slipprobe{os.getpid()}"
    for command in (
        ["ip", "netns", "add", probe],
        ["ip", "netns", "exec", probe, "unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"],
        ["ip", "link", "add", f"sp{os.getpid()}", "type", "veth", "peer", "name", f"sq{os.getpid()}"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            break
    subprocess.run(["ip", "link", "del", f"sp{os.getpid()}"], capture_output=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return f"`{' '.join(command[:3])}` is refused here: {done.stderr.strip()}" if done.returncode else ""


def need_namespaces() -> None:
    """Skips the test where no host can be made; in CI that is a failure."""
    words = why_not()
    if words:
        if os.environ.get("CI"):
            pytest.fail(words)
        pytest.skip(words)


def machine_class(ssh_tools):
    """`Machine`, on top of the SSH server of `ssh_tools` (tests/tasks/hosts/ssh_server.py)."""

    class Machine(ssh_tools.SshServer):
        """A host. Args: folder: of its keys; number: tells hosts apart; lines: of its sshd's configuration."""

        def __init__(
            self, folder: Path, number: int, *lines: str, disk: str = "256m", home: Path | None = None
        ) -> None:
            self.number, self.name = number, f"slip{os.getpid()}n{number}"
            self.near, self.far = f"sn{os.getpid()}n{number}", f"sf{os.getpid()}n{number}"  # 15 letters at most
            network = f"10.{64 + os.getpid() % 190}.{number}"
            self.listen, self.gateway = f"{network}.2", f"{network}.1"
            self.disk, self._size, self._home = folder / "disk", disk, home
            self.disk.mkdir(parents=True)
            self._boot = folder / "boot_id"
            self._cables: list[str] = []  # our ends of those to other hosts
            self._plug()
            super().__init__(folder, *lines)

        def own_port(self) -> int:
            return 22

        @property
        def base(self) -> Path:
            """Slipstream's directory there, on the host's own disk: what lies in it is seen there only."""
            return self.disk / "slipstream"

        def inside(self, command: list[str]) -> list[str]:
            self._boot.write_text(f"{uuid.uuid4()}\n")
            home = ["", ""] if self._home is None else [str(Path.home()), str(self._home)]
            if not Path(LOCK_FOLDER).exists():
                Path(LOCK_FOLDER).mkdir()
                Path(LOCK_FOLDER).chmod(0o1777)  # as every host makes it: it is this machine's, too
            first = ["sh", "-c", FIRST, "sh", self.name, str(self.disk), self._size, "64m", str(self._boot), *home]
            own = ["--mount", "--uts", "--pid", "--ipc", "--fork", "--kill-child=KILL", "--mount-proc"]
            return ["ip", "netns", "exec", self.name, "unshare", *own, *first, LOCK_FOLDER, *command]

        def cable_to(self, other: "Machine") -> tuple[str, str]:
            """Another cable, to a host of this kind, for what hosts say to each other. Returns both addresses on it."""
            network = f"10.{64 + os.getpid() % 190}.{100 + self.number}"
            ends = [(self, f"sc{os.getpid()}n{self.number}", 1), (other, f"sc{os.getpid()}n{other.number}", 2)]
            (one, name, _), (two, peer, _) = ends
            ip("link", "add", name, "netns", one.name, "type", "veth", "peer", "name", peer, "netns", two.name)
            for host, end, last in ends:
                ip("-n", host.name, "addr", "add", f"{network}.{last}/30", "dev", end)
                ip("-n", host.name, "link", "set", end, "up")
                host._cables.append(end)
            return f"{network}.1", f"{network}.2"

        def unplug(self) -> None:
            """Pulls the cables: nothing arrives on either side any more, and nobody is told."""
            self._set_cables("down")

        def plug(self) -> None:
            """Puts the cables back in."""
            self._set_cables("up")

        def _set_cables(self, state: str) -> None:
            ip("link", "set", self.near, state)
            for end in self._cables:
                ip("-n", self.name, "link", "set", end, state)

        def power_off(self) -> None:
            """Ends every process there at once. Nobody is told: the cable is pulled first."""
            self.unplug()
            self._end()

        def power_on(self) -> None:
            """Starts it again: another boot, an empty disk."""
            self.plug()
            self.start()

        def stop(self) -> None:
            self._end()
            subprocess.run(["ip", "link", "del", self.near], capture_output=True)
            subprocess.run(["ip", "netns", "del", self.name], capture_output=True)

        def _end(self) -> None:
            if self.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self.process.send_signal(signal.SIGKILL)
                self.process.wait()
                self.process = None

        def _plug(self) -> None:
            ip("netns", "add", self.name)
            ip("link", "add", self.near, "type", "veth", "peer", "name", self.far, "netns", self.name)
            ip("addr", "add", f"{self.gateway}/30", "dev", self.near)
            ip("link", "set", self.near, "up")
            for words in (
                ["addr", "add", f"{self.listen}/30", "dev", self.far],
                ["link", "set", self.far, "up"],
                ["link", "set", "lo", "up"],
            ):
                ip("-n", self.name, *words)

    return Machine


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, now);
    if (!code && which == CLOCK_REALTIME) now->tv_sec += SECONDS;
    return code;
}
"""


def wrong_clock(folder: Path, seconds: int) -> Path:
    """A library that puts the clock of whatever loads it forward by so many seconds."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    made = folder / "clock.so"
    command = [compiler, "-shared", "-fPIC", f"-DSECONDS={seconds}", "-x", "c", "-", "-o", str(made), "-ldl"]
    subprocess.run(command, input=CLOCK.encode(), check=True)
    return made


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def host_section(machines, root):
    """Section `host` over two machines that are trusted, each with this Python and with its Slipstream in root/farN."""
    known = root / "known_hosts"
    known.write_text("".join((one.folder / "known_hosts").read_text() for one in machines))
    for number, one in enumerate(machines):
        host = one.host(root / f"far{number}")
        use_this_python(host, root / f"python{number}")
        host.close()
    first, second = machines
    return HostSection(
        kind="ssh",
        address=first.listen,
        identity_file=first.user_key,
        known_hosts=known,
        directory=str(root / "far0"),
        workdir=root / "here" / "demo",
        connect_timeout_seconds=3.0,
        keepalive_seconds=1,
        reconnect_seconds=2,
        threads=1,
        more=({"address": second.listen, "identity_file": second.user_key, "directory": str(root / "far1")},),
    )


def use_this_python(host, folder, *paths):
    """Makes this Python the host's provisioned one; `paths` are looked into first."""
    folder.mkdir(exist_ok=True)
    python, current = folder / "python", folder / "current"
    path = ":".join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path!r} OMP_NUM_THREADS=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    current.write_text(json.dumps({"key": "x", "python": str(python)}))
    host.put(current, CURRENT)


class Listener(NullReporter):
    """Tells an event about everything that a stage says."""

    def __init__(self, when="progress", then=lambda: None):
        self.when, self.then, self.said = when, then, []

    def stage_started(self, stage, *, resumed):
        self._event("started")

    def progress(self, stage, done, total, fields):
        self._event("progress")

    def say(self, stage, text, *, markup):
        self.said.append(text)

    def _event(self, name):
        if name == self.when:
            self.when = ""
            self.then()

"""A host: where commands run and jobs live. One protocol; `local.py` and `ssh.py` implement it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts.host_lock import LOCK_FOLDER
from slipstream.tasks.manifest import digest

MAX_OUTPUT_BYTES = 1 << 20
MAX_READ_BYTES = 1 << 20
Progress = Callable[[int], None]  # told how many bytes of a file have arrived in all
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class HostUnreachable(SlipstreamError):
    """Nothing can be said about the host's state: no connection, or it broke. Jobs go on without us."""

    def __init__(self, found: str, *, expected: str = "an SSH connection", do: str = "") -> None:
        do = do or "check the host and the network, then run the same command again: it finds its jobs"
        super().__init__(found, expected=expected, do=do, runbook="host-unreachable.md")


class CommandTimedOut(SlipstreamError):
    """A short command did not end in time. It was ended on the host, with its children."""


@dataclass(frozen=True)
class Done:
    """How a short command ended.

    Args:
        exit_code: -N: by signal N.
        stdout, stderr: at most MAX_OUTPUT_BYTES each; `truncated` says that more was dropped.
    """

    exit_code: int
    stdout: str
    stderr: str
    truncated: bool


@dataclass(frozen=True)
class Job:
    """A command that goes on without us: what is asked for, and all that tells one submission from another.

    Args:
        name: of its folder on the host: small letters, digits, `.`, `_`, `-`. One job of a name runs at a time.
        command: program and arguments, no shell.
        run: tells a wanted repetition from the same question asked twice, such as the id of a run.
        env: variables added to the host's own.
        secrets: such variables that are written nowhere and tell no submissions apart.
        directory: working directory; "" is `/`.
        locks: names of host locks that it holds while it runs, such as `gpus`.
        owner: shares locks with jobs of the same owner.
        lock_folder: where the host's locks are.
    """

    name: str
    command: tuple[str, ...]
    run: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    directory: str = ""
    locks: tuple[str, ...] = ()
    owner: str = "slipstream"
    lock_folder: str = LOCK_FOLDER

    def __post_init__(self) -> None:
        for what, name in (("job", self.name), *(("lock", lock) for lock in self.locks)):
            if not _NAME.fullmatch(name):
                raise ValueError(f"{what} {name!r}: small letters, digits, dots, dashes and underscores only")
        for name in (*self.env, *self.secrets):
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a variable")
        if not self.command or any("\0" in word for word in (*self.command, *self.env.values())):
            raise ValueError("a command has at least one word and no NUL")

    @property
    def submission(self) -> str:
        """Digest of everything that is asked for, but for secrets."""
        asked = [self.name, list(self.command), self.run, dict(self.env), self.directory, list(self.locks), self.owner]
        return digest(asked)


@dataclass(frozen=True)
class JobStatus:
    """What the host knows of a job (`hosts.jobs.job_status`)."""

    name: str
    submission: str
    command: tuple[str, ...]
    owner: str
    state: Literal["running", "exited", "stopped", "lost", "damaged"]
    why: str
    exit_code: int | None
    identity: Mapping[str, Any]
    members: tuple[int, ...]
    log: str
    log_bytes: int
    started: str
    ended: str | None
    attached: bool = False
    ended_pids: tuple[int, ...] = ()
    killed_pids: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "JobStatus":
        """From the host's JSON."""
        lists = ("command", "members", "ended_pids", "killed_pids")
        return cls(**{**value, **{key: tuple(value[key]) for key in lists if key in value}})


@dataclass(frozen=True)
class Transfer:
    """What a transfer was: the file's bytes, those that were there from before, seconds, and by which way."""

    name: str
    bytes: int
    resumed_bytes: int
    seconds: float
    way: str

    def __str__(self) -> str:
        sent = self.bytes - self.resumed_bytes
        rate = sent / 1e6 / max(self.seconds, 1e-6)
        kept = f", {self.resumed_bytes / 1e6:.1f} MB were there" if self.resumed_bytes else ""
        return f"{self.name}: {sent / 1e6:.1f} MB in {self.seconds:.1f} s by {self.way}, {rate:.1f} MB/s{kept}"


class Host(Protocol):
    """Where commands run and jobs live. Paths are relative to Slipstream's directory there, or absolute.

    Every call raises SlipstreamError in words for people, and HostUnreachable where the connection fails for good. All
    but `run` may be asked again without harm, and are, for as long as a broken connection may take to come back; not a
    host that never answered, and not after a signal (SIGTERM, Ctrl-C), after which whatever does not stand is given up.
    """

    @property
    def name(self) -> str:
        """For people: `this machine`, `user@address:port`."""

    @property
    def directory(self) -> str:
        """Slipstream's directory there, in full."""

    def hello(self) -> dict[str, Any]:
        """Who and what it is (`far_side.hello`)."""

    def facts(self, *, address: str, port: int) -> dict[str, Any]:
        """What is on it right now (`machine_facts.machine_facts`), and `skew_seconds` of its clock to ours."""

    def run(
        self, command: tuple[str, ...], *, stdin: str = "", seconds: float | None = None, directory: str = ""
    ) -> Done:
        """A short command, to its end; never asked twice. Raises CommandTimedOut after `seconds`."""

    def start(self, job: Job) -> JobStatus:
        """Starts a job, or attaches to the one that the same submission started before, running or ended."""

    def status(self, name: str) -> JobStatus | None:
        """What is known of a job; None when there is none of that name."""

    def jobs(self, prefix: str = "") -> list[JobStatus]:
        """Every job whose name begins with `prefix`."""

    def stop(self, name: str, *, drain_seconds: float = 20.0) -> JobStatus | None:
        """Ends a job's whole group (SIGTERM, time to drain, SIGKILL) and proves it; None when there is no such job."""

    def read(self, path: str, offset: int = 0, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Bytes of a file from an offset; fewer than `max_bytes`, or none, at its present end."""

    @property
    def archive_path(self) -> str:
        """The archive that runs there, in full: `PYTHON -I ARCHIVE MODULE` runs a module of it."""

    def file_facts(self, path: str) -> dict[str, Any] | None:
        """`bytes` and `sha256` of a file; None when there is none."""

    def read_json(self, path: str) -> Any:
        """What a small JSON file holds; None when there is none."""

    def put(self, source: Path, target: str, *, say: Callable[[str], None] | None = None) -> Transfer:
        """Sends a file: under a temporary name, compared by SHA-256, then renamed.

        What arrived before the connection broke is not sent again, also by a later call for the same content. `say` is
        told how far it is every few seconds, and at its end the rate.
        """

    def get(self, source: str, target: Path, *, say: Callable[[str], None] | None = None) -> Transfer:
        """Fetches a file, the same way."""

    def close(self) -> None:
        """Ends the connection, if there is one. Jobs go on."""

"""What every host does the same way: ask the archive that runs there. Only the transport differs."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import sha256_file
from slipstream.tasks.hosts.archive import MINIMUM_PYTHON, build_archive
from slipstream.tasks.hosts.host import (
    MAX_OUTPUT_BYTES,
    MAX_READ_BYTES,
    CommandTimedOut,
    Done,
    HostUnreachable,
    Job,
    JobStatus,
    Progress,
    Transfer,
)
from slipstream.tasks.hosts.host_lock import GPU_LOCK, LOCK_FOLDER
from slipstream.tasks.nvml import LIBRARY

SAY_SECONDS = 5.0
GRACE_SECONDS = 10.0  # an answer's way back, over the time that the host itself was given
KILL_SECONDS = 10.0
HASH_SECONDS = 600.0  # of a large file on a slow disk
START_SECONDS = 150.0  # the host's own limits on a start, together
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 10.0


class _Told:
    """A transfer of a file as somebody is told of it."""

    def __init__(self, name: str, size: int, say: Callable[[str], None] | None) -> None:
        self._name, self._size, self._say = name, size, say
        self._began = self._last = time.monotonic()

    def progress(self, arrived: int) -> None:
        if self._say is not None and time.monotonic() - self._last > SAY_SECONDS:
            self._last = time.monotonic()
            self._say(f"{self._name}: {arrived / 1e6:.1f} of {self._size / 1e6:.1f} MB")

    def end(self, resumed_bytes: int, way: str) -> Transfer:
        done = Transfer(self._name, self._size, resumed_bytes, time.monotonic() - self._began, way)
        if self._say is not None:
            self._say(str(done))
        return done


def _part(name: str, sha256: str) -> str:
    """What a file is called until it is whole: the same for the same content, so that a later call goes on."""
    return f".{name}.{sha256[:12]}.part"


class ScriptedHost(ABC):
    """A host by the archive that runs there.

    Args:
        base: Slipstream's directory on the host; a relative one lies in the home directory.
        command_seconds: limit of a short command and of an answer.
        reconnect_seconds: how long a connection that broke may take to come back; 0 is not at all.
    """

    def __init__(self, base: str, *, command_seconds: float, reconnect_seconds: float) -> None:
        self.base, self.command_seconds, self.reconnect_seconds = base, command_seconds, reconnect_seconds
        self._directory = ""  # known once asked for; it does not change while a host is a host
        self._reached = False  # a host that never answered is no broken connection: its address may be wrong
        self._interrupted = False

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def _exchange(self, request: bytes, mark: str, seconds: float) -> tuple[int, str]:
        """Asks the archive `request`, one line; the answer's begins with `mark`. Returns exit code and output.

        Raises HostUnreachable."""

    @abstractmethod
    def _read(self, path: str, offset: int, max_bytes: int) -> bytes:
        """Bytes of a file from an offset. Raises HostUnreachable, and OSError for a file that cannot be read."""

    @abstractmethod
    def _send(self, source: Path, target: str, progress: Progress) -> str:
        """Copies a file to the host, or what is missing at its end, not looking whether it is whole: by which way."""

    @abstractmethod
    def _fetch(self, source: str, target: Path, progress: Progress) -> str:
        """Copies a file from the host, the same way."""

    @property
    def _stands(self) -> bool:
        """Whether a connection stands, as far as this side knows."""
        return True

    @property
    def directory(self) -> str:
        if not self._directory:
            self._directory = str(self.hello()["directory"])
        return self._directory

    def hello(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("hello", self.command_seconds)
        return found

    def facts(self, *, address: str, port: int) -> dict[str, Any]:
        before = time.time()
        found: dict[str, Any] = self._ask(
            "machine_facts",
            self.command_seconds,
            address=address,
            port=port,
            lock_folder=LOCK_FOLDER,
            lock_names=[GPU_LOCK],
            nvml=LIBRARY,
        )
        after = time.time()
        # Its clock was read between the two: what lies within them is no skew.
        skew = max(0.0, found["time"] - after) + min(0.0, found["time"] - before)
        return {**found, "skew_seconds": skew}

    def run(
        self, command: tuple[str, ...], *, stdin: str = "", seconds: float | None = None, directory: str = ""
    ) -> Done:
        limit = self.command_seconds if seconds is None else seconds
        asked = {"command": command, "stdin": stdin, "seconds": limit, "directory": directory}
        value = self._ask("run_command", limit, again=False, max_bytes=MAX_OUTPUT_BYTES, **asked)
        if value.pop("timed_out"):
            last = (value["stdout"] + value["stderr"]).strip()[-500:]
            raise CommandTimedOut(
                f"`{command[0]}` on {self.name} had not ended after {limit:.0f} s; its last words: {last or 'none'}",
                expected="a short command; its whole group was ended on the host",
                do="raise host.command_timeout_seconds if it only needs longer",
            )
        return Done(**value)

    def start(self, job: Job) -> JobStatus:
        asked = {key: value for key, value in asdict(job).items() if key != "run"}
        return JobStatus.of(self._ask("start_job", START_SECONDS, submission=job.submission, **asked))

    def status(self, name: str) -> JobStatus | None:
        value = self._ask("job_status", self.command_seconds, name=name)
        return None if value is None else JobStatus.of(value)

    def jobs(self, prefix: str = "") -> list[JobStatus]:
        return [JobStatus.of(value) for value in self._ask("list_jobs", self.command_seconds, prefix=prefix)]

    def stop(self, name: str, *, drain_seconds: float = 20.0) -> JobStatus | None:
        within = drain_seconds + KILL_SECONDS + self.command_seconds
        value = self._ask("stop_job", within, name=name, drain_seconds=drain_seconds, kill_seconds=KILL_SECONDS)
        return None if value is None else JobStatus.of(value)

    def read(self, path: str, offset: int = 0, max_bytes: int = MAX_READ_BYTES) -> bytes:
        try:
            data: bytes = self._repeat(lambda: self._read(path, offset, max_bytes))
        except OSError as error:
            raise SlipstreamError(
                f"{path} on {self.name} cannot be read: {error}", expected="a file", do="correct the path"
            ) from error
        return data

    @property
    def archive_path(self) -> str:
        return f"{self.directory}/{build_archive().path}"

    def file_facts(self, path: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._ask("file_facts", HASH_SECONDS, path=path)
        return found

    def read_json(self, path: str) -> Any:
        try:
            data: bytes = self._repeat(lambda: self._read(path, 0, MAX_READ_BYTES))
        except FileNotFoundError:
            return None
        try:
            return json.loads(data)
        except ValueError as error:
            raise SlipstreamError(
                f"{path} on {self.name} is not readable as JSON: {error}", expected="JSON", do=f"delete {path} there"
            ) from error

    def put(self, source: Path, target: str, *, say: Callable[[str], None] | None = None) -> Transfer:
        if not source.is_file():
            raise SlipstreamError(f"there is no file {source}", expected="a file to send", do="correct the path")
        sha256, size = sha256_file(source), source.stat().st_size
        folder, _, name = target.rpartition("/")
        part = f"{folder}/{_part(name, sha256)}".lstrip("/" if not folder else "")
        told = _Told(name, size, say)
        try:
            while True:
                found = self._ask("prepare_folder", self.command_seconds, folder=folder, part=part)
                if found["free_bytes"] < size - found["part_bytes"]:
                    raise self._full(target, size, found["free_bytes"])
                way = self._repeat(lambda: self._send(source, part, told.progress))
                try:
                    within = self._long(source)
                    self._ask("settle_file", within, temporary=part, target=target, sha256=sha256)
                    return told.end(found["part_bytes"], way)
                except SlipstreamError:
                    if not found["part_bytes"]:
                        raise
                    # what an earlier call left was not the beginning of this file; it is gone now
        except HostUnreachable:
            raise  # what has arrived stays for the next call
        except Exception as error:
            with suppress(SlipstreamError):
                self._ask("remove_file", self.command_seconds, path=part)
            free = self._ask("prepare_folder", self.command_seconds, folder=folder, part=part)["free_bytes"]
            if isinstance(error, OSError) and free < size:
                raise self._full(target, size, free) from error
            if isinstance(error, OSError):
                raise SlipstreamError(
                    f"{source} could not be sent to {target} on {self.name}: {error}",
                    expected="a file that can be read here and a folder that can be written there",
                    do="correct the path or its owner",
                ) from error
            raise

    def get(self, source: str, target: Path, *, say: Callable[[str], None] | None = None) -> Transfer:
        facts = self.file_facts(source)
        if facts is None:
            raise SlipstreamError(
                f"there is no file {source} on {self.name}", expected="a file to fetch", do="correct the path"
            )
        part = target.with_name(_part(target.name, facts["sha256"]))
        there, told = part.stat().st_size if part.exists() else 0, _Told(target.name, facts["bytes"], say)
        way = self._repeat(lambda: self._fetch(source, part, told.progress))
        if sha256_file(part) != facts["sha256"]:
            arrived = part.stat().st_size
            part.unlink()
            raise SlipstreamError(
                f"{source} of {self.name} arrived changed ({arrived} of {facts['bytes']} bytes)",
                expected="the file as it was when it was asked for",
                do="fetch it again when nothing writes to it; logs are read by offset",
            )
        part.replace(target)
        return told.end(there, way)

    def _ask(self, call: str, within: float, /, *, again: bool = True, **arguments: Any) -> Any:
        """The value of a call on the host. Asked again over a new connection while that makes sense and is harmless.

        Args:
            call: name of the call (`far_side.CALLS`).
            within: seconds that the host may take.
            again: whether it may be asked twice.
        """
        nonce = secrets.token_hex(16)
        request = {"nonce": nonce, "base": self.base, "call": call, "arguments": arguments}
        data = json.dumps(request).encode()
        limit = within + GRACE_SECONDS
        code, output = self._repeat(lambda: self._exchange(data, f"{nonce} ", limit), again=again)
        for line in output.splitlines():
            if line.startswith(f"{nonce} "):
                answer = json.loads(line.removeprefix(f"{nonce} "))
                break
        else:
            raise self._no_answer(code, output)
        if "error" in answer:
            raise SlipstreamError(**answer["error"])
        if "broken" in answer:
            raise SlipstreamError(
                f"{call} failed on {self.name}:\n{answer['broken']}",
                expected="an answer",
                do="report this; the host was left as it is",
            )
        return answer["value"]

    def _repeat(self, what: Any, *, again: bool = True) -> Any:
        """What `what` returns. A connection that stood and broke is waited for; one that never stood is not.

        A signal that comes meanwhile ends the waiting, also of later calls: whoever cleans up on the way out does not
        wait for minutes, and not at all where the signal came while nothing stood.
        """
        if self._interrupted and not self._stands:
            raise HostUnreachable(f"{self.name} was given up when we were told to end")
        deadline, pause = time.monotonic() + self.reconnect_seconds, FIRST_PAUSE_SECONDS
        try:
            while True:
                try:
                    return what()
                except HostUnreachable:
                    patient = again and self._reached and not self._interrupted
                    if not patient or time.monotonic() + pause > deadline:
                        raise
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        except Exception:
            raise
        except BaseException:  # SystemExit, KeyboardInterrupt, Prefect's own
            self._interrupted = True
            raise

    def _no_answer(self, code: int, output: str) -> SlipstreamError:
        wanted = ".".join(map(str, MINIMUM_PYTHON))
        return SlipstreamError(
            f"Slipstream's helper did not answer on {self.name} (exit code {code}): {output.strip()[-500:] or '-'}",
            expected=f"Python {wanted} or newer there, as host.python",
            do=f"install it, or set host.python to the path of a Python {wanted} or newer",
            runbook="host-unreachable.md",
        )

    def _full(self, target: str, needed: int, free: int) -> SlipstreamError:
        return SlipstreamError(
            f"{target} needs {needed / 1e6:.1f} MB and the disk there has {free / 1e6:.1f} MB free, on {self.name}",
            expected="room on the host",
            do="free space there or set host.directory to a larger disk, then run the same command again",
            runbook="disk-full.md",
        )

    @staticmethod
    def _long(source: Path) -> float:
        """Seconds to hash a file on a slow disk."""
        return 60.0 + source.stat().st_size / 50e6

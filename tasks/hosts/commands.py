"""A short command on the host it runs on: bounded in time and output. Runs there, out of the archive."""

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.process import NEUTRAL_DIRECTORY

READ_BYTES = 65_536


def run_command(
    base: Path, *, command: Sequence[str], stdin: str, seconds: float, max_bytes: int, directory: str
) -> dict[str, Any]:
    """Runs a command to its end, in a session of its own so that its children end with it when time is up.

    Args:
        base: Slipstream's directory on this host.
        command: program and arguments, no shell.
        stdin: text for its standard input.
        seconds: then the whole group gets SIGKILL: a client that gives up leaves nothing behind.
        max_bytes: of stdout and of stderr each; the rest is read and dropped.
        directory: working directory; "" is `/`.

    Returns exit_code (-N: by signal N), stdout, stderr, truncated, timed_out.
    """
    try:
        child = subprocess.Popen(
            command,
            cwd=directory or NEUTRAL_DIRECTORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise SlipstreamError(
            f"`{command[0]}` cannot be run: {error}",
            expected="a program and a directory that are there",
            do="install it, or correct the command",
        ) from error
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    outputs = [_Output(child.stdout, max_bytes), _Output(child.stderr, max_bytes)]
    writer = threading.Thread(target=_write, args=(child.stdin, stdin.encode()), daemon=True)
    writer.start()
    timed_out = False
    try:
        child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
    # Also where the command has ended: what it left in the background holds our pipes, and was no job.
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for output in outputs:
        output.thread.join(timeout=5.0)
    out, err = (bytes(output.data).decode(errors="replace") for output in outputs)
    truncated = any(output.dropped for output in outputs)
    return {
        "exit_code": child.returncode,
        "stdout": out,
        "stderr": err,
        "truncated": truncated,
        "timed_out": timed_out,
    }


class _Output:
    """Reads a pipe to its end, in a thread: neither pipe may fill while the other is read."""

    def __init__(self, pipe: IO[bytes], max_bytes: int) -> None:
        self.data, self.dropped = bytearray(), 0
        self._pipe, self._max = pipe, max_bytes
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        while block := os.read(self._pipe.fileno(), READ_BYTES):
            kept = block[: self._max - len(self.data)]
            self.data += kept
            self.dropped += len(block) - len(kept)


def _write(pipe: IO[bytes], data: bytes) -> None:
    try:
        with pipe:
            pipe.write(data)
    except BrokenPipeError:
        pass  # the command does not read its input

"""A short command on the host it runs on: bounded in time and output. Runs there, out of the archive.

It ends with whoever asked for it: with us, also where we are killed, and with the connection on which its answer goes.
"""

import ctypes
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.process import NEUTRAL_DIRECTORY

READ_BYTES = 65_536
STDOUT = 1
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # before a fork: nothing is loaded between it and the command


def run_command(
    base: Path, *, command: Sequence[str], stdin: str, seconds: float, max_bytes: int, directory: str
) -> dict[str, Any]:
    """Runs a command to its end, in a session of its own so that its children end with it when time is up.

    Args:
        base: Slipstream's directory on this host.
        command: program and arguments, no shell.
        stdin: text for its standard input.
        seconds: then the whole group gets SIGKILL, as it does when nobody is left to read our answer: a client that
            gives up, or is killed, leaves nothing behind.
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
            preexec_fn=_die_with_us,
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
    try:
        timed_out = not _wait(child.pid, seconds)
    finally:
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


def _die_with_us() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(pid: int, seconds: float) -> bool:
    """Waits for the end of a child of ours; not for longer than somebody is there for our answer, and than `seconds`.

    Returns whether it ended within that time, or nobody asks any more.
    """
    ended = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(STDOUT, 0)  # our answer goes there; of a pipe or socket whose reader has gone an error is told
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if poll.poll(left * 1000):
                return True
        return False
    finally:
        os.close(ended)


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

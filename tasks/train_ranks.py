"""The train stage over several processes: starts this host's ranks, tells what rank 0 tells, and ends them all."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json
from slipstream.tasks.manifest import write_json
from slipstream.tasks.proc_stat import process_start_time
from slipstream.tasks.process import NEUTRAL_DIRECTORY, POLL_SECONDS
from slipstream.tasks.shares import STORE
from slipstream.tasks.stage import StageContext
from slipstream.tasks.torchrun import Launch, Meeting
from slipstream.tasks.train_words import Heard

# Variable: the file that says where this host meets others that train (`Meeting`, and `parts` of `train_rank.Stage`).
# Unset: it trains alone.
MEETING = "TRAINING_MEETING"
RANKS = "train-ranks"  # in the working directory, while they run: what they are told, and torchrun's own files
STOP_SECONDS = 20.0
GONE_SECONDS = 10.0


def meeting_here() -> dict[str, Any] | None:
    """What the file that MEETING names says, on the first of several hosts; None where this one trains alone."""
    path = os.environ.get(MEETING)
    if path is None:
        return None
    said: dict[str, Any] = read_json(Path(path), expected="where hosts meet", do="run the train stage again")
    return said


def train_by_ranks(
    context: StageContext, processes: int, device: str, meeting: dict[str, Any] | None, skip: Collection[str]
) -> dict[str, Any]:
    """Runs the stage in this host's ranks, to their end. Returns its figures.

    Args:
        context: of the stage.
        processes: ranks of this host.
        device: `cpu` or `cuda`.
        meeting: as `meeting_here` says.
        skip: as `train.run`.

    Raises what rank 0 raised, and SlipstreamError that names the first rank that ended; then all others have ended too,
    also when this is interrupted.
    """
    config = context.config
    said = meeting or {"parts": ()}
    stage = {
        "deployment": config.model_dump(mode="json"),
        "workdir": str(context.workdir),
        "out": str(context.out),
        "resumed": context.resumed,
        "skip": sorted(skip),
        "parts": said["parts"],
    }
    where = None if meeting is None else Meeting(**{key: value for key, value in meeting.items() if key != "parts"})
    if where is not None:
        _check_port(where.port)
    heard = Heard(context.reporter)
    folder = context.workdir / RANKS
    folder.mkdir(exist_ok=True)
    write_json(folder / "stage.json", stage)
    store, threads = str(context.input("extract") / STORE), threads_of(config.host.threads, processes)
    launch = Launch(processes, device, 0, where, store, threads, str(folder / "stage.json"))
    with _torchrun(launch, heard) as lines:
        for line in lines:
            if not heard.line(line):
                print(line, end="", file=sys.stderr, flush=True)  # for the log
    shutil.rmtree(folder)
    if heard.figures is None:
        raise heard.error()
    return heard.figures


def threads_of(threads: int | None, processes: int) -> int | None:
    """Threads of each rank. Args: threads: `host.threads`."""
    return None if threads is None else max(1, threads // processes)


def _check_port(port: int) -> None:
    """Raises SlipstreamError where somebody listens at the port that the other hosts will come to."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's: what has ended holds nothing
        try:
            probe.bind(("", port))
        except OSError as error:
            raise SlipstreamError(
                f"port {port} of this host, at which the ranks of all hosts shall meet, cannot be had: {error}",
                expected="a free port",
                do="set training.rendezvous_port to another one, or see who listens: `ss -ltnp`",
                runbook="left-over-server.md",
            ) from error


@contextmanager
def _torchrun(launch: Launch, heard: Heard) -> Iterator[Iterator[str]]:
    """Yields the lines of torchrun and its ranks; whatever happens, none of them is left."""
    command = [sys.executable, "-P", "-m", "slipstream.tasks.torchrun", launch.to_json(), str(os.getpid())]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=NEUTRAL_DIRECTORY,
        text=True,
        errors="replace",
    )
    assert child.stdout is not None
    try:
        yield iter(child.stdout)
    finally:
        _stop(child)
        child.stdout.close()
        _wait_until_gone({rank["pid"]: rank["start_time"] for rank in heard.ranks.values()})


def _stop(child: "subprocess.Popen[str]") -> None:
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()  # the kernel then ends its ranks
        child.wait()


def _wait_until_gone(pids: dict[int, int | None]) -> None:
    """Proves that no rank is left. Args: pids: process id -> start time."""
    deadline = time.monotonic() + GONE_SECONDS
    while left := [pid for pid, start in pids.items() if start is not None and process_start_time(pid) == start]:
        if time.monotonic() > deadline:
            raise SlipstreamError(
                f"ranks of the training are still there after SIGKILL: processes {left}",
                expected="that SIGKILL ends them",
                do="they hang in the kernel (driver or file system): look with `cat /proc/PID/stack`",
                runbook="left-over-server.md",
                fault="F15",
            )
        time.sleep(POLL_SECONDS)

"""Rank 0's hold on the other ranks of a tensor-parallel engine: they are started, led step by step, and ended together.

Each rank is a child process with a socket to rank 0 (commands one way, last words the other) and the loopback to all
(tensors). Rank 0 sends what a step begins with, then every rank runs the same scheduler on it. An idle rank sleeps on
its socket. When a rank dies, rank 0 gets SIGCHLD, and whoever waits for it in an exchange sees its connection close;
when rank 0 dies, the kernel ends the others.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.rank_group import CARD_SECONDS, LOAD_SECONDS, PEER_SECONDS, be_patient, connect, make_store
from slipstream.engine.serving.engine_options import EngineOptions
from slipstream.engine.serving.protocol import Abort, Channel, Connect, Failed, Here, Step, Stop

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine, Request
    from slipstream.engine.sequence import RequestOutput
    from slipstream.engine.tensor_parallel import TensorParallel

# A rank that ended because another one did; the one to be named is another.
EXIT_PEER_LOST = 4
START_SECONDS = 120.0
# How long rank 0 looks for the culprit after an exchange has failed, and for ranks to leave when they are told to.
CULPRIT_SECONDS = 2.0
LEAVE_SECONDS = 3.0


class _RankEnded(BaseException):
    """Raised wherever rank 0 is when another rank dies. No Exception: no `except` there may take it for its own."""


class Ranks:
    """The ranks 1..n - 1.

    Args: options: of the engine; `tensor_parallel_size` is n, 2 or more. To be made in the main thread.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.size = options.tensor_parallel_size
        self._store = make_store()
        self._doing, self._watching = "starting", False
        self._parallel: TensorParallel | None = None
        self._processes: list[subprocess.Popen[bytes]] = []  # of ranks 1, 2, ..
        self._channels: list[Channel] = []
        for rank in range(1, self.size):
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-P", "-m", "slipstream.engine.serving.rank_process"]
            arguments = [f"--socket={theirs.fileno()}", f"--store={self._store}", f"--parent={os.getpid()}"]
            self._processes.append(
                subprocess.Popen(
                    [*command, *arguments, f"--rank={rank}", json.dumps(asdict(options))],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), self._store],
                )
            )
            theirs.close()
            self._channels.append(Channel(ours, f"rank {rank}"))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """As long as all live. Raises SlipstreamError that names the rank as soon as one does not; ends them all."""
        before = signal.signal(signal.SIGCHLD, self._child_ended)
        well = False
        try:
            try:
                self._watching = True
                self._child_ended()  # one may have ended already
                yield
                self._watching, well = False, True
            except RuntimeError as error:
                from slipstream.kernels.all_gather import PeerLost  # at last: it imports torch

                if not isinstance(error, PeerLost):
                    raise
                raise self.lost(str(error)) from error
        except _RankEnded:
            raise self.lost() from None
        finally:
            self._watching = False
            signal.signal(signal.SIGCHLD, before)
            self._leave(LEAVE_SECONDS if well else 0.0)

    def connect(self) -> "TensorParallel":
        """Waits until every rank has started, then joins them."""
        deadline = time.monotonic() + START_SECONDS
        for rank, channel in enumerate(self._channels, start=1):
            try:
                message = channel.receive_within(deadline - time.monotonic())
            except BrokenPipeError as error:
                raise self.lost(str(error)) from error
            if not isinstance(message, Here):
                raise SlipstreamError(
                    f"rank {rank} of {self.size} has not started after {START_SECONDS:.0f} s",
                    expected="every rank's process running",
                    do="look at the load of the machine, or lower server.tensor_parallel_size",
                )
        self.tell(Connect())
        self._doing = "connecting"
        self._parallel = connect(0, self.size, self._store)
        os.close(self._store)
        be_patient(self._parallel, LOAD_SECONDS)
        self._doing = "loading"
        return self._parallel

    def tell(self, message: object) -> None:
        """Sends a message to every rank, without waiting."""
        for channel in self._channels:
            try:
                channel.send(message)
            except BrokenPipeError as error:
                raise self.lost(str(error)) from error

    def serving(self) -> list[int]:
        """From now on a rank that dies does so while serving. Returns the process ids by rank, this one's first."""
        assert self._parallel is not None
        be_patient(self._parallel, PEER_SECONDS)
        self._doing = "serving"
        return [os.getpid(), *(process.pid for process in self._processes)]

    def lost(self, reason: str = "") -> SlipstreamError:
        """What ended the group: the rank that died, by signal or with its last words, or those that do not answer."""
        self._watching = False
        deadline = time.monotonic() + CULPRIT_SECONDS
        while not (ended := self._culprits()) and time.monotonic() < deadline:
            time.sleep(0.02)
        expected = "all ranks alive: each holds a part of every layer"
        if not ended:
            silent = {rank: p.pid for rank, p in enumerate(self._processes, start=1) if p.poll() is None}
            stopped = {rank: pid for rank, pid in silent.items() if _is_stopped(pid)}
            who = "stopped by a signal (SIGSTOP)" if stopped else "still running, and perhaps stuck"
            named = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in (stopped or silent).items())
            seconds = LOAD_SECONDS if self._doing == "loading" else PEER_SECONDS
            return SlipstreamError(
                f"an exchange between the {self.size} ranks failed while {self._doing}; "
                f"{who}: {named or 'none'} ({reason})",
                expected=f"every rank's answer within {seconds:.0f} s; of cards that serve {CARD_SECONDS:.0f} s",
                do="see what holds them up (stopped processes, memory, load), and start again",
            )
        rank, code = ended[0]
        pid = self._processes[rank - 1].pid
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = self._last_words(rank)
        return SlipstreamError(
            f"rank {rank} of {self.size} (pid {pid}) {how} while {self._doing}" + (f": {words}" if words else ""),
            expected=expected,
            do="see its last words here or in the log above; SIGKILL that nobody sent is the kernel short of memory",
        )

    def _child_ended(self, *_: object) -> None:
        if self._watching and self._culprits():
            raise _RankEnded

    def _culprits(self) -> list[tuple[int, int]]:
        """(rank, exit code) of those that ended, and not because another one had."""
        codes = [(rank, process.poll()) for rank, process in enumerate(self._processes, start=1)]
        return [(rank, code) for rank, code in codes if code is not None and code != EXIT_PEER_LOST]

    def _last_words(self, rank: int) -> str:
        try:
            messages = self._channels[rank - 1].receive(wait=False)
        except BrokenPipeError:
            return ""
        return next((message.reason for message in messages if isinstance(message, Failed)), "")

    def _leave(self, seconds: float) -> None:
        """Ends them: politely, and after `seconds` not."""
        for channel, process in zip(self._channels, self._processes, strict=True):
            if process.poll() is None:
                try:
                    channel.send(Stop())
                except BrokenPipeError:
                    continue
        deadline = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


class Leader:
    """Rank 0's engine, as the engine loop sees it: what it is asked, every rank is told before the next step.

    Args:
        engine: of rank 0.
        ranks: the others.
    """

    def __init__(self, engine: "Engine", ranks: Ranks) -> None:
        self.engine, self._ranks = engine, ranks
        self.stats, self.scheduler = engine.stats, engine.scheduler
        self._commands: list[Request | Abort] = []

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    @property
    def captures_after_ready(self) -> int:
        return self.engine.captures_after_ready

    @property
    def compiles_after_ready(self) -> int:
        return self.engine.compiles_after_ready

    def add_request(self, request: "Request") -> None:
        """Raises SlipstreamError for a request that could never run; then nobody is told of it."""
        # The seed is drawn here, once: all ranks must add the same noise.
        self._commands.append(self.engine.add_request(request))

    def abort(self, request_id: str) -> bool:
        known = self.engine.abort(request_id)
        if known:
            self._commands.append(Abort(request_id))
        return known

    def step(self) -> "list[RequestOutput]":
        commands, self._commands = self._commands, []
        self._ranks.tell(Step(commands))
        return self.engine.step()


def follow(engine: "Engine", channel: Channel) -> None:
    """The life of ranks 1..n - 1: the steps of rank 0, on the same commands, until it says stop or is gone."""
    while True:
        for message in channel.receive(wait=True):
            if isinstance(message, Stop):
                return
            assert isinstance(message, Step), message
            for command in message.commands:
                if isinstance(command, Abort):
                    engine.abort(command.request_id)
                else:
                    engine.add_request(command)
            engine.step()

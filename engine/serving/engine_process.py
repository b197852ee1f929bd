"""The engine's own process: loads, then loops over rounds, and speaks with the HTTP front through one socket.

It is started by `main` and lives no longer than it: the socket's end, or the kernel's signal at the parent's death,
ends it. SIGTERM to the whole group is left to the front, which lets running requests finish first.
"""

import argparse
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import asdict
from typing import Any, Protocol

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.serving.engine_options import EngineOptions
from slipstream.engine.serving.protocol import (
    Abort,
    Channel,
    Failed,
    GetStats,
    Phase,
    Ready,
    Refused,
    Round,
    Stats,
    Stop,
    Submit,
    Tokens,
    Traced,
)
from slipstream.engine.serving.ranks import Leader, Ranks

EXIT_FAILED = 1
LAST_WORDS_SECONDS = 5.0
PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Steppable(Protocol):
    """What the loop needs of an engine (engine.engine.Engine has it)."""

    @property
    def has_work(self) -> bool: ...

    def add_request(self, request: Any) -> object: ...

    def abort(self, request_id: str) -> bool: ...

    def step(self) -> list[Any]: ...


class EngineLoop:
    """Requests in, rounds out, until told to stop.

    Args:
        engine: runs the rounds.
        channel: to the front.
    """

    def __init__(self, engine: Steppable, channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._stopping = False

    def run(self) -> None:
        """Works until `Stop` came and nothing is left to do. Raises BrokenPipeError when the front is gone."""
        while not self._stopping or self._engine.has_work:
            for message in self._channel.receive(wait=not self._engine.has_work):
                self._handle(message)
            if self._engine.has_work:
                self._step()
        self._channel.flush(LAST_WORDS_SECONDS)

    def _step(self) -> None:
        from slipstream.engine.serving.trace_file import pack_trace

        outputs = self._engine.step()
        tokens = []
        for output in outputs:
            logprobs = output.logprobs
            entries = None if logprobs is None else [(entry.logprob, entry.top) for entry in logprobs]
            tokens.append(Tokens(output.request_id, output.new_token_ids, output.finish_reason, entries))
        traces = [Traced(output.request_id, pack_trace(output.trace)) for output in outputs if output.trace is not None]
        if tokens:
            self._channel.send(Round(tokens), *traces)

    def _handle(self, message: object) -> None:
        from slipstream.engine.engine import Request
        from slipstream.engine.serving.engine_build import engine_stats

        match message:
            case Submit(request_id, prompt_ids, params, trace):
                try:
                    self._engine.add_request(Request(request_id, prompt_ids, params, trace=trace))
                except SlipstreamError as error:
                    self._channel.send(Refused(request_id, f"{error.found}; expected {error.expected}"))
            case Abort(request_id):
                self._engine.abort(request_id)
            case GetStats(ticket):
                self._channel.send(Stats(ticket, engine_stats(self._engine)))  # type: ignore[arg-type]
            case Stop():
                self._stopping = True
            case _:
                raise TypeError(f"unknown message {message!r}")


def start_engine_process(options: EngineOptions) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts the engine process. Returns it and the front's end of the socket.

    To be called from the main thread: the kernel ends the child when the thread that started it ends.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "slipstream.engine.serving.engine_process"]
    arguments = [f"--socket={theirs.fileno()}", f"--parent={os.getpid()}", json.dumps(asdict(options))]
    # Blocked from its first moment, also in its ranks: Ctrl-C goes to all, and what it means is for the front to say.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process = subprocess.Popen([*command, *arguments], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies (Linux), also while it is busy loading."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask
        sys.exit(EXIT_FAILED)


def main() -> None:
    """Entry of the process: `python -P -m ... --socket=FD --parent=PID OPTIONS_JSON`."""
    parser = argparse.ArgumentParser(prog="slipstream-engine")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("options", type=json.loads)
    arguments = parser.parse_args()
    die_with(arguments.parent)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=arguments.socket))
    try:
        run(channel, EngineOptions.from_json(arguments.options))
    except BrokenPipeError:
        print("slipstream engine: the HTTP front is gone; the engine ends", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except Exception as error:
        say_why(channel, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_FAILED)  # at once: a thread may still wait for the other ranks


def say_why(channel: Channel, error: Exception) -> None:
    """The last words of a process that ends with an error: to its parent, or to the log when that is gone."""
    if not isinstance(error, SlipstreamError):
        traceback.print_exc()
    reason = str(error) if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {error}"
    try:
        channel.send(Failed(reason))
        channel.flush(LAST_WORDS_SECONDS)
    except BrokenPipeError:
        print(reason, file=sys.stderr)


def run(channel: Channel, options: EngineOptions) -> None:
    """Loads the engine and works until the front says stop; with several ranks, starts and ends the others."""
    if options.tensor_parallel_size == 1:
        serve(channel, options)
        return
    ranks = Ranks(options)  # before torch is imported here: they do so at the same time
    with ranks.watched():
        serve(channel, options, ranks)


def serve(channel: Channel, options: EngineOptions, ranks: Ranks | None = None) -> None:
    """Loads this rank's part, and loops over rounds."""

    def phase(text: str) -> None:
        channel.send(Phase(text))

    phase("importing torch")
    from slipstream.engine.serving.engine_build import build_engine

    parallel = None
    if ranks is not None:
        phase("waiting for the other ranks")
        parallel = ranks.connect()
    engine, settings = build_engine(options, phase, parallel=parallel)
    # What is loaded stays for good: the collector need not walk over it in the middle of a round.
    gc.collect()
    gc.freeze()
    channel.send(Ready({**settings, "rank_pids": ranks.serving() if ranks else [os.getpid()]}))
    EngineLoop(Leader(engine, ranks) if ranks else engine, channel).run()


if __name__ == "__main__":
    main()

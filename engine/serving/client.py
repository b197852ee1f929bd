"""The front's view of the engine process: submit, read tokens, abort, ask for counters, notice its death."""

import asyncio
import itertools
import pickle
import signal
import socket
import subprocess
from collections.abc import AsyncGenerator
from typing import Any

from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.serving.protocol import (
    LENGTH,
    Abort,
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
    encode,
)

STATS_SECONDS = 30.0
EXIT_SECONDS = 10.0


class EngineGone(Exception):
    """The engine process ended. The text says how."""


class RequestRefused(Exception):
    """The engine did not take this request. The text says why."""


class EngineClient:
    """Talks to one engine process.

    Args:
        connection: the front's socket of the pair; this object owns it.
        process: the engine process, or None when it runs elsewhere (tests).

    Attributes:
        phase: what the engine does until it is ready.
        settings: effective settings, once ready.
        ready, gone: events; `death` says how the engine ended once `gone` is set.
    """

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._connection, self._process = connection, process
        self._writer: asyncio.StreamWriter | None = None
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._tickets = itertools.count()
        self._waiting_stats: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._stopping = False
        self._last_words = ""
        self.phase = "starting"
        self.settings: dict[str, Any] = {}
        self.death = ""
        self.ready, self.gone = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Reads what the engine says until it ends; then every waiting caller gets `EngineGone`."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)
        try:
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._handle(pickle.loads(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writer.close()
            self.death = await self._how_it_ended()
            self.gone.set()
            for queue in self._queues.values():
                queue.put_nowait(EngineGone(self.death))
            for future in self._waiting_stats.values():
                if not future.done():
                    future.set_exception(EngineGone(self.death))

    async def generate(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, trace: bool = False
    ) -> AsyncGenerator[Tokens | Traced]:
        """Submits a request and yields its tokens, one item a round, the trace last.

        Leaving the iterator early (the client went away, a stop string matched) aborts the request.
        Raises EngineGone, RequestRefused.
        """
        if self.gone.is_set():
            raise EngineGone(self.death)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._queues[request_id] = queue
        finished = False
        try:
            self._send(Submit(request_id, prompt_ids, params, trace))
            while not finished:
                item = await queue.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                # A trace comes right after the last tokens, so with one the tokens do not end the request.
                finished = isinstance(item, Traced) or (item.finish_reason is not None and not trace)
                yield item
        finally:
            del self._queues[request_id]
            if not finished:
                self._send(Abort(request_id))

    async def stats(self) -> dict[str, Any]:
        """Counters of the engine, as of now (between two rounds). Raises EngineGone, TimeoutError."""
        if self.gone.is_set():
            raise EngineGone(self.death)
        ticket = next(self._tickets)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting_stats[ticket] = future
        try:
            self._send(GetStats(ticket))
            return await asyncio.wait_for(future, STATS_SECONDS)
        finally:
            del self._waiting_stats[ticket]

    async def stop(self, seconds: float = EXIT_SECONDS) -> None:
        """Ends the engine process: asks, waits, kills. Afterwards it is gone."""
        self._stopping = True
        if self.ready.is_set():
            self._send(Stop())
        elif self._process is not None:
            self._process.kill()  # it does not listen while it loads, and holds nothing that needs saving
        try:
            await asyncio.wait_for(self.gone.wait(), seconds)
        except TimeoutError:
            if self._process is not None:
                self._process.kill()
                await self.gone.wait()

    def _send(self, message: object) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))

    def _handle(self, message: object) -> None:
        match message:
            case Round(outputs):
                for output in outputs:
                    self._deliver(output.request_id, output)
            case Traced(request_id):
                self._deliver(request_id, message)
            case Refused(request_id, reason):
                self._deliver(request_id, RequestRefused(reason))
            case Stats(ticket, values):
                future = self._waiting_stats.get(ticket)
                if future is not None and not future.done():
                    future.set_result(values)
            case Phase(text):
                self.phase = text
            case Ready(settings):
                self.phase, self.settings = "ready", settings
                self.ready.set()
            case Failed(reason):
                self._last_words = reason
            case _:
                raise TypeError(f"unknown message {message!r}")

    def _deliver(self, request_id: str, item: object) -> None:
        queue = self._queues.get(request_id)
        if queue is not None:  # else it was aborted while this was on its way
            queue.put_nowait(item)

    async def _how_it_ended(self) -> str:
        if self._process is None:
            return self._last_words or "the engine closed the socket"
        try:
            code = await asyncio.to_thread(self._process.wait, EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._stopping and code == 0:
            return "stopped"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        text = f"the engine process (pid {self._process.pid}) {how}"
        return f"{text}: {self._last_words}" if self._last_words else text

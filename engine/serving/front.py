"""The front's process: HTTP server, tokenizer, signals, and what to do when the engine dies."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import uvicorn

from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import write_atomic
from slipstream.engine.injection import parse_injection
from slipstream.engine.serving.api import Front, create_app
from slipstream.engine.serving.client import EngineClient

EXIT_COULD_NOT_START = 1
EXIT_ENGINE_DIED = 3
LAST_ANSWERS_SECONDS = 5


async def serve(
    options: argparse.Namespace, listener: socket.socket, connection: socket.socket, process: subprocess.Popen[bytes]
) -> int:
    """Serves until a signal, or until the engine dies.

    Args:
        options: of the command line.
        listener: listening socket.
        connection: socket to the engine process.
        process: the engine process, which loads meanwhile.

    Returns: the exit code.
    """
    return await Serving(options, listener, EngineClient(connection, process)).run()


def find_chat_problem(tokenizer: ChatTokenizer) -> str:
    """Why chats cannot be served with this tokenizer's template, tried on a chat of one word; "" when they can."""
    try:
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
        tokenizer.stop_token_ids  # noqa: B018  (reads the template's end of an answer)
    except SlipstreamError as error:
        return f"{error.found}; expected {error.expected}"
    return ""


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: `Serving` decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Serving:
    """One server from bound socket to exit code.

    Args:
        options: of the command line.
        listener: bound socket.
        client: to the engine process, which loads meanwhile.
    """

    def __init__(self, options: argparse.Namespace, listener: socket.socket, client: EngineClient) -> None:
        name = options.served_model_name or Path(options.target).resolve().name
        self._options, self._listener, self._client = options, listener, client
        self._front = Front(
            client, name, options.max_context_tokens, options.diagnostics, leave_file=options.leave_file
        )
        config = uvicorn.Config(
            create_app(self._front),
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=max(1, round(options.shutdown_timeout_seconds)),
        )
        self._server = _Server(config)
        self._failure = ""
        self._stop_asked = False
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run(self) -> int:
        """Serves until a signal, or until the engine dies. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop)
        self._write_state("starting")
        reading = asyncio.create_task(self._client.run())
        watching = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[self._listener])
            was_ready = self._front.tokenizer is not None  # the last thing to come: the engine alone serves nobody
            died = self._client.gone.is_set()  # it has not been asked to leave yet
            await self._client.stop()
        finally:
            watching.cancel()
            reading.cancel()
            if self._options.state_file is not None:
                self._options.state_file.unlink(missing_ok=True)
        if died or self._failure:
            print(f"slipstream server: {self._failure or self._client.death}", file=sys.stderr, flush=True)
            return EXIT_ENGINE_DIED if was_ready else EXIT_COULD_NOT_START
        print("slipstream server: stopped", flush=True)
        return 0

    def _stop(self) -> None:
        """A signal: no new requests, the running ones may finish; a second signal ends them too."""
        if self._stop_asked:
            self._server.force_exit = True
        self._stop_asked = self._front.draining = True
        if not self._client.ready.is_set():
            self._server.config.timeout_graceful_shutdown = 1  # nothing runs yet
        self._server.should_exit = True

    async def _watch(self) -> None:
        """Loads the tokenizer beside the engine, says when all is ready, and ends the server when the engine dies."""
        gone = asyncio.create_task(self._client.gone.wait())
        ready = asyncio.create_task(self._make_ready())
        await asyncio.wait({gone, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and ready.exception() is not None:
            self._failure = str(ready.exception())
        else:
            await gone
        ready.cancel()
        # Those who wait are told by `EngineGone`; give their answers a moment to go out.
        self._server.config.timeout_graceful_shutdown = LAST_ANSWERS_SECONDS
        self._server.should_exit = True

    async def _make_ready(self) -> None:
        tokenizer = await asyncio.to_thread(ChatTokenizer, self._options.target)
        chat_problem = await asyncio.to_thread(find_chat_problem, tokenizer)
        await self._client.ready.wait()
        if self._stop_asked:  # too late: the listener may be closed, and nobody is to be told that it is ready
            return
        self._front.tokenizer, self._front.chat_problem = tokenizer, chat_problem
        self._write_state("ready")
        self._announce()

    def _announce(self) -> None:
        settings = self._client.settings
        invariance = settings["row_invariance"]
        print(f"slipstream server: ready at {self.url} (pid {os.getpid()}, engine {settings['engine_pid']})")
        for text in settings["injections"]:
            print(
                f"  WARNING: FAULT PUT IN ON PURPOSE: {text} ({parse_injection(text).meaning}); this is a test server"
            )
        print(f"  K = {settings['num_steps']}, width {settings['verify_width']}, slots {settings['slots'] or 'none'}")
        ranks = settings["tensor_parallel_size"]
        threads = f"{settings['threads']} threads" + (f" on each of {ranks} ranks" if ranks > 1 else "")
        print(f"  {settings['dtype']}, context {settings['max_context_tokens']} tokens, {threads}")
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in settings["start_seconds"].items())
        graphs = settings["graphs"]
        steps = f"{graphs['captures']} graphs" if graphs else "no graphs"
        print(f"  {settings['device_name']}, {steps}, {settings['rounds_in_flight']} rounds in flight; start: {parts}")
        print(f"  row invariance: {'yes' if invariance['invariant'] else 'NO'}: {invariance['detail']}")
        print(f"  promise: {invariance['promise']}", flush=True)
        if self._front.chat_problem:
            print(f"  WARNING: text completions only, chats cannot be served: {self._front.chat_problem}", flush=True)

    def _write_state(self, status: str) -> None:
        if self._options.state_file is None:
            return
        state: dict[str, Any] = {
            "status": status,
            "pid": os.getpid(),
            "engine_pid": self._client.settings.get("engine_pid"),
            "url": self.url,
            "host": self._listener.getsockname()[0],
            "port": self._listener.getsockname()[1],
            "written": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        }
        write_atomic(self._options.state_file, (json.dumps(state, indent=2) + "\n").encode())

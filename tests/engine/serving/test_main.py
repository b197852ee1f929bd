"""What a server's command line cannot be ends it with a clear error, and a server that was never ready exits with 1."""

import argparse
import asyncio
import json
import os
import signal
import socket
import threading

import pytest

from slipstream.engine.serving.client import EngineClient
from slipstream.engine.serving.front import EXIT_COULD_NOT_START, Serving
from slipstream.engine.serving.main import bind, main, parse_arguments
from slipstream.engine.serving.protocol import Channel, Ready


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--port 99999", "--port is 99999"),
        ("--port -1", "--port is -1"),
        ("--threads 0", "threads = 0"),
        ("--threads -3", "threads = -3"),
        ("--shutdown-timeout-seconds nan", "--shutdown-timeout-seconds is nan"),
        ("--shutdown-timeout-seconds inf", "--shutdown-timeout-seconds is inf"),
        ("--shutdown-timeout-seconds -1", "--shutdown-timeout-seconds is -1"),
        ("--capture-slots=-1", "capture_slots = [-1]"),
        ("--capture-slots 2,2", "capture_slots = [2, 2]"),
        ("--inject F5:slot=0,kind=normed", "--inject F5:slot=0,kind=normed without --diagnostics"),
        ("--diagnostics --inject F98", "there is no F98 to inject"),
        ("--state-file /nowhere/at/all.json", "--state-file /nowhere/at/all.json"),
    ],
)
def test_flags_that_cannot_be_end_with_an_error(flags, words, capsys, monkeypatch):
    monkeypatch.setattr("slipstream.engine.serving.main.start_engine_process", lambda _: pytest.fail("it was started"))
    assert main(["--target", "/t", "--port", "0", *flags.split()]) == EXIT_COULD_NOT_START
    error = capsys.readouterr().err
    assert words in error
    assert "expected:" in error


def test_an_engine_that_is_ready_too_late_does_not_spoil_the_stop(tmp_path, monkeypatch, capsys):
    """Asked to stop while it loads: the engine is ready when the listener is closed already."""
    monkeypatch.setattr("slipstream.engine.serving.front.ChatTokenizer", lambda _: None)
    monkeypatch.setattr("slipstream.engine.serving.front.find_chat_problem", lambda _: "")
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    state = tmp_path / "state.json"
    options = parse_arguments(["--target", str(tmp_path), "--state-file", str(state)])

    async def run() -> int:
        serving = Serving(options, listener, EngineClient(ours))
        running = asyncio.create_task(serving.run())
        while not state.exists():
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        while listener.fileno() != -1:
            await asyncio.sleep(0.01)
        channel = Channel(theirs)
        channel.send(Ready({}))
        await asyncio.to_thread(channel.receive, wait=True)  # until it is told to stop
        theirs.close()
        return await running

    assert asyncio.run(run()) == 0
    output = capsys.readouterr()
    assert "stopped" in output.out
    assert "ready" not in output.out
    assert not output.err
    assert not state.exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_answer_waits_for_the_clients_acknowledgement(host):
    """asyncio switches Nagle's algorithm off on the connections of a listener that names its protocol alone."""

    async def run() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(look, sock=bind(host, 0)) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            try:
                return await accepted
            finally:
                writer.close()

    assert asyncio.run(run()) == 1


def serve_with_a_quick_engine(options: argparse.Namespace) -> int:
    """Exit code of a server whose engine is ready at once."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)

    def work() -> None:
        channel.send(Ready({}))
        channel.receive(wait=True)  # until it is told to stop
        theirs.close()

    async def run() -> int:
        client = EngineClient(ours)
        serving = Serving(options, socket.create_server(("127.0.0.1", 0)), client)
        return await serving.run()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        return asyncio.run(run())
    finally:
        thread.join(10)


def test_a_broken_tokenizer_means_that_it_could_not_start(tmp_path, capsys):
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert serve_with_a_quick_engine(parse_arguments(["--target", str(tmp_path)])) == EXIT_COULD_NOT_START
    assert "no usable tokenizer" in capsys.readouterr().err

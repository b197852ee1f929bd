"""Commands for a host that cannot be reached: they end at once, in words, with their records right; or by a signal."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from slipstream.flows.run_record import FILE
from slipstream.tasks.hosts.host import HostUnreachable
from slipstream.tasks.lock import LOCK

Start = Callable[..., subprocess.Popen[str]]
END_SECONDS = 120.0  # of a process on a busy machine; the host's own limit below is far longer
PATIENCE_SECONDS = 3600  # a command that waits for the host does not end in a test's time


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes a connection and says nothing: whoever connects to it is in the middle of connecting."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(END_SECONDS)
        yield server


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command of the command line for a far host at a port."""
    started: list[subprocess.Popen[str]] = []
    host = {"kind": "ssh", "address": "127.0.0.1", "known_hosts": str(tmp_path / "known_hosts")}
    host |= {"workdir": str(tmp_path / "run"), "reconnect_seconds": str(PATIENCE_SECONDS)}
    host |= {"connect_timeout_seconds": str(PATIENCE_SECONDS)}
    config = tmp_path / "deployment.yaml"
    config.write_text(json.dumps({"host": {key: value for key, value in host.items() if "seconds" not in key}}))

    def begin(*words: str, port: int) -> subprocess.Popen[str]:
        sets = [f"host.{key}={value}" for key, value in host.items() if "seconds" in key]
        options = [word for one in (*sets, f"host.port={port}") for word in ("--set", one)]
        env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        command = [sys.executable, "-P", "-m", "slipstream.flows.cli", *words, str(config), *options]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def flow_states(workdir: Path) -> list[str]:
    """How Prefect's own server, which is gone again, remembers the runs."""
    with sqlite3.connect(f"file:{workdir / 'prefect' / 'prefect.db'}?mode=ro", uri=True) as database:
        return [str(state) for (state,) in database.execute("select state_type from flow_run")]


def assert_nothing_is_left(workdir: Path) -> None:
    assert not (workdir / FILE).exists()
    assert not (workdir / LOCK).exists()
    assert not (workdir / "prefect" / "server.state.json").exists()


@pytest.mark.parametrize("words", [("doctor",), ("stage", "cleanup"), ("clean",), ("bench",), ("host", "trust")])
def test_a_port_that_nobody_listens_on_is_told_at_once(start: Start, words: tuple[str, ...]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # ours, and nobody listens
        _, said = (process := start(*words, port=held.getsockname()[1])).communicate(timeout=END_SECONDS)
    assert process.returncode == 1
    lines = [line.strip() for line in said.splitlines()]
    assert any("127.0.0.1" in line and "cannot be reached: Connection refused" in line for line in lines), said
    assert [line.partition(":")[0] for line in lines[-3:]] == ["expected", "do", "runbook"]
    assert lines[-1] == "runbook: runbooks/host-unreachable.md"


def test_a_run_to_a_port_that_nobody_listens_on(flow: ModuleType, tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        host = {"kind": "ssh", "address": "127.0.0.1", "port": held.getsockname()[1], "workdir": str(tmp_path / "run")}
        host |= {"known_hosts": str(tmp_path / "known_hosts"), "reconnect_seconds": PATIENCE_SECONDS}
        config = tmp_path / "deployment.yaml"
        config.write_text(json.dumps({"host": host}))
        began = time.monotonic()
        with pytest.raises(HostUnreachable, match="cannot be reached: Connection refused"):
            flow.lifecycle(str(config))
    assert time.monotonic() - began < END_SECONDS
    assert not (tmp_path / "run" / FILE).exists()
    assert not (tmp_path / "run" / LOCK).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("words", [("stage", "cleanup"), ("bench",), ("doctor",)])
def test_a_signal_ends_a_command_in_the_middle_of_connecting(
    start: Start, silent: socket.socket, words: tuple[str, ...], number: signal.Signals
) -> None:
    process = start(*words, port=silent.getsockname()[1])
    connection, _ = silent.accept()
    with connection:
        assert connection.recv(4) == b"SSH-"  # it waits for our banner now
        process.send_signal(number)
        process.communicate(timeout=END_SECONDS)
    # By its own handler, or as the system ends a program that has none.
    assert process.returncode in ({130, -2} if number == signal.SIGINT else {143, -number})
    silent.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        silent.accept()  # no clean-up came for a host that nothing was done on


def test_a_signal_ends_a_run_in_the_middle_of_connecting(start: Start, silent: socket.socket, tmp_path: Path) -> None:
    process = start("run", port=silent.getsockname()[1])
    connection, _ = silent.accept()
    with connection:
        assert connection.recv(4) == b"SSH-"
        assert (tmp_path / "run" / FILE).exists()
        process.terminate()
        process.communicate(timeout=END_SECONDS)
    assert process.returncode == 143
    assert flow_states(tmp_path / "run") == ["CRASHED"]
    assert_nothing_is_left(tmp_path / "run")
    silent.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        silent.accept()

"""`slipstream up`: what it refuses, and the settings under which it starts Prefect. It is run for real elsewhere."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.flows import up
from slipstream.tasks.process import (
    ProcessIdentity,
    ProcessRecord,
    group_members,
    start_detached,
    stop_group,
)


def test_a_folder_without_deployments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"there is no prefect\.yaml in") as error:
        up.up(tmp_path, tmp_path / "home", 0)
    assert error.value.runbook == "prefect-server.md"
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("entrypoint: flows/lifecycle.py:lifecycle, parameters: {config: a.yaml}", "flows/lifecycle.py:lifecycle"),
        ("entrypoint: slipstream.flows.lifecycle:lifecycle, parameters: {}", "parameters {}"),
    ],
)
def test_a_file_as_entrypoint_and_a_flow_without_config_are_refused(tmp_path: Path, entry: str, found: str) -> None:
    """A file's folder would come first on sys.path, where `flows`, `tasks` and `kernels` hide other packages."""
    (tmp_path / "prefect.yaml").write_text(f"deployments:\n  - {{name: mine, {entry}}}\n")
    with pytest.raises(SlipstreamError, match="deployment mine") as error:
        up.up(tmp_path, tmp_path / "home", 0)
    assert found in str(error.value)


def test_nothing_is_reported_to_others_and_nothing_goes_to_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "PREFECT_HOME",
        "DO_NOT_TRACK",
        "PREFECT_SERVER_ANALYTICS_ENABLED",
        "PREFECT_SERVER_EPHEMERAL_ENABLED",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_LOGGING_SERVER_LEVEL", "DEBUG")
    before = dict(os.environ)
    with up._environment(tmp_path, PREFECT_API_URL="http://127.0.0.1:1/api"):
        inside = dict(os.environ)
    assert dict(os.environ) == before
    assert inside["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"  # the server's channel
    assert inside["DO_NOT_TRACK"] == "1"  # the client's
    assert inside["PREFECT_SERVER_EPHEMERAL_ENABLED"] == "false"
    assert inside["PREFECT_HOME"] == str(tmp_path)
    assert inside["PREFECT_API_URL"] == "http://127.0.0.1:1/api"
    assert inside["PREFECT_LOGGING_SERVER_LEVEL"] == "DEBUG"  # what the user set


def test_stopping_what_does_not_run_says_so(tmp_path: Path) -> None:
    assert up.stop(tmp_path) == up.Stopped(("worker: not running", "server: not running"), ())


def test_a_stale_record_whose_pid_is_somebody_elses_now_stops_nobody(tmp_path: Path) -> None:
    """Of another start time, as after a reuse of the pid; and of another boot."""
    strangers = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)]
    try:
        for stranger, name, change in zip(
            strangers, ("worker", "server"), ({"start_time": 1}, {"boot_id": "another"}), strict=True
        ):
            identity = ProcessIdentity.of(stranger.pid)
            assert identity is not None
            stale: Any = replace(identity, **change)  # type: ignore[arg-type]
            record = ProcessRecord(stale, ("prefect",), "log", "yesterday", {"api": "http://x/api"})
            (tmp_path / f"{name}.state.json").write_text(json.dumps(asdict(record)))
        assert up.stop(tmp_path).said == ("worker: not running", "server: not running")
        assert [stranger.poll() for stranger in strangers] == [None, None]
        assert list(tmp_path.glob("*.json")) == []
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_a_damaged_record_keeps_not_the_other_from_its_end(tmp_path: Path) -> None:
    (tmp_path / "worker.state.json").write_text("{")
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    server = start_detached(sleep, log=tmp_path / "server.log", state_file=tmp_path / "server.state.json")
    ended = up.stop(tmp_path)
    assert ended.said[0].startswith("worker: left: ")
    assert ended.said[1].startswith("server: stopped")
    assert group_members(server.identity) == []
    assert "worker.state.json" in ended.left[0].found


def test_a_port_that_somebody_holds_is_told_with_both_ways_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            SlipstreamError, match=f"port {port} of 127.0.0.1 is held by process {os.getpid()}"
        ) as error:
            up._server(tmp_path, port, [])
    assert "--port 0" in error.value.do
    assert f"PREFECT_API_URL=http://127.0.0.1:{port}/api" in error.value.do
    assert (error.value.fault, error.value.runbook) == ("F15", "prefect-server.md")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_of_its_group_is_ended_before_the_next_one(tmp_path: Path) -> None:
    fork = [sys.executable, "-c", "import os, time; os.fork(); time.sleep(600)"]
    server = start_detached(fork, log=tmp_path / "server.log", state_file=tmp_path / "server.state.json")
    while len(group_members(server.identity)) < 2:
        time.sleep(0.02)
    os.kill(server.identity.pid, signal.SIGKILL)
    while server.exit_code() is None:
        time.sleep(0.02)
    said: list[str] = []
    assert up._running(tmp_path / "server.state.json", 5.0, "server", said) is None
    assert group_members(server.identity) == []
    assert said == [f"server: ended 1 processes that a killed one (process {server.identity.pid}) had left"]


def test_a_server_that_runs_and_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up.own_server, "HEALTHY_SECONDS", 0.3)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    state, api = tmp_path / "server.state.json", "http://127.0.0.1:9/api"
    server = start_detached(sleep, log=tmp_path / "server.log", state_file=state, notes={"api": api})
    try:
        with pytest.raises(SlipstreamError, match=f"{api} does not answer") as error:
            up._server(tmp_path, 0, [])
        assert "`slipstream up --stop`" in error.value.do
    finally:
        stop_group(server.identity, drain_seconds=0)


# A worker as Prefect's: its flow runs lead groups of their own. Argument: how long a run takes to make good.
WORKER = """
import subprocess, sys, time
run = '''
import signal, sys, time
signal.signal(15, lambda *_: (time.sleep(float(sys.argv[1])), sys.exit()))
print(flush=True)
time.sleep(600)
'''
runs = [subprocess.Popen([sys.executable, "-c", run, sys.argv[1]], start_new_session=True, stdout=-1) for _ in range(2)]
[one.stdout.readline() for one in runs]
print(flush=True)
[one.wait() for one in runs]
time.sleep(600)
"""


@pytest.mark.parametrize(("takes", "patience"), [("1", 60.0), ("60", 1.0)])
def test_flow_runs_are_told_at_once_and_waited_for_as_long_as_they_take(
    monkeypatch: pytest.MonkeyPatch, takes: str, patience: float
) -> None:
    monkeypatch.setattr(up, "FLOW_STOP_SECONDS", patience)
    monkeypatch.setattr(up, "TELL_SECONDS", 0.3)
    worker = subprocess.Popen([sys.executable, "-c", WORKER, takes], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        worker.stdout.readline()
        told: list[str] = []
        said = up._end_flow_runs(worker.pid, told.append)
        assert len(said) == 2
        assert all(("killed after 1 s" in line) == (takes == "60") for line in said)
        assert "waiting for flow runs to make good" in told[0]
        assert not psutil.Process(worker.pid).children() or takes == "60"
    finally:
        worker.kill()
        worker.communicate()

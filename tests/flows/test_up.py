"""`slipstream up`: what it refuses, and the settings under which it starts Prefect. It is run for real elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.flows import up


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
    assert up.stop(tmp_path) == ["worker: not running", "server: not running"]


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

"""`slipstream up` that is killed at any moment: the next call takes up what runs, and starts nothing twice."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from slipstream.flows.prefect_server import answers
from slipstream.tasks.process import read_record

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 240.0


class Home:
    """A project of its own, with server and worker below `runs/prefect`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.prefect = folder, folder / "runs" / "prefect"
        (folder / "configs").mkdir()
        (folder / "configs" / "smollm2.yaml").write_text(yaml.safe_dump({"host": {"workdir": "work"}}))
        shutil.copy(ROOT / "prefect.yaml", folder)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self.env |= {"PREFECT_WORKER_QUERY_SECONDS": "1", "OMP_NUM_THREADS": "1"}

    def start(self, *words: str) -> Any:
        command = [sys.executable, "-P", "-m", "slipstream.flows.cli", "up", *words]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def up(self, *words: str) -> str:
        process = self.start(*words)
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, said
        return str(said)

    def lives(self, kind: str) -> list[int]:
        """Living leaders of `prefect server start` or `prefect worker start` of this home."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = process.cmdline()
                mine = process.environ().get("PREFECT_HOME") == str(self.prefect.absolute())
                if mine and kind in words and "start" in words and process.status() != "zombie":
                    found.append(process.pid)
        return found

    def recorded(self, kind: str) -> Any:
        return read_record(self.prefect / f"{kind}.state.json")

    def healthy(self) -> bool:
        record = self.recorded("server")
        return record is not None and answers(record.notes["api"])


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.up("--stop")
    assert made.lives("server") == made.lives("worker") == []


MOMENTS: dict[str, Callable[[Home], Any]] = {
    "the server is recorded": lambda home: home.recorded("server"),
    "the server answers": Home.healthy,
    "the worker is recorded": lambda home: home.recorded("worker"),
}


def killed(home: Home, moment: str, number: signal.Signals) -> None:
    """`up`, ended at that moment."""
    process, deadline = home.start("--port", "0"), time.monotonic() + PATIENCE_SECONDS
    while not MOMENTS[moment](home):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0


def whole(home: Home, said: str) -> None:
    """One server and one worker, those of the records, and the deployments."""
    assert home.lives("server") == [home.recorded("server").identity.pid]
    assert home.lives("worker") == [home.recorded("worker").identity.pid]
    assert "deployments: 5" in said
    assert f"PREFECT_API_URL={home.recorded('server').notes['api']}" in said


def test_up_is_killed_on_its_way_and_what_runs_is_taken_up(home: Home) -> None:
    killed(home, "the server is recorded", signal.SIGKILL)
    (server,) = home.lives("server")  # it goes on, and is found
    killed(home, "the worker is recorded", signal.SIGHUP)
    (worker,) = home.lives("worker")
    said = home.up("--port", "0")
    whole(home, said)
    assert f"server: runs already (process {server}" in said
    assert f"worker: runs already (process {worker}" in said
    assert "created" not in said
    assert "started" not in said


@pytest.mark.soak
def test_who_loses_both_gets_both_again_with_what_they_knew(home: Home) -> None:
    home.up("--port", "0")
    for kind in ("worker", "server"):
        os.kill(home.recorded(kind).identity.pid, signal.SIGKILL)
    said = home.up("--port", "0")
    assert "server: started" in said
    assert "worker: started" in said
    assert "created" not in said  # pool and limits lie in the database
    whole(home, said)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("moment", MOMENTS)
def test_up_is_killed_at_each_moment_by_each_signal(home: Home, moment: str, number: signal.Signals) -> None:
    killed(home, moment, number)
    whole(home, home.up("--port", "0"))

"""How runs of a deployment end that are cancelled or killed, or lose their worker: nothing stays, nobody is misled."""

import os
import shutil
import signal
import subprocess
import sys
from typing import Any
from uuid import UUID

import pytest

from slipstream.tasks import registry
from slipstream.tasks.lock import LOCK
from slipstream.tasks.process import read_record


def test_a_run_that_is_cancelled_is_cleaned_up_on_its_way_out_and_leaves_the_worker_nothing(done: Any) -> None:
    shutil.rmtree(done.workdir / "parity")
    (done.control / "hang-parity").touch()
    run = done.run("lifecycle")
    done.wait_for(lambda: "parity" in done.ran() and done.server_lives())
    done.command("prefect", "flow-run", "cancel", str(run))
    assert done.ends(run) == "Cancelled"
    assert not done.server_lives()  # a process in its own session: Prefect's kill does not reach it
    assert done.ran() == ["cleanup", "parity", "cleanup"]  # the hook's would stop what the next run has started


@pytest.mark.soak
@pytest.mark.parametrize("name", registry.NAMES)
def test_a_run_can_be_cancelled_at_every_stage(done: Any, name: str) -> None:
    shutil.rmtree(done.workdir / name, ignore_errors=True)
    (done.control / f"hang-{name}").touch()
    run = done.run("lifecycle")
    done.wait_for(lambda: name in done.ran())
    done.command("prefect", "flow-run", "cancel", str(run))
    if name == "cleanup":  # the way out runs that stage, too
        (done.control / "hang-cleanup").unlink()
    assert done.ends(run) == "Cancelled"
    done.wait_for(lambda: not (done.workdir / LOCK).exists())
    assert not done.server_lives()
    assert done.ran()[-1] == "cleanup"


def test_a_flow_whose_worker_is_killed_leaves_nothing_and_up_starts_another(done: Any) -> None:
    shutil.rmtree(done.workdir / "parity", ignore_errors=True)
    (done.control / "hang-parity").touch()
    run = done.run("lifecycle")
    done.wait_for(lambda: "parity" in done.ran() and done.server_lives())
    worker = read_record(done.folder / "runs" / "prefect" / "worker.state.json")
    assert worker is not None
    os.kill(worker.identity.pid, signal.SIGKILL)
    said = done.command("slipstream.flows.cli", "up")
    assert "worker: started" in said
    (done.control / "hang-parity").unlink()
    assert done.ends(run) in (
        "Crashed",
        "Completed",
    )  # its output goes to a pipe that nobody reads: Prefect may crash of it
    done.wait_for(lambda: not done.server_lives() and not (done.workdir / LOCK).exists())
    assert done.ran()[-1] == "cleanup"


def test_a_script_run_that_was_killed_is_running_for_ever_until_it_is_abandoned(done: Any) -> None:
    from prefect.client.orchestration import get_client

    project = done
    shutil.rmtree(project.workdir / "parity", ignore_errors=True)
    (project.control / "hang-parity").touch()
    words = [sys.executable, "-P", "-m", "slipstream.flows.cli", "run", "configs/smollm2.yaml"]
    script = subprocess.Popen(words, cwd=project.folder, env=project.env, stdout=subprocess.DEVNULL)
    try:
        done.wait_for(lambda: "parity" in project.ran() and project.server_lives())
        with get_client(sync_client=True) as client:
            from slipstream.flows.run_record import read_run

            noted = read_run(project.workdir)
            assert noted is not None
            assert noted.identity.pid == script.pid
            run = UUID(noted.flow_run_id)
            assert client.read_flow_run(run).state_name == "Running"
    finally:
        script.kill()
        script.wait()
    assert done.state_of(run) == "Running"
    (project.control / "hang-parity").unlink()
    out = project.command("slipstream.flows.cli", "abandon", "configs/smollm2.yaml")
    assert f"abandoned lifecycle run {run} of process {script.pid}: it was Running" in out
    assert done.state_of(run) == "Crashed"
    assert not project.server_lives()
    assert "nothing to abandon" in project.command("slipstream.flows.cli", "abandon", "configs/smollm2.yaml")


def test_stopping_the_worker_ends_its_runs_first(done: Any) -> None:
    """A worker that is stopped leaves its flow runs going on; so they are ended while it can still tell of them."""
    shutil.rmtree(done.workdir / "parity", ignore_errors=True)
    (done.control / "hang-parity").touch()
    run = done.run("lifecycle")
    done.wait_for(lambda: "parity" in done.ran() and done.server_lives())
    said = done.command("slipstream.flows.cli", "up", "--stop")
    assert f"flow run of process {done.process_of('parity')}: ended" in said
    assert "worker: stopped" in said
    assert done.state_of(run) == "Crashed"
    assert not done.server_lives()
    assert not (done.workdir / LOCK).exists()
    assert "worker: started" in done.command("slipstream.flows.cli", "up")  # for whatever test comes next

"""F15: a server left over. Ours is stopped; a foreign one is named, left alone, and stops us while it blocks us."""

import os
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from slipstream.configs.schema import Deployment
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import cleanup
from slipstream.tasks.nvml import Gpu, Gpus, GpuUser
from slipstream.tasks.ports import port_is_free
from slipstream.tasks.process import group_members, start_detached
from slipstream.tasks.server import ServerPlan, start_server
from slipstream.tasks.stage import run_stage

CAUGHT = [
    ("F15", "cleanup", "ours is stopped; held by process PID: named and left alone"),
    ("F15", "launch", "GPU 0: 60 GB in use, by process PID of USER: named and left alone"),
]

LISTEN = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""


@pytest.fixture
def foreign():
    """A process that this pipeline did not start, on a port. Returns (process, port)."""
    process = subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, start_new_session=True)
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def deployment_on(port):
    return Deployment(server={"port": port, "shutdown_timeout_seconds": 5.0})


def test_a_foreign_process_is_named_and_left_alone(foreign, tmp_path):
    process, port = foreign
    said = []
    assert cleanup.clean(tmp_path, deployment_on(port), say=said.append) == []
    (told,) = [line for line in said if line.startswith(f"port {port} of 127.0.0.1 is held by process {process.pid}")]
    assert f"of user {psutil.Process(process.pid).username()}" in told
    assert "time.sleep(600)" in told  # its command line
    assert "left alone" in told
    with pytest.raises(SlipstreamError, match=f"held by process {process.pid}") as error:
        cleanup.check_port("127.0.0.1", port)
    assert error.value.fault == "F15"
    assert "leaves it alone" in str(error.value)
    assert process.poll() is None
    assert not port_is_free("127.0.0.1", port)


def test_a_foreign_process_stops_a_launch_before_anything_is_started(foreign, tmp_path):
    process, port = foreign
    plan = ServerPlan(tmp_path / "no target", None, 0, port=port)
    with pytest.raises(SlipstreamError, match=f"held by process {process.pid}"):
        start_server(deployment_on(port), tmp_path, plan)
    assert list(tmp_path.iterdir()) == []
    assert process.poll() is None


def test_a_foreign_process_elsewhere_is_nobodys_business(foreign, tmp_path):
    assert run_stage(cleanup.STAGE, deployment_on(0), tmp_path).figures["stopped"] == []


def test_our_own_leftover_is_stopped_and_its_port_is_free(tmp_path):
    ours = start_detached(
        [sys.executable, "-c", LISTEN], log=tmp_path / "server.log", state_file=tmp_path / "server.state.json"
    )
    while not (text := (tmp_path / "server.log").read_text()):
        assert ours.exit_code() is None
    port = int(text)
    result = run_stage(cleanup.STAGE, deployment_on(port), tmp_path)
    assert [one["pid"] for one in result.figures["stopped"]] == [ours.identity.pid]
    assert group_members(ours.identity) == []
    assert port_is_free("127.0.0.1", port)


def test_a_state_file_that_names_a_foreign_process_by_chance_does_it_no_harm(foreign, tmp_path):
    """After a reboot, or much later, a pid of ours belongs to somebody else."""
    process, _ = foreign
    ours = start_detached([sys.executable, "-c", ""], log=tmp_path / "log", state_file=tmp_path / "server.state.json")
    text = (tmp_path / "server.state.json").read_text()
    (tmp_path / "server.state.json").write_text(text.replace(str(ours.identity.pid), str(process.pid)))
    cleanup.clean(tmp_path, deployment_on(0))
    assert process.poll() is None
    os.kill(process.pid, 0)


def test_with_the_check_off_the_fault_passes(foreign, tmp_path):
    _, port = foreign
    said = []
    assert cleanup.clean(tmp_path, deployment_on(port), say=said.append, skip={"F15"}) == []
    assert not any("is held by" in line for line in said)
    assert not port_is_free("127.0.0.1", port)


CARD = Gpu(0, "NVIDIA H200", "GPU-0", "9.0", 150 * 10**9, 60 * 10**9, (), True, 0, False, False, {})
OTHER = replace(CARD, index=1, uuid="GPU-1", used_bytes=0)


@pytest.fixture
def card_in_use(foreign, monkeypatch):
    """A card that the foreign process is on, by the driver's list. Returns the process."""
    process, _ = foreign
    card = replace(CARD, users=(GpuUser(process.pid, 59 * 10**9),))
    monkeypatch.setattr(cleanup, "read_gpus", lambda: Gpus("580", "13.0", (card, OTHER)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return process


def test_a_foreign_process_on_a_card_is_named_and_left_alone(card_in_use, tmp_path):
    with pytest.raises(SlipstreamError, match=f"GPU 0: .* in use, by process {card_in_use.pid} of ") as error:
        cleanup.check_gpus(deployment_on(0))
    assert (error.value.fault, error.value.runbook) == ("F15", "gpu-memory-not-freed.md")
    assert "time.sleep(600)" in error.value.found
    assert card_in_use.poll() is None


def test_on_the_way_out_a_foreign_process_on_a_card_is_nobodys_business(card_in_use, tmp_path):
    assert run_stage(cleanup.STAGE, deployment_on(0), tmp_path).figures["stopped"] == []


def test_on_other_cards_it_is_nobodys_business(card_in_use, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    cleanup.check_gpus(deployment_on(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0")
    with pytest.raises(SlipstreamError, match="GPU 0"):
        cleanup.check_gpus(deployment_on(0))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    cleanup.check_gpus(Deployment(server={"device": "cpu", "port": 0}))


def test_memory_that_nobody_is_named_for_is_in_use_as_well(monkeypatch):
    monkeypatch.setattr(cleanup, "read_gpus", lambda: Gpus("580", "13.0", (CARD,)))
    with pytest.raises(SlipstreamError, match=r"60\.0 GB of 150 GB in use, by nobody whom the driver names"):
        cleanup.check_gpus(deployment_on(0))


def test_with_the_check_off_a_card_in_use_passes(card_in_use):
    cleanup.check_gpus(deployment_on(0), skip={"F15"})

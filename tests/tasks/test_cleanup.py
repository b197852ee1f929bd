"""Cleanup: what we started is stopped whole and proven gone; GPU memory is waited for."""

import os
import signal
import sys
import time

import pytest

from slipstream.configs.schema import Deployment
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import cleanup, gpu_memory
from slipstream.tasks.gpu_memory import GpuMemory
from slipstream.tasks.manifest import write_json
from slipstream.tasks.ports import free_port, port_is_free
from slipstream.tasks.process import group_members, start_detached, stop_group
from slipstream.tasks.stage import run_stage

# A server with a child, as ours have: the child keeps the port open when only the parent ends.
LISTEN = """
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
os.fork()
time.sleep(600)
"""


@pytest.fixture
def deployment():
    return Deployment(server={"shutdown_timeout_seconds": 5.0})


@pytest.fixture
def leftover(tmp_path):
    """Starts a listener that an earlier run "forgot" in the workdir. Returns (process, port)."""
    started = []

    def start(name="server", **notes):
        port = free_port()
        process = start_detached(
            [sys.executable, "-c", LISTEN, str(port)],
            log=tmp_path / f"{name}.log",
            state_file=tmp_path / f"{name}.state.json",
            notes={"host": "127.0.0.1", "port": 0, **notes},
        )
        started.append(process)
        deadline = time.monotonic() + 30
        while port_is_free("127.0.0.1", port) or len(group_members(process.identity)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        write_json(tmp_path / f"{name}.ready.json", {"host": "127.0.0.1", "port": port})
        return process, port

    yield start
    for process in started:
        stop_group(process.identity, drain_seconds=0)


def test_leftovers_are_stopped_whole_and_forgotten(leftover, deployment, tmp_path):
    (first, port), (second, _) = leftover("server"), leftover("baseline")
    os.kill(first.identity.pid, signal.SIGKILL)  # its child lives on, without a parent of ours
    result = run_stage(cleanup.STAGE, deployment, tmp_path)
    assert {one["name"]: one["pid"] for one in result.figures["stopped"]} == {
        "server": first.identity.pid,
        "baseline": second.identity.pid,
    }
    assert group_members(first.identity) == group_members(second.identity) == []
    assert port_is_free("127.0.0.1", port)
    assert list(tmp_path.glob("*.json*")) == []
    assert (tmp_path / "server.log").exists()  # the log stays: somebody will want to read it
    assert run_stage(cleanup.STAGE, deployment, tmp_path).figures["stopped"] == []  # runs again, finds nothing


def test_a_state_file_of_a_process_that_is_gone_is_forgotten(leftover, deployment, tmp_path):
    process, _ = leftover()
    stop_group(process.identity, drain_seconds=5)
    (one,) = cleanup.clean(tmp_path, deployment)
    assert str(one) == f"server (pid {process.identity.pid}) was gone already"
    assert list(tmp_path.glob("*.json*")) == []


def test_a_damaged_record_keeps_nothing_else_from_its_end_and_is_named(leftover, deployment, tmp_path):
    (first, _), (middle, port), (last, _) = leftover("a"), leftover("m"), leftover("z")
    (tmp_path / "m.state.json").write_text('{"identity": {"pid"')
    with pytest.raises(SlipstreamError, match=r"m\.state\.json is not readable") as error:
        cleanup.clean(tmp_path, deployment)  # to make room: nothing is stopped for a launch that cannot come
    assert group_members(first.identity)
    with pytest.raises(SlipstreamError, match=r"m\.state\.json is not readable") as error:
        run_stage(cleanup.STAGE, deployment, tmp_path)
    assert group_members(first.identity) == group_members(last.identity) == []
    assert len(group_members(middle.identity)) == 2  # it may be anybody's; who writes its log is said
    assert f"m.log is open in process {middle.identity.pid} (`" in error.value.found
    assert f"kill -- -{middle.identity.pgid}`" in error.value.do
    assert (error.value.fault, error.value.runbook) == ("F15", "left-over-server.md")
    assert not port_is_free("127.0.0.1", port)
    os.killpg(middle.identity.pgid, signal.SIGKILL)
    with pytest.raises(SlipstreamError, match=r"m\.log is open in nobody"):
        run_stage(cleanup.STAGE, deployment, tmp_path)


@pytest.mark.parametrize("text", ["[]", '{"identity": {}}', "\0", "{", "{whole with no pid"])
def test_everything_damaged_is_named_at_once(leftover, deployment, tmp_path, text):
    process, _ = leftover("z")
    if text.startswith("{whole"):
        text = (tmp_path / "z.state.json").read_text().replace(f'"pid": {process.identity.pid}', '"pid": "x"')
    for name in ("a", "b"):
        (tmp_path / f"{name}.state.json").write_text(text)
    with pytest.raises(SlipstreamError, match="2 things were left") as error:
        run_stage(cleanup.STAGE, deployment, tmp_path)
    for number, name in enumerate("ab", 1):
        assert f"({number}) {tmp_path}/{name}.state.json is not" in error.value.found
        assert f"delete {tmp_path}/{name}.state.json" in error.value.do
    assert group_members(process.identity) == []


def test_a_group_that_does_not_come_back_keeps_no_other_from_its_end(leftover, deployment, tmp_path, monkeypatch):
    (first, _), (second, _) = leftover("a"), leftover("b")

    def stays(record):
        if record.identity == first.identity:
            raise SlipstreamError("memory of GPUs [0] is not back", fault="F15")

    monkeypatch.setattr(cleanup, "_wait_for_gpus", stays)
    with pytest.raises(SlipstreamError, match="is not back"):
        run_stage(cleanup.STAGE, deployment, tmp_path)
    assert group_members(first.identity) == group_members(second.identity) == []
    assert [path.name for path in tmp_path.glob("*.state.json")] == ["a.state.json"]  # looked at again the next time


def test_a_damaged_note_of_shared_memory_keeps_no_server_from_its_end(leftover, deployment, tmp_path):
    process, _ = leftover("server", segments_before=[])
    (tmp_path / "server.segments.json").write_text('[{"name": 1}]')
    with pytest.raises(SlipstreamError, match="what it left in shared memory is not known"):
        run_stage(cleanup.STAGE, deployment, tmp_path)
    assert group_members(process.identity) == []
    assert list(tmp_path.glob("*.json*")) == []


def test_the_figures_of_a_machine_without_a_gpu_say_so(deployment, tmp_path, monkeypatch):
    monkeypatch.setattr(cleanup, "read_gpu_memory", lambda: None)
    assert run_stage(cleanup.STAGE, deployment, tmp_path).figures["gpu_memory_bytes"] is None


def test_memory_of_a_gpu_is_waited_for_and_missed(leftover, deployment, tmp_path, monkeypatch):
    gigabyte = 10**9
    looks = [5 * gigabyte, gigabyte]

    def read():
        return [GpuMemory(0, looks.pop(0) if len(looks) > 1 else looks[0], (4242,))]

    monkeypatch.setattr(gpu_memory, "read_gpu_memory", read)
    monkeypatch.setattr(gpu_memory, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(cleanup, "GPU_SECONDS", 0.2)
    baseline = [{"index": 0, "used_bytes": gigabyte, "pids": []}]
    leftover("server", gpu_baseline=baseline)
    assert len(cleanup.clean(tmp_path, deployment)) == 1
    looks[:] = [5 * gigabyte]
    process, _ = leftover("server", gpu_baseline=baseline)
    with pytest.raises(SlipstreamError, match=r"memory of GPUs \[0\] is not back") as error:
        cleanup.clean(tmp_path, deployment)
    assert error.value.fault == "F15"
    assert "GPU 0 5.0 GB" in error.value.found
    assert "process 4242 of the host" in str(error.value)
    assert group_members(process.identity) == []

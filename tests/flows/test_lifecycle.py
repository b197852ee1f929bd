"""The flow with stand-ins for the stages, on a real Prefect server: order, skipping, resuming, cleanup, artifacts."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import yaml

from slipstream.engine.errors import SlipstreamError
from slipstream.flows.prefect_server import prefect_server, stop_left_over
from slipstream.flows.signals import unwinding_signals
from slipstream.tasks import registry
from slipstream.tasks.gates import GatesFailed
from slipstream.tasks.hosts.host import HostUnreachable
from slipstream.tasks.lock import LOCK
from slipstream.tasks.manifest import write_json
from slipstream.tasks.ports import port_is_free
from slipstream.tasks.process import group_members, read_record
from slipstream.tasks.stage import Stage, StageContext

PASSED = {"name": "speed", "status": "pass", "found": "1.2x", "expected": "1x", "why": "", "fault": "F18"}
FAILED = {**PASSED, "status": "fail", "found": "0.8x", "why": "The term that loses is draft: 27 ms"}
PIXEL = "data:image/png;base64,iVBORw0KGgo="  # as the report's template writes its plots
Body = Callable[[StageContext], dict[str, Any]]


class World:
    """Stand-ins for all stages, which remember when they ran."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workdir, self.config = root / "work", root / "deployment.yaml"
        self.ran: list[str] = []
        self.bodies: dict[str, Body] = {"report": self.report([PASSED])}
        self.write()
        table = tuple(
            Stage(s.name, 1, tuple(n for n in s.needs), s.config_sections, self._run(s.name), cached=s.cached)
            for s in registry.STAGES
        )
        monkeypatch.setattr(registry, "STAGES", table)
        monkeypatch.setattr(registry, "_BY_NAME", {stage.name: stage for stage in table})
        restore = Stage("restore", 1, (), (), self._run("restore"), cached=False)
        monkeypatch.setattr(registry, "RESTORE", restore)
        self.bodies["restore"] = lambda _: {"server": "restored", "pid": 1}
        self.bodies["launch"] = lambda _: {"base_url": "http://127.0.0.1:1", "model": "m", "pid": 1}

    def write(self, **sections: dict[str, Any]) -> None:
        host = {"workdir": str(self.workdir), "cache_dir": str(self.workdir.parent / "cache")}
        self.config.write_text(yaml.safe_dump({"host": host, **sections}))

    def report(self, gates: list[dict[str, str]]) -> Body:
        def body(context: StageContext) -> dict[str, Any]:
            (context.out / "report.html").write_text(f'<html><img alt="speed" src="{PIXEL}"></html>')
            row = {"figure": "speed", "no speculation": "1", "speculation": "1.2x"}
            return {"verdict": "fast", "table": [row], "markdown": "**fast**", "gates": gates, "num_steps": 3}

        return body

    def _run(self, name: str) -> Body:
        def body(context: StageContext) -> dict[str, Any]:
            self.ran.append(name)
            return self.bodies.get(name, lambda _: {})(context)

        return body

    def go(self, flow: ModuleType) -> dict[str, dict[str, Any]]:
        self.ran.clear()
        return flow.lifecycle(str(self.config))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def last_run() -> tuple[Any, dict[str, str]]:
    """(the last flow run, name -> state name of its tasks)."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        (run,) = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1)
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])))
        return run, {task.name: str(task.state_name) for task in tasks}


def test_all_stages_run_in_order_as_tasks_of_their_name_then_are_skipped(flow: ModuleType, world: World) -> None:
    result = world.go(flow)
    stages = list(registry.NAMES)
    assert world.ran == ["cleanup", *stages, "cleanup"]
    assert list(result) == stages
    assert {entry["status"] for entry in result.values()} == {"done"}

    result = world.go(flow)
    uncached = [stage.name for stage in registry.STAGES if not stage.cached]
    assert world.ran == ["cleanup", *uncached, "cleanup"]
    assert [name for name, entry in result.items() if entry["status"] == "done"] == uncached
    expected = {name: "Completed" if name in uncached else "Cached" for name in stages}
    deadline = time.monotonic() + 30  # states of tasks reach the server as events, a moment later
    while last_run()[1] != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    run, tasks = last_run()
    assert (run.state_name, tasks) == ("Completed", expected)
    assert not (world.workdir / LOCK).exists()


def test_artifacts_hold_the_table_the_report_and_the_page(flow: ModuleType, world: World) -> None:
    from prefect.client.orchestration import get_client

    world.go(flow)
    run, _ = last_run()
    with get_client(sync_client=True) as client:
        found = {a.key: a for a in client.read_artifacts() if a.flow_run_id == run.id}
    assert set(found) == {f"slipstream-{name}" for name in ("plan", "table", "report", "page", "plot-1")}
    assert "has not run" in str(found["slipstream-plan"].data)
    assert str(found["slipstream-plot-1"].data).startswith("data:image/png;base64,iVBOR")
    assert "1.2x" in str(found["slipstream-table"].data)
    assert "**fast**" in str(found["slipstream-report"].data)
    assert (world.workdir / "report" / "report.html").as_uri() in str(found["slipstream-page"].data)


def test_failed_stage_ends_the_run_with_cleanup_and_the_next_run_goes_on_there(flow: ModuleType, world: World) -> None:
    def fail(context: StageContext) -> dict[str, Any]:
        raise SlipstreamError("the loss is not a number", do="lower the learning rate")

    world.bodies["train"] = fail
    with pytest.raises(SlipstreamError, match="not a number"):
        world.go(flow)
    assert world.ran == ["cleanup", "resolve", "regenerate", "extract", "train", "cleanup"]
    assert last_run()[0].state_name == "Failed"

    del world.bodies["train"]
    result = world.go(flow)
    assert [name for name in ("resolve", "regenerate", "extract") if result[name]["status"] == "skipped"] == [
        "resolve",
        "regenerate",
        "extract",
    ]
    assert result["train"]["status"] == "done"


def test_failed_gate_fails_the_run_after_the_report_and_again_when_all_is_skipped(
    flow: ModuleType, world: World
) -> None:
    world.bodies["report"] = world.report([PASSED, FAILED])
    for _ in range(2):
        with pytest.raises(GatesFailed, match="term that loses is draft"):
            world.go(flow)
        assert world.ran[-1] == "cleanup"
        assert (world.workdir / "report" / "report.html").exists()


def test_a_cleanup_that_fails_on_the_way_out_does_not_replace_the_first_error(flow: ModuleType, world: World) -> None:
    def fail(_: StageContext) -> dict[str, Any]:
        if len(world.ran) > 1:
            raise SlipstreamError("memory of GPUs is not back", fault="F15")
        return {}

    def first(_: StageContext) -> dict[str, Any]:
        raise SlipstreamError("the first error")

    world.bodies |= {"cleanup": fail, "resolve": first}
    with pytest.raises(SlipstreamError, match="the first error"):
        world.go(flow)
    assert world.ran == ["cleanup", "resolve", "cleanup"]


@pytest.mark.parametrize(("gates", "kept"), [([PASSED], True), ([FAILED], False)])
def test_server_is_kept_only_on_demand_and_after_a_good_run(
    flow: ModuleType, world: World, gates: list[dict[str, str]], kept: bool
) -> None:
    world.write(server={"after": "keep"})
    world.bodies["report"] = world.report(gates)
    try:
        world.go(flow)
    except GatesFailed:
        assert not kept
    assert (world.ran[-1] == "report") == kept


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
)
def test_ended_from_outside_cleans_up_and_the_lock_is_gone(
    flow: ModuleType, world: World, number: int, raised: type[BaseException]
) -> None:
    started = threading.Event()

    def wait(context: StageContext) -> dict[str, Any]:
        started.set()
        threading.Event().wait(60)
        raise AssertionError("nobody interrupted")

    def interrupt() -> None:
        assert started.wait(60)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, number)  # from outside, a signal goes to the main thread by itself

    world.bodies["extract"] = wait
    interrupter = threading.Thread(target=interrupt)
    with unwinding_signals():
        interrupter.start()
        with pytest.raises(raised):
            world.go(flow)
    interrupter.join()
    assert world.ran == ["cleanup", "resolve", "regenerate", "extract", "cleanup"]
    assert not (world.workdir / LOCK).exists()
    assert (world.workdir / "extract.partial").exists()
    assert last_run()[0].state_name == "Crashed"


def test_contradiction_stops_the_flow_before_the_first_stage(flow: ModuleType, world: World) -> None:
    world.write(draft={"max_context_tokens": 512}, server={"max_context_tokens": 1024})
    with pytest.raises(SlipstreamError, match="F14"):
        world.go(flow)
    assert world.ran == ["cleanup", "cleanup"]


def test_server_of_a_killed_run_is_found_and_stopped(tmp_path: Path) -> None:
    """The state file names a process that still runs, as after kill -9 of the run."""
    import sys

    from slipstream.tasks.process import start_detached

    state_file = tmp_path / "prefect" / "server.state.json"
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = start_detached(sleeper, log=tmp_path / "prefect" / "server.log", state_file=state_file)
    assert stop_left_over(tmp_path)
    assert group_members(left.identity) == []
    assert not state_file.exists()
    assert not stop_left_over(tmp_path)


def test_prefect_server_is_gone_afterwards_and_its_port_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "elsewhere"))
    with prefect_server(tmp_path) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        record = read_record(tmp_path / "prefect" / "server.state.json")
        assert record is not None
        assert group_members(record.identity)
        assert not port_is_free("127.0.0.1", port)
    assert group_members(record.identity) == []
    assert port_is_free("127.0.0.1", port)
    assert "PREFECT_API_URL" not in os.environ


def test_a_prefect_server_of_ones_own_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example/api")
    with prefect_server(tmp_path) as url:
        assert url == "http://prefect.example/api"
    assert not (tmp_path / "prefect" / "server.state.json").exists()


def test_prefect_server_that_does_not_start_is_an_error_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("slipstream.flows.prefect_server.STARTS", 1)
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "nonsense://nowhere")
    write_json(tmp_path / "unrelated.json", {})
    with pytest.raises(SlipstreamError, match="Prefect's server did not start"), prefect_server(tmp_path):
        pass
    assert not (tmp_path / "prefect" / "server.state.json").exists()


# ---- on a far host ---------------------------------------------------------------------------------------------------

STAND_INS = """
import sys
from importlib import import_module
from slipstream.tasks import registry
from slipstream.tasks.stage import Stage

def report(context):
    (context.out / "report.html").write_text("<html></html>")
    row = {{"figure": "speed", "no speculation": "1", "speculation": "1.2x"}}
    return {{"verdict": "fast", "table": [row], "markdown": "**fast**", "gates": {gates!r}, "num_steps": 3}}

def body(name):
    def run(context):
        open({ran!r}, "a").write(name + "\\n")
        if name == {hangs!r}:
            import time
            time.sleep(600)
        return report(context) if name == "report" else {{}}
    return run

table = tuple(Stage(s.name, 1, s.needs, s.config_sections, body(s.name), cached=s.cached) for s in registry.STAGES)
registry.STAGES, registry._BY_NAME = table, {{stage.name: stage for stage in table}}
module = sys.argv[3]
del sys.argv[1:4]  # -P -m MODULE
import_module(module).main()
"""


class FarWorld:
    """The stand-ins once more, on a host behind a real SSH server, whose environment knows nothing but them."""

    def __init__(self, root: Path, ssh_tools: ModuleType) -> None:
        self.server = ssh_tools.SshServer(root / "sshd")
        self.server.trust()
        self.root, self.far, self.ran_file = root, root / "far", root / "ran"
        self.workdir, self.config = root / "here" / "demo", root / "deployment.yaml"
        self.stand_in()
        python = root / "python"
        path, stand_ins = os.environ.get("PYTHONPATH", ""), root / "stand_ins.py"
        words = f'#!/bin/sh\nOMP_NUM_THREADS=1 PYTHONPATH={path!r} exec {sys.executable} -P {stand_ins} "$@"\n'
        python.write_text(words)
        python.chmod(0o755)
        (root / "current").write_text(json.dumps({"key": "x", "python": str(python)}))
        self.host = self.server.host(self.far)
        self.host.put(root / "current", "environments/current.json")
        host = {"kind": "ssh", "address": "127.0.0.1", "port": self.server.port, "directory": str(self.far)}
        host |= {"known_hosts": str(self.server.folder / "known_hosts"), "identity_file": str(self.server.user_key)}
        host |= {"workdir": str(self.workdir), "reconnect_seconds": 2}
        self.config.write_text(yaml.safe_dump({"host": host}))

    def stand_in(self, gates: tuple[dict[str, str], ...] = (PASSED,), hangs: str = "") -> None:
        text = STAND_INS.format(gates=list(gates), ran=str(self.ran_file), hangs=hangs)
        (self.root / "stand_ins.py").write_text(text)

    @property
    def ran(self) -> list[str]:
        return self.ran_file.read_text().split() if self.ran_file.is_file() else []

    def close(self) -> None:
        for folder in sorted((self.far / "jobs").glob("*")):
            self.host.stop(folder.name, drain_seconds=0)
        self.host.close()
        self.server.stop()


@pytest.fixture
def far_world(tmp_path: Path, load_test_module: Callable[[Path], ModuleType]) -> Iterator[FarWorld]:
    ssh_tools = load_test_module(Path(__file__).parents[1] / "tasks" / "hosts" / "ssh_server.py")
    ssh_tools.need_sshd()
    world = FarWorld(tmp_path, ssh_tools)
    yield world
    world.close()


def test_the_lifecycle_on_a_far_host(flow: ModuleType, far_world: FarWorld) -> None:
    result = flow.lifecycle(str(far_world.config))
    assert far_world.ran == ["cleanup", *registry.NAMES, "cleanup"]
    assert {entry["status"] for entry in result.values()} == {"done"}
    assert (far_world.far / "runs" / "demo" / "report" / "report.html").is_file()
    assert (far_world.workdir / "from-host" / "report" / "report.html").read_text() == "<html></html>"
    assert not (far_world.workdir / "train").exists()

    # Again: one look there tells that all is done; only what acts on the world runs.
    result = flow.lifecycle(str(far_world.config))
    uncached = [stage.name for stage in registry.STAGES if not stage.cached]
    assert far_world.ran[len(registry.NAMES) + 2 :] == ["cleanup", *uncached, "cleanup"]
    assert [name for name, entry in result.items() if entry["status"] == "done"] == uncached


def test_a_lifecycle_that_is_ended_stops_its_stage_on_the_far_host(
    flow: ModuleType, far_world: FarWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_world.stand_in(hangs="extract")

    def end_it() -> None:
        deadline = time.monotonic() + 120
        while "extract" not in far_world.ran and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_it, daemon=True).start()
    with unwinding_signals(), pytest.raises(BaseException):  # noqa: B017, PT011  (Prefect's own, or SystemExit)
        flow.lifecycle(str(far_world.config))
    status = far_world.host.status("demo-extract")
    assert status is not None
    assert (status.state, status.members) == ("stopped", ())
    assert far_world.ran[-2:] == ["extract", "cleanup"]


def test_a_host_that_is_gone_ends_the_run_and_leaves_its_stage_running(flow: ModuleType, far_world: FarWorld) -> None:
    far_world.stand_in(hangs="extract")
    found = []

    def cut() -> None:
        deadline = time.monotonic() + 120
        while "extract" not in far_world.ran and time.monotonic() < deadline:
            time.sleep(0.1)
        assert far_world.server.process is not None
        for child in psutil.Process(far_world.server.process.pid).children(recursive=True):
            if child.name().startswith("sshd"):  # its sessions; the job has left them
                child.kill()
        far_world.server.stop()
        found.append(True)

    thread = threading.Thread(target=cut, daemon=True)
    thread.start()
    with pytest.raises(HostUnreachable):
        flow.lifecycle(str(far_world.config))
    assert found
    far_world.server.start()
    status = far_world.host.status("demo-extract")
    assert status is not None
    assert status.state == "running"

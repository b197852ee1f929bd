"""Flow serve in this process: nothing is stopped in vain, and until a launch is proven the way back is open."""

import inspect
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.flows.signals import unwinding_signals
from slipstream.tasks.lock import LOCK
from slipstream.tasks.manifest import write_json
from slipstream.tasks.process import ProcessIdentity
from slipstream.tasks.stage import StageContext


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_test_module: Callable[[Path], ModuleType]) -> Any:
    return load_test_module(Path(__file__).with_name("test_lifecycle.py")).World(tmp_path, monkeypatch)


@pytest.fixture
def served(flow: ModuleType, world: Any) -> Any:
    """A world whose stages are done."""
    world.go(flow)
    world.ran.clear()
    return world


def serve(world: Any) -> dict[str, Any]:
    from slipstream.flows.serve import serve as flow

    return flow(str(world.config))


def test_serve_replaces_the_server_and_measures_it(served: Any) -> None:
    assert serve(served)["base_url"] == "http://127.0.0.1:1"
    assert served.ran == ["launch"]  # benchmark was done by the lifecycle
    assert not (served.workdir / LOCK).exists()


def test_serve_stops_nothing_for_a_launch_that_cannot_come(served: Any) -> None:
    (served.workdir / "tune" / "manifest.json").unlink()
    with pytest.raises(SlipstreamError, match="flow serve cannot start: stage tune is not done: has not run"):
        serve(served)
    assert served.ran == []


def test_a_launch_that_fails_brings_the_last_good_server_back(served: Any) -> None:
    def fail(_: StageContext) -> dict[str, Any]:
        raise SlipstreamError("A_1 of the server is 0.1")

    served.bodies["launch"] = fail
    with pytest.raises(SlipstreamError, match="A_1 of the server"):
        serve(served)
    assert served.ran == ["launch", "restore"]  # once: the hook in this process has nothing left to do


def test_a_benchmark_that_fails_leaves_the_good_server(served: Any) -> None:
    def fail(_: StageContext) -> dict[str, Any]:
        raise SlipstreamError("a request was refused")

    served.bodies["benchmark"] = fail
    (served.workdir / "benchmark" / "manifest.json").unlink()
    with pytest.raises(SlipstreamError, match="refused"):
        serve(served)
    assert served.ran == ["launch", "benchmark"]


def test_sigterm_in_a_launch_brings_the_last_good_server_back(served: Any) -> None:
    started = threading.Event()

    def wait(_: StageContext) -> dict[str, Any]:
        started.set()
        threading.Event().wait(60)
        raise AssertionError("nobody interrupted")

    def interrupt() -> None:
        assert started.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)

    served.bodies["launch"] = wait
    thread = threading.Thread(target=interrupt)
    with unwinding_signals():
        thread.start()
        with pytest.raises(SystemExit):
            serve(served)
    thread.join()
    assert served.ran == ["launch", "restore"]


def test_a_stage_launch_that_fails_brings_the_last_good_server_back(served: Any) -> None:
    from slipstream.flows.stage import StageName, stage

    def fail(_: StageContext) -> dict[str, Any]:
        raise SlipstreamError("A_1 of the server is 0.1")

    served.bodies["launch"] = fail
    with pytest.raises(SlipstreamError, match="A_1 of the server"):
        stage(StageName.LAUNCH, str(served.config))
    assert served.ran == ["launch", "restore"]


def test_hooks_have_the_parameters_by_which_a_worker_calls_them(flow: ModuleType) -> None:
    from slipstream.flows import hooks
    from slipstream.flows.serve import serve as serve_flow
    from slipstream.flows.stage import stage as stage_flow

    expected = {flow.lifecycle: hooks.stop_what_ran, serve_flow: hooks.bring_back, stage_flow: hooks.bring_back}
    for made, hook in expected.items():
        assert made.on_cancellation_hooks == made.on_crashed_hooks == made.on_failure_hooks == [hook]
        assert list(inspect.signature(hook).parameters) == ["flow", "flow_run", "state"]


@pytest.mark.parametrize("holder", ["nobody", "another run", "this run"])
def test_a_hook_stops_only_what_runs_in_a_workdir_that_its_run_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    """A run that is cancelled while it waits for its workdir was never in it."""
    from slipstream.flows import hooks
    from slipstream.flows.run_record import FILE, RunRecord

    identity = ProcessIdentity.of(os.getpid())
    assert identity is not None
    (tmp_path / "runs").mkdir()
    (tmp_path / "deployment.yaml").write_text("host: {workdir: runs}\n")
    if holder != "nobody":
        write_json(tmp_path / "runs" / FILE, asdict(RunRecord(holder, "lifecycle", "", identity, "")))
    called: list[tuple[list[str], Path]] = []

    def stage(words: list[str], cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
        called.append((words, cwd))
        return subprocess.CompletedProcess(words, 0, "")

    said: list[str] = []
    logger = SimpleNamespace(info=lambda form, *values: said.append(form % values))
    monkeypatch.setattr(hooks, "flow_run_logger", lambda *_: logger)
    monkeypatch.setattr(hooks, "tell", lambda *_, **__: None)
    monkeypatch.setattr(hooks, "_directory", lambda _: tmp_path)
    monkeypatch.setattr(hooks.subprocess, "run", stage)
    run: Any = SimpleNamespace(id="this run", parameters={"config": "deployment.yaml"})
    state: Any = SimpleNamespace(type=SimpleNamespace(value="CANCELLED"), message="")
    hooks.stop_what_ran(SimpleNamespace(name="lifecycle"), run, state)  # type: ignore[arg-type]
    assert [cwd for _, cwd in called] == ([tmp_path] if holder == "this run" else [])
    assert any("what runs there is not this run's" in line for line in said) == (holder != "this run")

"""Shares of the prompts as mapped tasks of a flow; the hosts themselves: tests/tasks/hosts/test_fleet.py."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from slipstream.configs.load import load
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.conversations import CONVERSATIONS
from slipstream.tasks.shares import STORE, STORE_MANIFEST, shares_folder

Run = Callable[[], int]
TOLD_SECONDS = 60.0


@pytest.fixture
def config(tmp_path: Path) -> Path:
    host = {"kind": "ssh", "address": "gpu1", "more": [{"address": "gpu2"}], "workdir": str(tmp_path / "work")}
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump({"host": host}))
    return path


def here(config: Path, *, done: bool = False) -> Any:
    deployment = load(config).deployment
    reporter = SimpleNamespace(say=lambda *_, **__: None)
    run = SimpleNamespace(look=lambda names: [SimpleNamespace(done=done) for _ in names])
    return SimpleNamespace(deployment=deployment, workdir=deployment.host.workdir, reporter=reporter, run=run)


@pytest.fixture
def shares(with_prefect: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with a stand-in for the work of a share: it says where it was and what was stopped and laid."""
    from slipstream.flows import fan_out

    seen = SimpleNamespace(module=fan_out, shares=[], stopped=0, laid=0, together=threading.Barrier(2, timeout=60))

    def run_share(number: int, deployment: Any, workdir: Path, reporter: Any, *, count: int) -> Path:
        reporter.say("extract", f"share {number}", markup=False)
        seen.together.wait()  # both are under way at the same time
        seen.shares.append((number, count))
        return workdir / str(number)

    def stop(*_: Any) -> None:
        seen.stopped += 1

    def lay(*_: Any) -> int:
        seen.laid += 1
        return 2

    monkeypatch.setattr(fan_out, "run_share", run_share)
    monkeypatch.setattr(fan_out, "stop_shares", stop)
    monkeypatch.setattr(fan_out, "lay_shares", lay)
    monkeypatch.setattr(fan_out, "open_host", lambda _: SimpleNamespace(close=lambda: None))
    return seen


def in_a_flow(do: Run) -> tuple[int, list[str]]:
    """(What it returns in a flow run, the names of the task runs)."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.context import FlowRunContext

    ids = []

    @flow
    def whole() -> int:
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        ids.append(context.flow_run.id)
        return do()

    result, deadline = whole(), time.monotonic() + TOLD_SECONDS
    with get_client(sync_client=True) as client:
        while True:  # task runs are told to the server a moment later, from Ray's processes later still
            found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids)))
            if len(found) >= result or time.monotonic() > deadline:
                return result, sorted(run.name for run in found)
            time.sleep(0.1)


def test_each_host_has_a_share_at_the_same_time_and_what_is_done_has_none(shares: Any, config: Path) -> None:
    result, names = in_a_flow(lambda: shares.module.fan_out(here(config), str(config), []))
    assert (result, shares.laid, shares.stopped) == (2, 1, 0)
    assert sorted(shares.shares) == [(0, 2), (1, 2)]
    assert names == ["share-0-of-2", "share-1-of-2"]
    assert shares.module.fan_out(here(config, done=True), str(config), []) == 0
    config.write_text("{}")
    assert shares.module.fan_out(here(config), str(config), []) == 0
    assert len(shares.shares) == 2


def test_a_share_that_fails_stops_the_others(shares: Any, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int, *_: Any, **__: Any) -> Path:
        raise SlipstreamError("no host is left", expected="", do="")

    monkeypatch.setattr(shares.module, "run_share", fail)
    with pytest.raises(SlipstreamError, match="no host is left"):
        in_a_flow(lambda: shares.module.fan_out(here(config), str(config), []))
    assert (shares.stopped, shares.laid) == (1, 0)


def test_ray_that_is_not_installed_is_named(shares: Any, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prefect_ray", None)
    with pytest.raises(SlipstreamError, match="needs the package prefect-ray") as error:
        shares.module.task_runner(load(config, ["host.task_runner=ray"]).deployment)
    assert "[flows,ray]" in error.value.do


def test_shares_go_through_ray(with_prefect: str, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own, which finds its share fetched already."""
    pytest.importorskip("prefect_ray", reason="the extra ray is not installed")
    from slipstream.flows import fan_out

    monkeypatch.setenv("PREFECT_API_URL", with_prefect)  # as a worker's flow process has it: Ray's inherit it
    deployment = load(config).deployment
    for number in range(2):
        folder = deployment.host.workdir / shares_folder(deployment) / f"{number}-of-2"
        (folder / STORE).mkdir(parents=True)
        (folder / STORE / STORE_MANIFEST).write_text("{}")
        (folder / CONVERSATIONS).write_text("")
    monkeypatch.setattr(fan_out, "lay_shares", lambda *_: 2)
    monkeypatch.setattr(fan_out, "open_host", lambda _: SimpleNamespace(close=lambda: None))
    over = ["host.task_runner=ray"]
    place = here(config)
    place.deployment = load(config, over).deployment
    result, names = in_a_flow(lambda: fan_out.fan_out(place, str(config), over))
    assert (result, names) == (2, ["share-0-of-2", "share-1-of-2"])

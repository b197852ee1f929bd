"""By hand (-m soak): the four deployments run by a worker that `slipstream up` started, with real stages of a tiny
target, on this machine and on a far host in namespaces over OpenSSH; what they show in the browser and what they cost.

Pictures and figures are kept in the folder TEST_ARTEFACTS, where it is set, for a person to look at.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml


@pytest.fixture(params=["this machine", "a far host"])
def world(
    request: pytest.FixtureRequest,
    worlds: ModuleType,
    chats: ModuleType,
    tiny: ModuleType,
    load_test_module: Callable[[Path], ModuleType],
    tmp_path: Path,
) -> Iterator[Any]:
    house = load_test_module(Path(__file__).with_name("test_resume.py")).make_house(chats, tiny, tmp_path)
    values = yaml.safe_load(house.config.read_text())
    with ExitStack() as stack:
        if request.param == "a far host":
            far = stack.enter_context(worlds.far_host(load_test_module, tmp_path))
            values["host"] = {**values["host"], **far.section}
        made = stack.enter_context(worlds.World(tmp_path, values).up())
        yield made
    name = request.param.replace(" ", "-")
    (artefacts(tmp_path) / f"figures-{name}.json").write_text(json.dumps(made.figures, indent=2))


def artefacts(root: Path) -> Path:
    folder = Path(os.environ.get("TEST_ARTEFACTS", root / "artefacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.soak
def test_four_deployments_what_they_show_and_what_they_cost(world: Any) -> None:
    where = "far" if (world.root / "far").exists() else "local"
    first = world.run("lifecycle")
    shown = world.artifacts(first)
    assert {"slipstream-plan", "slipstream-table", "slipstream-report", "slipstream-page"} <= set(shown)
    assert shown["slipstream-plot-1"].startswith("data:image/png;base64,")
    again = world.run("lifecycle")
    assert world.figures["lifecycle"][1]["run_seconds"] < 60
    states = world.tasks(again)
    assert {name for name, state in states.items() if state != "Cached"} == {"cleanup", "launch"}
    assert len(states) == 11
    world.run("stage", "-p", "name=resolve")
    served = world.run("serve")
    assert "http://127.0.0.1:" in world.artifacts(served)["slipstream-server"]
    cleaned = world.run("cleanup")
    assert "stopped" in world.artifacts(cleaned)["slipstream-cleanup"]

    report = next(world.root.rglob("report/report.html"))
    page = world.api.removesuffix("/api")
    pictures = {
        f"run-{where}": f"{page}/runs/flow-run/{first}",
        f"report-artifact-{where}": f"{page}/artifacts/key/slipstream-report",
        f"report-{where}": report.as_uri(),
    }
    for name, url in pictures.items():
        picture = world.screenshot(artefacts(world.root) / f"{name}.png", url)
        assert picture is None or picture.stat().st_size > 20_000
    print(json.dumps(world.figures))

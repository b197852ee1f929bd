"""By hand (-m soak): the four deployments run by a worker that `slipstream up` started, with real stages of a tiny
target, on this machine and on a far host in namespaces over OpenSSH; what they show in the browser and what they cost.

Pictures and figures are kept in the folder TEST_ARTEFACTS, where it is set, for a person to look at.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "tests" / "tasks" / "hosts"
COMMAND_SECONDS = 500
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class World:
    """A project with a Prefect server and a worker of its own."""

    def __init__(self, root: Path, artefacts: Path) -> None:
        self.root, self.artefacts = root, artefacts
        drop = ("PREFECT_API_URL", "PREFECT_HOME")
        self.env = {name: value for name, value in os.environ.items() if name not in drop}
        self.env |= {"OMP_NUM_THREADS": "1", "PREFECT_WORKER_QUERY_SECONDS": "1"}
        self.figures: dict[str, Any] = {}

    def command(self, *words: str) -> str:
        command = [sys.executable, "-P", "-m", *words]
        done = subprocess.run(
            command, cwd=self.root, env=self.env, capture_output=True, text=True, timeout=COMMAND_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def up(self) -> None:
        said = self.command("slipstream.flows.cli", "up", "--port", "0").splitlines()
        self.api = next(line for line in said if "PREFECT_API_URL=" in line).partition("PREFECT_API_URL=")[2]
        self.env["PREFECT_API_URL"] = self.api

    def run(self, flow: str, *words: str) -> str:
        """`prefect deployment run --watch`, to a good end. Returns the id of the flow run; its seconds are noted."""
        began = time.monotonic()
        out = self.command("prefect", "deployment", "run", f"{flow}/smollm2", "--watch", *words)
        seconds = time.monotonic() - began
        run = next(line for line in out.splitlines() if "UUID:" in line).split("UUID:")[1].strip()
        found = self.ask(f"flow_runs/{run}")
        assert found["state_name"] == "Completed", found
        self.figures.setdefault(flow, []).append(
            {"command_seconds": round(seconds, 1), "run_seconds": round(found["total_run_time"], 1)}
        )
        return run

    def ask(self, path: str, body: Any = None) -> Any:
        url = f"{self.api}/{path}"
        answer = httpx.get(url, trust_env=False) if body is None else httpx.post(url, json=body, trust_env=False)
        return answer.json()

    def tasks(self, run: str) -> dict[str, str]:
        found = self.ask("task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return {task["name"]: task["state_name"] for task in found}

    def artifacts(self, run: str) -> dict[str, str]:
        found = self.ask("artifacts/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return {artifact["key"]: str(artifact["data"]) for artifact in found}

    def screenshot(self, name: str, url: str) -> Path | None:
        if CHROMIUM is None:
            return None
        out = self.artefacts / f"{name}.png"
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,1700"]
        words += ["--timeout=20000", "--virtual-time-budget=20000", f"--user-data-dir={self.root / 'chromium'}"]
        subprocess.run([CHROMIUM, *words, f"--screenshot={out}", url], capture_output=True, timeout=120, check=True)
        return out


@pytest.fixture(params=["this machine", "a far host"])
def world(
    request: pytest.FixtureRequest,
    chats: ModuleType,
    tiny: ModuleType,
    load_test_module: Callable[[Path], ModuleType],
    tmp_path: Path,
) -> Iterator[World]:
    house = load_test_module(Path(__file__).with_name("test_resume.py")).make_house(chats, tiny, tmp_path)
    values = yaml.safe_load(house.config.read_text())
    artefacts = Path(os.environ.get("TEST_ARTEFACTS", tmp_path / "artefacts"))
    artefacts.mkdir(parents=True, exist_ok=True)
    made, one = World(tmp_path, artefacts), None
    if request.param == "a far host":
        ssh_tools, machine_tools = (load_test_module(HOSTS / name) for name in ("ssh_server.py", "machines.py"))
        ssh_tools.need_sshd()
        machine_tools.need_namespaces()
        one = machine_tools.machine_class(ssh_tools)(tmp_path / "machine", 0)
        one.trust()
        host = one.host(tmp_path / "far")
        machine_tools.use_this_python(host, tmp_path / "python")
        host.close()
        ssh = {"kind": "ssh", "address": one.listen, "identity_file": str(one.user_key)}
        ssh |= {"known_hosts": str(one.folder / "known_hosts"), "directory": str(tmp_path / "far")}
        values["host"] = {**values["host"], **ssh}
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "smollm2.yaml").write_text(yaml.safe_dump(values))
    shutil.copy(ROOT / "prefect.yaml", tmp_path)
    made.up()
    yield made
    made.command("slipstream.flows.cli", "up", "--stop")
    if one is not None:
        one.stop()
    name = request.param.replace(" ", "-")
    (artefacts / f"figures-{name}.json").write_text(json.dumps(made.figures, indent=2))


@pytest.mark.soak
def test_four_deployments_what_they_show_and_what_they_cost(world: World) -> None:
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
        picture = world.screenshot(name, url)
        assert picture is None or picture.stat().st_size > 20_000
    print(json.dumps(world.figures))

"""A project with a Prefect server and a worker that `slipstream up` started, and a far host for its stages.

Everything is real: the flows run in the worker's processes, the stages over OpenSSH on a host in Linux namespaces
(tests/tasks/hosts/machines.py) or on this machine.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ROOT / "tests" / "tasks" / "hosts"
COMMAND_SECONDS = 500
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

Load = Callable[[Path], ModuleType]


class World:
    """The project in `root`: its deployments are those of our prefect.yaml, its deployment file is `values`.

    live: show what commands say as they say it, however long they take.
    """

    def __init__(self, root: Path, values: Mapping[str, Any], *, live: bool = False) -> None:
        self.root, self.live = root, live
        drop = ("PREFECT_API_URL", "PREFECT_HOME")
        self.env = {name: value for name, value in os.environ.items() if name not in drop}
        self.env |= {"OMP_NUM_THREADS": "1", "PREFECT_WORKER_QUERY_SECONDS": "1", "PYTHONUNBUFFERED": "1"}
        self.figures: dict[str, Any] = {}
        (root / "configs").mkdir()
        (root / "configs" / "smollm2.yaml").write_text(yaml.safe_dump(dict(values)))
        shutil.copy(ROOT / "prefect.yaml", root)

    def command(self, *words: str) -> str:
        command = [sys.executable, "-P", "-m", *words]
        output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        if not self.live:
            done = subprocess.run(command, cwd=self.root, env=self.env, timeout=COMMAND_SECONDS, **output)
            assert done.returncode == 0, done.stdout
            return done.stdout
        said = []
        with subprocess.Popen(command, cwd=self.root, env=self.env, **output) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                print("    " + line, end="", flush=True)
        assert process.returncode == 0, f"{' '.join(words)}: exit code {process.returncode}"
        return "".join(said)

    @contextmanager
    def up(self) -> Iterator["World"]:
        """With a server and a worker."""
        said = self.command("slipstream.flows.cli", "up", "--port", "0").splitlines()
        self.api = next(line for line in said if "PREFECT_API_URL=" in line).partition("PREFECT_API_URL=")[2]
        self.env["PREFECT_API_URL"] = self.api
        try:
            yield self
        finally:
            self.command("slipstream.flows.cli", "up", "--stop")

    def run(self, flow: str, *words: str) -> str:
        """`prefect deployment run --watch`, to a good end. Returns the id of the flow run; its seconds are noted."""
        began = time.monotonic()
        out = self.command("prefect", "deployment", "run", f"{flow}/smollm2", "--watch", *words)
        seconds = time.monotonic() - began
        run = next(line for line in out.splitlines() if "UUID:" in line).split("UUID:")[1].strip()
        found = self.ask(f"flow_runs/{run}")
        assert found["state_name"] == "Completed", "\n".join([str(found), *self.log(run)])
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

    def log(self, run: str) -> list[str]:
        """What the flow run and its tasks told the server."""
        found = self.ask("logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC"})
        return [line["message"] for line in found]

    def screenshot(self, out: Path, url: str) -> Path | None:
        if CHROMIUM is None:
            return None
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,1700"]
        words += ["--timeout=20000", "--virtual-time-budget=20000", f"--user-data-dir={self.root / 'chromium'}"]
        subprocess.run([CHROMIUM, *words, f"--screenshot={out}", url], capture_output=True, timeout=120, check=True)
        return out


@dataclass(frozen=True)
class FarHost:
    """A host in namespaces of its own. host: the way there. section: of a deployment file that names it."""

    host: Any
    section: dict[str, Any]


@contextmanager
def far_host(load: Load, folder: Path, *sites: Path, number: int = 0, **options: Any) -> Iterator[FarHost]:
    """A far host whose key is trusted and whose environment is this Python, which looks into `sites` first.

    Its Slipstream lies in `folder`/far, on this machine's disk. `number` tells hosts of one test apart.
    """
    ssh_tools, machine_tools = (load(HOSTS / name) for name in ("ssh_server.py", "machines.py"))
    ssh_tools.need_sshd()
    machine_tools.need_namespaces()
    one = machine_tools.machine_class(ssh_tools)(folder / "machine", number)
    try:
        one.trust()
        host = one.host(folder / "far", **options)
        machine_tools.use_this_python(host, folder / "python", *sites)
        section = {"kind": "ssh", "address": one.listen, "identity_file": str(one.user_key)}
        section |= {"known_hosts": str(one.folder / "known_hosts"), "directory": str(folder / "far")}
        yield FarHost(host, section)
        host.close()
    finally:
        one.stop()

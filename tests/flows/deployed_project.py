"""A user's project with our deployments, whose flows a worker runs that `slipstream up` started (see conftest.py)."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx

from slipstream.tasks.process import group_members, read_record

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 240.0  # of a test on a loaded machine; nothing waits for it but a failure


@dataclass
class Project:
    """A user's directory with our prefect.yaml, stand-ins for stages, and a worker that `slipstream up` started."""

    folder: Path
    env: dict[str, str]
    said: list[str] = field(default_factory=list)

    @property
    def workdir(self) -> Path:
        return self.folder / "work"

    @property
    def control(self) -> Path:
        return self.folder / "control"

    def command(self, module: str, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module, *words],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def run(self, deployment: str, **parameters: str) -> UUID:
        """`prefect deployment run`, without waiting."""
        words = [word for name, value in parameters.items() for word in ("-p", f"{name}={value}")]
        out = self.command("prefect", "deployment", "run", f"{deployment}/smollm2", *words)
        return UUID(next(line for line in out.splitlines() if "UUID:" in line).split("UUID:")[1].strip())

    def ran(self) -> list[str]:
        file = self.control / "ran"
        return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []

    def process_of(self, stage: str) -> int:
        """The process in which a stage ran last."""
        lines = [line.split() for line in (self.control / "ran").read_text().splitlines()]
        return next(int(pid) for name, pid in reversed(lines) if name == stage)

    def server_lives(self, workdir: Path | None = None) -> bool:
        record = read_record((workdir or self.workdir) / "server.state.json")
        return record is not None and bool(group_members(record.identity))

    def make_draft(self, mark: str) -> None:
        (self.control / "draft").mkdir(exist_ok=True)
        (self.control / "draft" / "mark").unlink(missing_ok=True)  # not through the link of what is kept
        (self.control / "draft" / "mark").write_text(mark)

    def serves(self, get: Callable[[str], str] = lambda url: httpx.get(url).text, workdir: Path | None = None) -> str:
        """The draft of the server that answers; "" where none does."""
        file = (workdir or self.workdir) / "server.ready.json"
        try:
            return str(json.loads(get(json.loads(file.read_text())["url"]))["draft"]["fingerprint"])
        except (OSError, ValueError, httpx.HTTPError):
            return ""

    def wait_for(self, what: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := what()):
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.1)
        return found

    def state_of(self, run: UUID) -> str:
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            return str(client.read_flow_run(run).state_name)

    def ends(self, run: UUID) -> str:
        final = ("Completed", "Failed", "Crashed", "Cancelled")
        return str(self.wait_for(lambda: (state := self.state_of(run)) in final and state))

    def tasks_of(self, run: UUID) -> list[tuple[str, str]]:
        """(name, state) of each task run, by name."""
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

        with get_client(sync_client=True) as client:
            found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))
            return sorted((task.name, str(task.state_name)) for task in found)

    def artifacts_of(self, run: UUID) -> dict[str, str]:
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            return {str(a.key): str(a.data) for a in client.read_artifacts(limit=200) if a.flow_run_id == run}

"""The deployments of prefect.yaml, run by a process worker against a real server: what they show, and how they end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
import pytest
import yaml

from slipstream.tasks import registry
from slipstream.tasks.lock import LOCK
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


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def everything(prefect_api: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "configs").mkdir()
    (folder / "control").mkdir()
    (folder / "site").mkdir()
    shutil.copy(Path(__file__).with_name("stand_ins.py"), folder / "site" / "sitecustomize.py")
    shutil.copy(ROOT / "tests" / "tasks" / "stub_server.py", folder / "site")
    shutil.copy(ROOT / "prefect.yaml", folder)
    (folder / "configs" / "smollm2.yaml").write_text(
        yaml.safe_dump({"host": {"workdir": "work", "cache_dir": "cache"}})
    )
    (folder / ".env").write_text("PREFECT_API_URL=http://127.0.0.1:9/api\n")  # a dead one: ours outranks it
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**prefect_api, "PYTHONPATH": os.pathsep.join(paths)}
    env |= {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_LOGGING_LEVEL": "INFO", "OMP_NUM_THREADS": "1"}
    project = Project(folder, env)
    project.make_draft("old")
    project.said = project.command("slipstream.flows.cli", "up").splitlines()
    yield project
    project.command("slipstream.flows.cli", "up", "--stop")


@pytest.fixture
def project(everything: Project, with_prefect: str) -> Iterator[Project]:
    """With nobody told to hang, and the host's slot free whatever the test before killed."""
    from prefect.client.orchestration import get_client

    from slipstream.configs.schema import Deployment
    from slipstream.flows.host_limit import create_limit, limit_name

    for file in everything.control.iterdir():
        if file.is_file():
            file.unlink()
    everything.make_draft("old")
    with get_client(sync_client=True) as client:
        client.delete_global_concurrency_limit_by_name(limit_name(Deployment()))
    assert create_limit(Deployment())
    yield everything
    for file in everything.control.glob("hang-*"):
        file.unlink()
    record = read_record(everything.workdir / "server.state.json")
    if record is not None:
        for member in group_members(record.identity):
            os.kill(member.pid, signal.SIGKILL)


@pytest.fixture
def far(project: Project, load_test_module: Callable[[Path], Any], tmp_path: Path) -> Iterator[Any]:
    """The way to a host in Linux namespaces of its own, for the deployment configs/far.yaml of the project."""
    folder = ROOT / "tests" / "tasks" / "hosts"
    ssh_tools, machine_tools = load_test_module(folder / "ssh_server.py"), load_test_module(folder / "machines.py")
    ssh_tools.need_sshd()
    machine_tools.need_namespaces()
    one = machine_tools.machine_class(ssh_tools)(tmp_path / "machine", 0)
    one.trust()
    host = one.host(project.folder / "far")
    machine_tools.use_this_python(host, tmp_path / "python", project.folder / "site")
    values = {"kind": "ssh", "address": one.listen, "identity_file": str(one.user_key), "workdir": "here/far"}
    values |= {"known_hosts": str(one.folder / "known_hosts"), "directory": str(project.folder / "far")}
    (project.folder / "configs" / "far.yaml").write_text(yaml.safe_dump({"host": values}))
    yield host
    host.close()
    one.stop()


@pytest.fixture
def done(project: Project) -> Project:
    """With all stages done."""
    if not (project.workdir / "report").is_dir():
        assert ends(project.run("lifecycle")) == "Completed"
        (project.control / "ran").unlink()
    return project


def state_of(run: UUID) -> str:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return str(client.read_flow_run(run).state_name)


def ends(run: UUID) -> str:
    final = ("Completed", "Failed", "Crashed", "Cancelled")
    return str(wait_for(lambda: (state := state_of(run)) in final and state))


def tasks_of(run: UUID) -> list[tuple[str, str]]:
    """(name, state) of each task run, by name."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    with get_client(sync_client=True) as client:
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))
        return sorted((task.name, str(task.state_name)) for task in found)


def artifacts_of(run: UUID) -> dict[str, str]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return {str(a.key): str(a.data) for a in client.read_artifacts(limit=200) if a.flow_run_id == run}


def test_up_says_what_it_did_and_may_be_repeated(project: Project) -> None:
    said = "\n".join(project.said)
    for words in ("work pool local: created", "deployments: 4", "limit slipstream-host-", "worker: started", "stop: "):
        assert words in said
    again = project.command("slipstream.flows.cli", "up")
    assert "worker: runs already" in again
    assert "created" not in again
    assert f"PREFECT_API_URL={project.env['PREFECT_API_URL']}" in again


def test_the_form_of_each_deployment_is_typed_and_described(project: Project) -> None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        found = {d.entrypoint.rpartition(":")[2]: d for d in client.read_deployments() if d.entrypoint}
    assert set(found) == {"lifecycle", "stage", "serve", "cleanup"}
    for name, deployment in found.items():
        assert deployment.entrypoint == f"slipstream.flows.{name}:{name}"  # a module: a file would hide our packages
        properties = deployment.parameter_openapi_schema["properties"]
        assert set(properties) <= {"config", "overrides", "name", "force"}  # nothing secret: parameters are shown
        assert all(entry.get("description") for entry in properties.values()), properties
        assert deployment.pull_steps == [
            {"prefect.deployments.steps.set_working_directory": {"directory": str(project.folder.resolve())}}
        ]
    schema = found["stage"].parameter_openapi_schema
    assert schema["definitions"]["StageName"]["enum"] == [*registry.NAMES, registry.RESTORE.name]


def test_the_lifecycle_shows_artifacts_and_leaves_nothing(project: Project) -> None:
    run = project.run("lifecycle")
    assert ends(run) == "Completed"
    assert project.ran() == ["cleanup", *registry.NAMES, "cleanup"]
    assert not project.server_lives()
    assert not (project.workdir / LOCK).exists()
    shown = artifacts_of(run)
    assert set(shown) == {f"slipstream-{name}" for name in ("plan", "table", "report", "page", "plot-1")}
    assert "1.2x" in shown["slipstream-table"]
    assert shown["slipstream-plot-1"].startswith("data:image/png;base64,")


def test_a_second_lifecycle_is_cached_but_for_what_is_not_there_any_more(done: Project) -> None:
    shutil.rmtree(done.workdir / "extract")  # Prefect remembers it
    run = done.run("lifecycle")
    assert ends(run) == "Completed"
    on_the_world = [stage.name for stage in registry.STAGES if not stage.cached]
    assert done.ran() == [
        "cleanup",
        "extract",
        *on_the_world,
        "cleanup",
    ]  # the same content: its readers are still right
    cached = [stage.name for stage in registry.STAGES if stage.cached]
    expected = [*((name, "Cached") for name in cached), *((name, "Completed") for name in [*on_the_world, "extract"])]
    wait_for(lambda: tasks_of(run) == sorted(expected))  # states of tasks reach the server a moment later


def test_serve_keeps_its_server_and_what_it_replaced_is_brought_back_by_the_worker_when_it_is_killed(
    done: Project,
) -> None:
    run = done.run("stage", name="resolve")
    assert ends(run) == "Completed"
    assert done.ran() == []
    assert set(artifacts_of(run)) == {"slipstream-resolve"}
    run = done.run("serve")
    assert ends(run) == "Completed"
    assert done.ran() == ["launch"]  # benchmark was done
    assert done.server_lives()
    assert set(artifacts_of(run)) == {"slipstream-plan", "slipstream-server", "slipstream-benchmark"}

    assert done.serves() == "old"

    (done.control / "ran").unlink()
    (done.control / "hang-launch").touch()
    done.make_draft("new")
    run = done.run("serve")
    wait_for(lambda: done.ran() == ["launch"] and done.serves() == "new")
    flow_process = done.process_of("launch")
    os.kill(flow_process, signal.SIGKILL)
    assert ends(run) == "Crashed"
    wait_for(lambda: done.ran()[-1] == "restore" and done.serves() == "old")  # what was half launched is gone
    assert done.process_of("restore") != flow_process

    run = done.run("cleanup")
    assert ends(run) == "Completed"
    assert not done.server_lives()
    assert "stopped" in artifacts_of(run)["slipstream-cleanup"]


def test_serve_on_a_far_host_is_taken_back_there_when_its_flow_or_its_job_is_killed(project: Project, far: Any) -> None:
    """`prefect deployment run`, the worker and its hook here; stages, server and records there, over OpenSSH."""
    host = far
    workdir = project.folder / "far" / "runs" / "far"

    def get(url: str) -> str:
        words = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
        return str(host.run((sys.executable, "-c", words, url)).stdout)

    def serves() -> str:
        return project.serves(get, workdir)

    def pid() -> int:
        return int(json.loads((workdir / "server.state.json").read_text())["identity"]["pid"])

    assert ends(project.run("serve", config="configs/far.yaml")) == "Completed"
    assert serves() == "old"
    assert not project.server_lives()
    before = pid()

    (project.control / "hang-launch").touch()
    project.make_draft("new")
    run = project.run("serve", config="configs/far.yaml")
    wait_for(lambda: serves() == "new")  # half launched
    worker = read_record(project.folder / "runs" / "prefect" / "worker.state.json")
    assert worker is not None
    (flow,) = [child for child in psutil.Process(worker.identity.pid).children() if os.getpgid(child.pid) == child.pid]
    flow.kill()
    assert ends(run) == "Crashed"
    wait_for(lambda: serves() == "old" and project.ran()[-1] == "restore")
    assert pid() != before

    run = project.run("serve", config="configs/far.yaml")
    wait_for(lambda: serves() == "new")
    host.run(("kill", "-KILL", "--", f"-{host.status('far-launch').identity['pid']}"))  # the job; its flow goes on
    assert ends(run) == "Failed"
    assert serves() == "old"
    project.command("slipstream.flows.cli", "clean", "configs/far.yaml")
    assert serves() == ""
    project.command("slipstream.flows.cli", "stage", "restore", "configs/far.yaml")
    assert serves() == ""  # that was a clean end
    assert host.run(("cat", "/proc/net/tcp")).stdout.count(" 0A ") == 1  # its sshd alone listens there


def test_a_run_that_is_cancelled_is_cleaned_up_on_its_way_out_and_leaves_the_worker_nothing(done: Project) -> None:
    shutil.rmtree(done.workdir / "parity")
    (done.control / "hang-parity").touch()
    run = done.run("lifecycle")
    wait_for(lambda: "parity" in done.ran() and done.server_lives())
    done.command("prefect", "flow-run", "cancel", str(run))
    assert ends(run) == "Cancelled"
    assert not done.server_lives()  # a process in its own session: Prefect's kill does not reach it
    assert done.ran() == ["cleanup", "parity", "cleanup"]  # the hook's would stop what the next run has started


@pytest.mark.soak
@pytest.mark.parametrize("name", registry.NAMES)
def test_a_run_can_be_cancelled_at_every_stage(done: Project, name: str) -> None:
    shutil.rmtree(done.workdir / name, ignore_errors=True)
    (done.control / f"hang-{name}").touch()
    run = done.run("lifecycle")
    wait_for(lambda: name in done.ran())
    done.command("prefect", "flow-run", "cancel", str(run))
    if name == "cleanup":  # the way out runs that stage, too
        (done.control / "hang-cleanup").unlink()
    assert ends(run) == "Cancelled"
    wait_for(lambda: not (done.workdir / LOCK).exists())
    assert not done.server_lives()
    assert done.ran()[-1] == "cleanup"


def test_a_flow_whose_worker_is_killed_leaves_nothing_and_up_starts_another(done: Project) -> None:
    shutil.rmtree(done.workdir / "parity", ignore_errors=True)
    (done.control / "hang-parity").touch()
    run = done.run("lifecycle")
    wait_for(lambda: "parity" in done.ran() and done.server_lives())
    worker = read_record(done.folder / "runs" / "prefect" / "worker.state.json")
    assert worker is not None
    os.kill(worker.identity.pid, signal.SIGKILL)
    said = done.command("slipstream.flows.cli", "up")
    assert "worker: started" in said
    (done.control / "hang-parity").unlink()
    assert ends(run) in ("Crashed", "Completed")  # its output goes to a pipe that nobody reads: Prefect may crash of it
    wait_for(lambda: not done.server_lives() and not (done.workdir / LOCK).exists())
    assert done.ran()[-1] == "cleanup"


def test_a_script_run_that_was_killed_is_running_for_ever_until_it_is_abandoned(done: Project) -> None:
    from prefect.client.orchestration import get_client

    project = done
    shutil.rmtree(project.workdir / "parity", ignore_errors=True)
    (project.control / "hang-parity").touch()
    words = [sys.executable, "-P", "-m", "slipstream.flows.cli", "run", "configs/smollm2.yaml"]
    script = subprocess.Popen(words, cwd=project.folder, env=project.env, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: "parity" in project.ran() and project.server_lives())
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
    assert state_of(run) == "Running"
    (project.control / "hang-parity").unlink()
    out = project.command("slipstream.flows.cli", "abandon", "configs/smollm2.yaml")
    assert f"abandoned lifecycle run {run} of process {script.pid}: it was Running" in out
    assert state_of(run) == "Crashed"
    assert not project.server_lives()
    assert "nothing to abandon" in project.command("slipstream.flows.cli", "abandon", "configs/smollm2.yaml")


def test_stopping_the_worker_ends_its_runs_first(done: Project) -> None:
    """A worker that is stopped leaves its flow runs going on; so they are ended while it can still tell of them."""
    shutil.rmtree(done.workdir / "parity", ignore_errors=True)
    (done.control / "hang-parity").touch()
    run = done.run("lifecycle")
    wait_for(lambda: "parity" in done.ran() and done.server_lives())
    said = done.command("slipstream.flows.cli", "up", "--stop")
    assert f"flow run of process {done.process_of('parity')}: ended" in said
    assert "worker: stopped" in said
    assert state_of(run) == "Crashed"
    assert not done.server_lives()
    assert not (done.workdir / LOCK).exists()
    assert "worker: started" in done.command("slipstream.flows.cli", "up")  # for whatever test comes next

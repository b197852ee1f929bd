"""One Prefect server for all tests of a session, the flows that talk to it, and a project whose flows a worker runs."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from slipstream.flows.prefect_server import prefect_server
from slipstream.tasks.process import group_members, read_record

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which Prefect's commands find the session's server; ours is left as it was."""
    before = dict(os.environ)
    os.environ.pop("PREFECT_API_URL", None)
    with prefect_server(tmp_path_factory.mktemp("prefect")):
        import prefect  # noqa: F401  (reads its settings now)

        inside = dict(os.environ)
        os.environ.clear()
        os.environ.update(before)
        try:
            yield inside
        finally:
            os.environ["PREFECT_API_URL"] = inside["PREFECT_API_URL"]  # as the server's own end expects it
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def with_prefect(prefect_api: dict[str, str]) -> Iterator[str]:
    """This process talks to the session's server, even if another test imported prefect before. Yields its URL."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    url = prefect_api["PREFECT_API_URL"]
    with temporary_settings(updates={PREFECT_API_URL: url, PREFECT_HOME: prefect_api["PREFECT_HOME"]}):
        yield url


@pytest.fixture
def flow(with_prefect: str) -> ModuleType:
    """slipstream.flows.lifecycle, talking to the session's server."""
    from slipstream.flows import lifecycle

    return lifecycle


@pytest.fixture(scope="session")
def everything(
    prefect_api: dict[str, str], load_test_module: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
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
    project = load_test_module(Path(__file__).with_name("deployed_project.py")).Project(folder, env)
    project.make_draft("old")
    project.said = project.command("slipstream.flows.cli", "up").splitlines()
    yield project
    project.command("slipstream.flows.cli", "up", "--stop")


@pytest.fixture
def project(everything: Any, with_prefect: str) -> Iterator[Any]:
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
def far(project: Any, load_test_module: Callable[[Path], Any], tmp_path: Path) -> Iterator[Any]:
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
def done(project: Any) -> Any:
    """With all stages done."""
    if not (project.workdir / "report").is_dir():
        assert project.ends(project.run("lifecycle")) == "Completed"
        (project.control / "ran").unlink()
    return project

"""A flow that is killed while its shares run on two hosts: they are taken up or stopped, none runs twice or is left."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import psutil
import pytest
import yaml

from slipstream.tasks.process import read_record

HOSTS = Path(__file__).parents[1] / "tasks" / "hosts"
SCRIPT = """
import sys
from slipstream.flows.stage import StageName, stage
stage(StageName.REGENERATE, "configs/fleet.yaml", sys.argv[1:])
"""


pytestmark = pytest.mark.soak  # a minute each, most of it waiting for hosts and servers


@pytest.fixture
def fleet(project: Any, load_test_module: Callable[[Path], Any], tmp_path: Path) -> Iterator[Any]:
    """Two hosts in namespaces, for the project's deployment configs/fleet.yaml; the whole run's resolve is done."""
    ssh_tools, machine_tools = load_test_module(HOSTS / "ssh_server.py"), load_test_module(HOSTS / "machines.py")
    ssh_tools.need_sshd()
    machine_tools.need_namespaces()
    kind = machine_tools.machine_class(ssh_tools)
    machines = [kind(tmp_path / f"machine{number}", number) for number in range(2)]
    hosts, sections, known = [], [], tmp_path / "known_hosts"
    for number, one in enumerate(machines):
        one.trust()
        directory = tmp_path / f"far{number}"
        hosts.append(one.host(directory))
        machine_tools.use_this_python(hosts[-1], tmp_path / f"python{number}", project.folder / "site")
        sections.append({"address": one.listen, "identity_file": str(one.user_key), "directory": str(directory)})
    known.write_text("".join((one.folder / "known_hosts").read_text() for one in machines))
    host = {
        "kind": "ssh",
        "workdir": str(tmp_path / "here" / "fleet"),
        "known_hosts": str(known),
        **sections[0],
        "more": sections[1:],
    }
    (project.folder / "configs" / "fleet.yaml").write_text(yaml.safe_dump({"host": host}))

    def shares() -> dict[str, Any]:
        """Share -> its running job, wherever."""
        found = [job for one in hosts for job in one.jobs("fleet-") if job.name.endswith("-extract")]
        return {job.name: job.identity for job in found if job.state == "running"}

    def begun() -> dict[str, Any]:
        """Both shares, once they hang in their last stage."""
        project.wait_for(lambda: len(shares()) == 2)
        return shares()

    assert project.ends(project.run("stage", config="configs/fleet.yaml", name="resolve")) == "Completed"
    yield SimpleNamespace(hosts=hosts, shares=shares, begun=begun, workdir=tmp_path / "here" / "fleet")
    for each, one in zip(hosts, machines, strict=True):
        each.close()
        one.stop()


def script(project: Any, *overrides: str) -> Any:
    """The flow as a script: after a SIGKILL nobody is there who would deal with it."""
    return subprocess.Popen([sys.executable, "-P", "-c", SCRIPT, *overrides], cwd=project.folder, env=project.env)


def test_a_killed_script_goes_on_with_the_next_and_is_ended_by_abandon_on_both_hosts(project: Any, fleet: Any) -> None:
    hang = project.control / "hang-extract"
    hang.touch()
    first = script(project)
    before = fleet.begun()
    assert set(before) == {"fleet-0-of-2-extract", "fleet-1-of-2-extract"}
    first.kill()
    first.wait()
    assert fleet.shares() == before  # they go on
    second = script(project)
    project.wait_for(lambda: (fleet.workdir / "flow-run.json").exists())
    hang.unlink()
    assert second.wait(timeout=240) == 0
    ran = project.ran()
    assert (ran.count("extract"), ran.count("regenerate")) == (2, 3)  # each share once, and the whole takes them
    assert fleet.shares() == {}

    hang.touch()
    third = script(project, "data.seed=7")  # other shares
    fleet.begun()
    third.kill()
    third.wait()
    said = project.command("slipstream.flows.cli", "abandon", "configs/fleet.yaml")
    assert "abandoned stage run" in said
    assert fleet.shares() == {}
    assert all(not job.members for one in fleet.hosts for job in one.jobs("fleet-"))
    said = project.command("slipstream.flows.cli", "clean", "configs/fleet.yaml")
    assert "nothing of ours was running" in said


def test_the_worker_stops_the_shares_of_a_killed_flow_on_both_hosts_and_the_next_run_does_them(
    project: Any, fleet: Any
) -> None:
    hang = project.control / "hang-extract"
    hang.touch()
    run: UUID = project.run("stage", config="configs/fleet.yaml", name="regenerate")
    fleet.begun()
    worker = read_record(project.folder / "runs" / "prefect" / "worker.state.json")
    assert worker is not None
    (flow,) = [child for child in psutil.Process(worker.identity.pid).children() if os.getpgid(child.pid) == child.pid]
    flow.kill()
    assert project.ends(run) == "Crashed"
    project.wait_for(lambda: not fleet.shares())
    project.wait_for(lambda: project.ran()[-1] == "restore")
    hang.unlink()
    assert project.ends(project.run("stage", config="configs/fleet.yaml", name="regenerate")) == "Completed"
    assert project.ran().count("extract") == 4  # those that were stopped, and those that came to their end
    assert fleet.shares() == {}

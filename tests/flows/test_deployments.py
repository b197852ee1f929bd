"""The deployments of prefect.yaml, run by a process worker against a real server: what they show and what they do."""

import json
import os
import shutil
import signal
import sys
from typing import Any

import psutil

from slipstream.tasks import registry
from slipstream.tasks.lock import LOCK
from slipstream.tasks.process import read_record


def test_up_says_what_it_did_and_may_be_repeated(project: Any) -> None:
    said = "\n".join(project.said)
    for words in ("work pool local: created", "deployments: 5", "limit slipstream-host-", "worker: started", "stop: "):
        assert words in said
    again = project.command("slipstream.flows.cli", "up")
    assert "worker: runs already" in again
    assert "created" not in again
    assert f"PREFECT_API_URL={project.env['PREFECT_API_URL']}" in again


def test_the_form_of_each_deployment_is_typed_and_described(project: Any) -> None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        found = {d.entrypoint.rpartition(":")[2]: d for d in client.read_deployments() if d.entrypoint}
    assert set(found) == {"lifecycle", "stage", "serve", "roll", "cleanup"}
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


def test_the_lifecycle_shows_artifacts_and_leaves_nothing(project: Any) -> None:
    run = project.run("lifecycle")
    assert project.ends(run) == "Completed"
    assert project.ran() == ["cleanup", *registry.NAMES, "cleanup"]
    assert not project.server_lives()
    assert not (project.workdir / LOCK).exists()
    shown = project.artifacts_of(run)
    assert set(shown) == {f"slipstream-{name}" for name in ("plan", "table", "report", "page", "plot-1")}
    assert "1.2x" in shown["slipstream-table"]
    assert shown["slipstream-plot-1"].startswith("data:image/png;base64,")


def test_a_second_lifecycle_is_cached_but_for_what_is_not_there_any_more(done: Any) -> None:
    shutil.rmtree(done.workdir / "extract")  # Prefect remembers it
    run = done.run("lifecycle")
    assert done.ends(run) == "Completed"
    on_the_world = [stage.name for stage in registry.STAGES if not stage.cached]
    assert done.ran() == [
        "cleanup",
        "extract",
        *on_the_world,
        "cleanup",
    ]  # the same content: its readers are still right
    cached = [stage.name for stage in registry.STAGES if stage.cached]
    expected = [*((name, "Cached") for name in cached), *((name, "Completed") for name in [*on_the_world, "extract"])]
    done.wait_for(lambda: done.tasks_of(run) == sorted(expected))  # states of tasks reach the server a moment later


def test_serve_keeps_its_server_and_what_it_replaced_is_brought_back_by_the_worker_when_it_is_killed(
    done: Any,
) -> None:
    run = done.run("stage", name="resolve")
    assert done.ends(run) == "Completed"
    assert done.ran() == []
    assert set(done.artifacts_of(run)) == {"slipstream-resolve"}
    run = done.run("serve")
    assert done.ends(run) == "Completed"
    assert done.ran() == ["launch"]  # benchmark was done
    assert done.server_lives()
    assert set(done.artifacts_of(run)) == {"slipstream-plan", "slipstream-server", "slipstream-benchmark"}

    assert done.serves() == "old"

    (done.control / "ran").unlink()
    (done.control / "hang-launch").touch()
    done.make_draft("new")
    run = done.run("serve")
    done.wait_for(lambda: done.ran() == ["launch"] and done.serves() == "new")
    flow_process = done.process_of("launch")
    os.kill(flow_process, signal.SIGKILL)
    assert done.ends(run) == "Crashed"
    done.wait_for(lambda: done.ran()[-1] == "restore" and done.serves() == "old")  # what was half launched is gone
    assert done.process_of("restore") != flow_process

    run = done.run("cleanup")
    assert done.ends(run) == "Completed"
    assert not done.server_lives()
    assert "stopped" in done.artifacts_of(run)["slipstream-cleanup"]


def test_serve_on_a_far_host_is_taken_back_there_when_its_flow_or_its_job_is_killed(project: Any, far: Any) -> None:
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

    assert project.ends(project.run("serve", config="configs/far.yaml")) == "Completed"
    assert serves() == "old"
    assert not project.server_lives()
    before = pid()

    (project.control / "hang-launch").touch()
    project.make_draft("new")
    run = project.run("serve", config="configs/far.yaml")
    project.wait_for(lambda: serves() == "new")  # half launched
    worker = read_record(project.folder / "runs" / "prefect" / "worker.state.json")
    assert worker is not None
    (flow,) = [child for child in psutil.Process(worker.identity.pid).children() if os.getpgid(child.pid) == child.pid]
    flow.kill()
    assert project.ends(run) == "Crashed"
    project.wait_for(lambda: serves() == "old" and project.ran()[-1] == "restore")
    assert pid() != before

    run = project.run("serve", config="configs/far.yaml")
    project.wait_for(lambda: serves() == "new")
    host.run(("kill", "-KILL", "--", f"-{host.status('far-launch').identity['pid']}"))  # the job; its flow goes on
    assert project.ends(run) == "Failed"
    assert serves() == "old"
    project.command("slipstream.flows.cli", "clean", "configs/far.yaml")
    assert serves() == ""
    project.command("slipstream.flows.cli", "stage", "restore", "configs/far.yaml")
    assert serves() == ""  # that was a clean end
    assert host.run(("cat", "/proc/net/tcp")).stdout.count(" 0A ") == 1  # its sshd alone listens there

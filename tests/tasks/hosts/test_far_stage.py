"""Stages on a far host: the real ones, over a real SSH server, followed, found again, stopped."""

import json
import os
import shutil
import sys
import threading
from dataclasses import replace

import pytest

from slipstream.configs.host import Host as HostSection
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts.far_stage import FarStageFailed, run_name, stop_far_stages
from slipstream.tasks.hosts.far_stage import run_far_stage as run_stage_there
from slipstream.tasks.hosts.provision import CURRENT
from slipstream.tasks.reporting import NullReporter


def run_far_stage(host, stage, deployment, workdir, listener, **options):
    """With the locks of this test alone."""
    locks = str(workdir.parent.parent / "locks")
    return run_stage_there(host, stage, deployment, workdir, listener, lock_folder=locks, **options)


class Listener(NullReporter):
    def __init__(self):
        self.events = []

    def stage_started(self, stage, *, resumed):
        self.events.append(("started", stage))

    def progress(self, stage, done, total, fields):
        self.events.append(("progress", stage))

    def say(self, stage, text, *, markup):
        self.events.append(("say", text))

    def stage_finished(self, stage, *, status, seconds, figures):
        self.events.append(("finished", status))


@pytest.fixture
def there(ssh_server, tmp_path):
    """A host in which `current` environment is this Python."""
    python = tmp_path / "python"
    path = os.environ.get("PYTHONPATH", "")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path!r} OMP_NUM_THREADS=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    current = tmp_path / "current"
    current.write_text(json.dumps({"key": "x", "python": str(python)}))
    host = ssh_server.host(tmp_path / "far")
    host.put(current, CURRENT)
    yield host
    for folder in sorted((tmp_path / "far" / "jobs").glob("*")):
        host.stop(folder.name, drain_seconds=0)
    host.close()


@pytest.fixture
def made(there, pipeline, chats, tiny, tmp_path, ssh_server):
    """A tiny pipeline whose first stages are done on the host, and its deployment as it is written here."""
    made = pipeline.make_pipeline(tmp_path / "p", chats, tiny)
    (tmp_path / "far" / "runs").mkdir()
    shutil.move(made.workdir, tmp_path / "far" / "runs" / "demo")
    section = HostSection(kind="ssh", address="127.0.0.1", port=ssh_server.port, workdir=tmp_path / "here" / "demo")
    return made.deployment.model_copy(update={"host": section}), section.workdir


def test_a_stage_runs_there_and_is_skipped_the_second_time(there, made, tmp_path):
    deployment, workdir = made
    listener = Listener()
    result = run_far_stage(there, "extract", deployment, workdir, listener)
    assert (result.name, result.status) == ("extract", "done")
    assert ("started", "extract") in listener.events
    assert ("finished", "done") in listener.events
    assert (tmp_path / "far" / "runs" / "demo" / "extract" / "manifest.json").is_file()
    manifest = json.loads((workdir / "from-host" / "extract" / "manifest.json").read_text())
    assert manifest["figures"] == result.figures
    assert not (workdir / "extract").exists()
    again = run_far_stage(there, "extract", deployment, workdir, Listener())
    assert again.status == "skipped"
    assert again.figures == result.figures
    forced = run_far_stage(there, "extract", deployment, workdir, Listener(), force=True)
    assert forced.status == "done"


def test_a_stage_that_fails_there_says_why_here(there, made):
    deployment, workdir = made
    with pytest.raises(FarStageFailed, match="stage train cannot start: extract has not run") as error:
        run_far_stage(there, "train", deployment, workdir, Listener())
    assert error.value.exit_code == 1
    assert "F17" in str(error.value)
    assert there.name in str(error.value)


def test_two_who_ask_at_once_follow_one_job(there, made, ssh_server, tmp_path):
    deployment, workdir = made
    results, listeners = [], [Listener(), Listener()]
    hosts = [there, ssh_server.host(tmp_path / "far")]

    def run(host, listener):
        results.append(run_far_stage(host, "extract", deployment, workdir, listener))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(hosts, listeners, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hosts[1].close()
    assert len(results) == 2
    assert results[0].figures == results[1].figures
    # whoever came second found it running, or ended already and then skipped it: never was it done twice
    assert [result.status for result in results].count("done") >= 1
    log = next((tmp_path / "far" / "jobs" / "demo-extract").glob("*.log")).read_text()
    assert log.count('"event": "started"') <= 1


def test_prompts_travel_and_the_copy_says_local(there, made, tmp_path):
    deployment, workdir = made
    prompts = tmp_path / "my prompts.jsonl"
    prompts.write_text('{"id": "a", "category": "x", "turns": ["hello"]}\n')
    changed = deployment.model_copy(
        update={"benchmark": deployment.benchmark.model_copy(update={"prompts": str(prompts)})}
    )
    run_far_stage(there, "cleanup", changed, workdir, Listener())
    copy = json.loads((tmp_path / "far" / "runs" / "demo.deployment.json").read_text())
    assert copy["host"]["kind"] == "local"
    assert copy["host"]["workdir"] == str(tmp_path / "far" / "runs" / "demo")
    sent = copy["benchmark"]["prompts"]
    assert sent.startswith(str(tmp_path / "far" / "inputs"))
    with open(sent) as file:
        assert file.read() == prompts.read_text()
    assert copy["data"]["prompts"] == "builtin"


def test_a_stage_that_still_runs_is_stopped_before_the_clean_up(there, made, tmp_path, ssh_tools):
    """A stand-in that does not end, under the name of the run's stage."""
    from slipstream.tasks.hosts.host import Job

    _, workdir = made
    job = Job(f"{run_name(workdir)}-train", (sys.executable, "-c", "import time; time.sleep(600)"))
    status = there.start(job)
    other = there.start(replace(job, name="other-train"))
    said = []
    stop_far_stages(there, workdir, said.append)
    assert len(said) == 1
    assert "stopped stage train" in said[0]
    assert there.status(status.name).members == ()
    assert there.status(other.name).state == "running"


def test_a_host_without_slipstream_says_so(ssh_server, tmp_path, made):
    deployment, workdir = made
    bare = ssh_server.host(tmp_path / "bare")
    with pytest.raises(SlipstreamError, match="Slipstream is not installed on") as error:
        run_far_stage(bare, "extract", deployment, workdir, Listener())
    assert "slipstream host provision" in error.value.do
    bare.close()


@pytest.mark.parametrize(
    ("folder", "name"),
    [("runs/Default", "default"), ("my run (2)", "my-run--2-"), ("...", "default"), ("x" * 90, "x" * 40)],
)
def test_the_name_of_a_run(tmp_path, folder, name):
    assert run_name(tmp_path / folder) == name


def test_another_owner_on_the_gpus_is_named_and_no_hindrance_to_the_clean_up(there, made, tmp_path):
    from slipstream.tasks.hosts.host import Job

    deployment, workdir = made
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    there.start(Job("theirs", command, owner="ann", locks=("gpus",), lock_folder=str(tmp_path / "locks")))
    with pytest.raises(SlipstreamError, match="gpus of this host is held by job theirs of ann") as error:
        run_far_stage(there, "extract", deployment, workdir, Listener())
    assert error.value.fault == "F15"
    assert run_far_stage(there, "cleanup", deployment, workdir, Listener()).status == "done"

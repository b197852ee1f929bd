"""Cleaning up on a far host whose disk is full, or whose records are damaged: all else ends, what was left is told."""

import sys
from types import SimpleNamespace

import pytest

from slipstream.configs.host import Host as HostSection
from slipstream.configs.schema import Deployment
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts.far_stage import environment_python
from slipstream.tasks.hosts.host import Job
from slipstream.tasks.registry import get_stage
from slipstream.tasks.stage_runner import stage_runner

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
LEAVE = """
import sys
from pathlib import Path
from slipstream.tasks.process import start_detached
folder = Path(sys.argv[1])
start_detached([sys.executable, "-c", "import time; time.sleep(600)"], log=folder / "server.log",
               state_file=folder / "server.state.json")
"""


@pytest.fixture
def there(machine, machine_tools, tmp_path):
    """A host with a small disk, on which a run left a server and a stage, beside another's job; `clean` runs here."""
    one = machine(disk="6m")
    host = one.host(one.base)
    machine_tools.use_this_python(host, tmp_path / "python")
    section = HostSection(
        kind="ssh",
        address=one.listen,
        identity_file=one.user_key,
        known_hosts=one.folder / "known_hosts",
        directory=str(one.base),
        workdir=tmp_path / "here" / "demo",
    )
    deployment = Deployment(host=section, server={"shutdown_timeout_seconds": 5.0})
    run = f"{host.directory}/runs/demo"
    assert host.run((environment_python(host), "-P", "-c", LEAVE, run)).exit_code == 0
    host.start(Job("demo-train", SLEEP))
    host.start(Job("other-train", SLEEP))
    listener = machine_tools.Listener()
    listener.warn = lambda stage, text: listener.said.append(text)

    def clean():
        with stage_runner(deployment, section.workdir, listener) as run:
            return run(get_stage("cleanup"))

    shell = lambda words: host.run(("sh", "-c", words))  # noqa: E731
    yield SimpleNamespace(
        disk=one.disk, base=host.directory, run=run, clean=clean, said=listener.said, shell=shell, host=host
    )
    host.close()


def test_on_a_full_disk_everything_of_the_run_is_stopped(there):
    there.shell(f"head -c 100m /dev/zero > {there.disk}/somebody-elses")
    with pytest.raises(SlipstreamError, match="is full") as error:  # what does not end anything is refused
        there.host.start(Job("late", SLEEP))
    assert error.value.runbook == "disk-full.md"
    assert there.clean().status == "done"  # the records that it removed made room for its manifest
    assert any("it runs there without a job" in text for text in there.said), there.said
    assert any("stopped stage train" in text for text in there.said)
    assert any("stopped server (pid" in text for text in there.said)
    assert there.host.status("other-train").state == "running"
    assert there.host.status("demo-train").members == ()
    assert there.shell(f"ls {there.run}/*.state.json").stdout == ""


def test_a_damaged_record_there_is_told_and_keeps_nothing_else(there):
    there.shell(f"echo '{{' > {there.base}/jobs/demo-train/job.state.json")
    there.shell(f"echo '{{' > {there.run}/baseline.state.json")
    with pytest.raises(SlipstreamError, match="2 things were left") as error:
        there.clean()
    assert "job demo-train on " in error.value.found
    assert "baseline.state.json is not readable" in error.value.found
    assert any("stopped server (pid" in text for text in there.said)
    assert there.host.status("other-train").state == "running"
    assert {job.name: job.state for job in there.host.jobs("demo-")}["demo-train"] == "damaged"

"""What goes wrong on the way to a host and on it, done to hosts in namespaces: cables, boots, disks, shells.

Each is caught in words or survived with nothing lost, and most are shown to do harm where their check is off.
"""

import json
import os
import shutil
import sys
import threading
import time

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts.far_stage import FarStageFailed, run_far_stage
from slipstream.tasks.hosts.host import HostUnreachable, Job
from slipstream.tasks.hosts.known_hosts import HostKeyRefused

COUNT = "import time\nfor i in range({n}): print(i, flush=True); time.sleep(0.1)\nraise SystemExit(9)"
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
def far_run(machine, machine_tools, finished, tmp_path):
    """(machine, host, deployment, workdir): a finished tiny pipeline on a host whose cable is short of patience."""
    one = machine()
    host = one.host(tmp_path / "far", keepalive_seconds=1, connect_seconds=3, reconnect_seconds=200)
    machine_tools.use_this_python(host, tmp_path / "python")
    made, _, _ = finished
    shutil.copytree(made.workdir, tmp_path / "far" / "runs" / "demo")
    yield one, host, made.deployment, tmp_path / "here" / "demo"
    host.close()


# ---- the way there ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [6.0, pytest.param(60.0, marks=pytest.mark.soak)])
def test_the_cable_is_pulled_in_the_middle_of_training_and_put_back(far_run, machine_tools, tmp_path, seconds):
    """For longer than a connection is believed in. The job goes on, is found again, and is not done twice."""
    one, host, deployment, workdir = far_run
    pulled = []

    def pull():
        one.unplug()
        pulled.append(time.monotonic())
        threading.Timer(seconds, one.plug).start()

    result = run_far_stage(host, "train", deployment, workdir, machine_tools.Listener("started", pull), force=True)
    assert result.status == "done"
    assert time.monotonic() - pulled[0] > seconds
    log = next((tmp_path / "far" / "jobs" / "demo-train").glob("*.log")).read_text()
    assert log.count('"event": "started"') == 1
    manifest = json.loads((tmp_path / "far" / "runs" / "demo" / "train" / "manifest.json").read_text())
    assert manifest["figures"] == result.figures


def test_without_patience_the_same_ends_the_look_but_not_the_job(machine, ssh_tools):
    one = machine()
    host = one.host(one.base, keepalive_seconds=1, connect_seconds=1, reconnect_seconds=0, command_seconds=1)
    job = Job("count", (sys.executable, "-c", COUNT.format(n=40)))
    first = host.start(job)
    one.unplug()
    with pytest.raises(HostUnreachable) as error:
        host.status("count")
    assert error.value.runbook == "host-unreachable.md"
    assert not host._connection.is_open
    one.plug()
    host.reconnect_seconds = 30
    again = host.start(job)
    assert (again.attached, again.identity) == (True, first.identity)
    ended = ssh_tools.wait_for(lambda: (s := host.status("count")).state == "exited" and s)
    assert ended.exit_code == 9
    assert host.read(ended.log) == b"".join(b"%d\n" % i for i in range(40))
    host.close()


def test_another_host_at_the_same_address_gets_nothing(machine):
    one = machine()
    host = one.host(one.base)
    host.hello()
    host.close()
    one.power_off()
    one.new_host_key()
    one.power_on()
    with pytest.raises(HostKeyRefused, match=rf"{one.listen} shows another key than before"):
        host.start(Job("secret", SLEEP))
    log = (one.folder / "sshd.log").read_text()
    assert log.count("Accepted publickey") == 1  # that of the right host
    one.trust()  # the check off: whoever answers there runs what we send
    assert host.start(Job("secret", SLEEP)).state == "running"
    host.close()


def test_a_host_that_was_switched_off_says_what_became_of_its_jobs(machine, tmp_path):
    one = machine()
    host = one.host(tmp_path / "far", keepalive_seconds=1, connect_seconds=2)
    job = Job("train", SLEEP)
    host.start(job)
    one.power_off()
    threading.Timer(1.0, one.power_on).start()
    lost = host.status("train")
    assert (lost.state, lost.members) == ("lost", ())
    assert "rebooted" in lost.why
    assert host.start(Job("train", SLEEP, run="again")).state == "running"
    host.close()


def test_a_slow_way_is_not_a_broken_one(machine, ssh_tools, tmp_path):
    one = machine()
    relay = ssh_tools.Relay(22, to=one.listen, bytes_per_second=60_000)
    one.trust(relay.address)
    host = one.host(one.base, address=relay.address, keepalive_seconds=1, connect_seconds=5, command_seconds=30)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(120_000))
    started = time.monotonic()
    host.put(source, "target")
    assert time.monotonic() - started > 1.5
    assert host.file_facts("target")["bytes"] == 120_000
    host.close()
    relay.close()


# ---- what the host does by itself ------------------------------------------------------------------------------------


def test_a_login_shell_that_prints_and_dawdles(machine, tmp_path):
    """By the user's own ~/.bashrc, which bash reads for every command that comes by SSH."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("echo 'Welcome to node 7!'; echo 'quota: 97 %' >&2; sleep 0.5\n")
    one = machine(home=home)
    host = one.host(one.base)
    host.hello()
    began = time.monotonic()
    assert [host.run(("echo", str(i))).stdout for i in range(8)] == [f"{i}\n" for i in range(8)]
    assert time.monotonic() - began < 4.0  # the shell was waited for once, not eight times
    source = tmp_path / "source"
    source.write_bytes(b"x" * 300_000)
    host.put(source, "target")
    assert host.read("target", 299_999) == b"x"
    host.close()


def test_a_disk_that_runs_full_there(machine, tmp_path):
    one = machine(disk="3m")
    host = one.host(one.base)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(5_000_000))
    with pytest.raises(SlipstreamError, match=r"needs 5\.0 MB and the disk there has .* free") as error:
        host.put(source, "folder/target")
    assert error.value.runbook == "disk-full.md"
    assert host.run(("ls", "-A", f"{host.directory}/folder")).stdout == ""
    host.run(("sh", "-c", f"head -c 4m /dev/zero > {one.disk}/somebody-elses"))
    with pytest.raises(SlipstreamError, match=r"disk .* is full") as error:
        host.start(Job("late", SLEEP))
    assert error.value.runbook == "disk-full.md"
    host.run(("rm", f"{one.disk}/somebody-elses"))
    assert host.start(Job("late", SLEEP)).state == "running"
    host.close()


def test_a_clock_that_is_wrong(machine, machine_tools, tmp_path):
    from slipstream.configs.schema import Deployment
    from slipstream.tasks.hosts.doctor import judge

    one = machine(f"SetEnv LD_PRELOAD={machine_tools.wrong_clock(tmp_path, 90)}")
    host = one.host(one.base)
    facts = host.facts(address="127.0.0.1", port=0)
    assert 89 < facts["skew_seconds"] < 91
    (clock,) = [one for one in judge(facts, Deployment()) if one.check == "clock"]
    assert clock.severity == "warning"
    job = Job("count", (sys.executable, "-c", COUNT.format(n=1)))  # nothing of a job hangs on the clock
    assert host.start(job).identity == host.start(job).identity
    host.close()


def test_a_stage_that_is_killed_says_so_and_leaves_the_host_usable(far_run, machine_tools):
    _, host, deployment, workdir = far_run

    def kill():
        (train,) = [job for job in host.jobs("demo-") if job.name == "demo-train"]
        host.run(("kill", "-9", *map(str, train.members[1:])))  # the command, not its keeper

    with pytest.raises(FarStageFailed, match=r"ended without a word .*exit code -9") as error:
        run_far_stage(host, "train", deployment, workdir, machine_tools.Listener("started", kill), force=True)
    assert error.value.runbook == "run-failed.md"
    assert run_far_stage(host, "cleanup", deployment, workdir, machine_tools.Listener()).status == "done"


def test_two_deployments_want_the_same_cards(machine, tmp_path):
    one = machine()
    ours, theirs = one.host(tmp_path / "ours"), one.host(tmp_path / "theirs")  # two users' directories, one host
    theirs.start(Job("serve", SLEEP, owner="ann@desk:chat", locks=("gpus",)))
    with pytest.raises(SlipstreamError, match="gpus of this host is held by job serve of ann@desk:chat") as error:
        ours.start(Job("serve", SLEEP, owner="bob@desk:chat", locks=("gpus",)))
    assert error.value.fault == "F15"
    assert ours.jobs() == []
    # the check off: both are on the cards
    assert ours.start(Job("serve", SLEEP, owner="bob@desk:chat")).state == "running"
    theirs.stop("serve", drain_seconds=0)
    ours.stop("serve", drain_seconds=0)
    assert ours.start(Job("serve", SLEEP, owner="bob@desk:chat", locks=("gpus",))).state == "running"
    for host in (ours, theirs):
        host.close()


def test_fewer_sessions_than_we_were_told(machine):
    one = machine("MaxSessions 2")
    host = one.host(one.base, max_sessions=10)
    host.hello()
    results = []
    ask = [threading.Thread(target=lambda: results.append(host.run(("echo", "x")).stdout)) for _ in range(8)]
    for thread in ask:
        thread.start()
    for thread in ask:
        thread.join()
    assert results == ["x\n"] * 8
    host.close()

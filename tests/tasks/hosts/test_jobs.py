"""Detached jobs on a host: one for a submission, known by identity, ended whole, with their exit code."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts.host import Job
from slipstream.tasks.proc_stat import boot_id, read_stat

SLEEP = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
# A parent with a child that ignores SIGTERM; the child prints its pid.
STUBBORN = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); "
    "time.sleep(600)"])
time.sleep(600)
"""


def gone(pid):
    return read_stat(pid) is None


def wait_exited(host, name, ssh_tools):
    return ssh_tools.wait_for(lambda: (s := host.status(name)).state != "running" and s)


def test_an_unknown_job_is_none(host):
    assert host.status("nothing") is None
    assert host.stop("nothing") is None


def test_jobs_are_listed_by_the_start_of_their_name(host):
    for name in ("run-a", "run-b", "other"):
        host.start(Job(name, SLEEP))
    assert [status.name for status in host.jobs("run-")] == ["run-a", "run-b"]
    assert len(host.jobs()) == 3
    assert host.jobs("nothing") == []


def test_a_job_leads_a_session_of_its_own(host):
    status = host.start(Job("sleep", SLEEP))
    identity = status.identity
    assert status.state == "running"
    assert not status.attached
    assert identity["pid"] == identity["pgid"] == identity["session"] == os.getsid(identity["pid"])
    assert identity["boot_id"] == boot_id()
    assert identity["start_time"] == read_stat(identity["pid"]).start_time
    assert len(status.members) == 2  # the keeper and the command
    assert status.command == SLEEP


def test_the_same_submission_finds_the_running_job(any_host):
    first = any_host.start(Job("sleep", SLEEP))
    again = any_host.start(Job("sleep", SLEEP))
    assert again.attached
    assert again.identity == first.identity
    assert again.state == "running"


def test_the_same_submission_finds_the_ended_job_and_a_new_run_repeats_it(host, tmp_path, ssh_tools):
    counted = tmp_path / "counted"
    command = ("sh", "-c", f"echo x >> {counted}; exit 3")
    host.start(Job("once", command, run="1"))
    assert wait_exited(host, "once", ssh_tools).exit_code == 3
    again = host.start(Job("once", command, run="1"))
    assert (again.attached, again.state, again.exit_code) == (True, "exited", 3)
    assert counted.read_text() == "x\n"
    new = host.start(Job("once", command, run="2"))
    assert not new.attached
    assert wait_exited(host, "once", ssh_tools).exit_code == 3
    assert counted.read_text() == "x\nx\n"


def test_a_job_of_the_same_name_that_runs_something_else_is_refused(host):
    first = host.start(Job("sleep", SLEEP))
    with pytest.raises(SlipstreamError, match="job sleep runs something else") as error:
        host.start(Job("sleep", (*SLEEP, "other")))
    assert error.value.fault == "F15"
    assert str(first.identity["pid"]) in str(error.value)
    assert host.status("sleep").state == "running"


def test_a_keeper_that_has_not_left_yet_is_no_other_job(host, ssh_tools):
    """It writes how the job ended, and then goes: whoever asks in between is not refused."""
    first = host.start(Job("quick", ("true",), run="1"))
    ended = wait_exited(host, "quick", ssh_tools)
    for number in range(2, 5):
        assert ended.exit_code == 0
        assert not host.start(Job("quick", ("true",), run=str(number))).attached
        ended = wait_exited(host, "quick", ssh_tools)
    # what the command left in the background stays, and is no keeper
    host.start(Job("left", ("sh", "-c", "sleep 600 &")))
    wait_exited(host, "left", ssh_tools)
    with pytest.raises(SlipstreamError, match="job left runs something else"):
        host.start(Job("left", ("true",)))
    assert first.submission != ended.submission


def test_two_submitters_at_once_start_one_job(any_host, tmp_path):
    counted = tmp_path / "counted"
    job = Job("race", ("sh", "-c", f"echo $$ >> {counted}; sleep 600"))
    found = []
    threads = [threading.Thread(target=lambda: found.append(any_host.start(job))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert sorted(status.attached for status in found) == [False, True, True, True]
    assert len({status.identity["pid"] for status in found}) == 1
    assert len(counted.read_text().splitlines()) == 1


def test_a_submitter_that_dies_while_it_starts_leaves_no_second_job(tmp_path, ssh_tools):
    """The keeper holds the job's lock from before it is recorded until the command runs, whoever asked for it."""
    import subprocess

    from slipstream.tasks.hosts.local import LocalHost

    counted = tmp_path / "counted"
    job = Job("orphan", ("sh", "-c", f"echo $$ >> {counted}; sleep 600"))
    code = (
        "import os, signal, sys, threading, time\n"
        "from pathlib import Path\n"
        "from slipstream.tasks import process\n"
        "from slipstream.tasks.hosts import jobs\n"
        # the state file is waited for: die there, with the new process already on its way
        "process._wait_for_record = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"jobs.start_job(Path({str(tmp_path / 'far')!r}), name='orphan', submission={job.submission!r}, "
        f"command={list(job.command)!r}, directory='', owner='slipstream', locks=[], "
        "lock_folder='/nowhere', secrets={}, env={})\n"
    )
    died = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert died.returncode == -signal.SIGKILL, died.stderr
    host = LocalHost(tmp_path / "far")
    try:
        status = host.start(job)
        assert status.attached
        assert status.state == "running"
        ssh_tools.wait_for(counted.is_file)
        assert len(counted.read_text().splitlines()) == 1
    finally:
        host.stop("orphan", drain_seconds=0)


def test_stopping_ends_the_whole_group_and_proves_it(any_host, ssh_tools):
    status = any_host.start(Job("stubborn", (sys.executable, "-c", STUBBORN)))
    child = int(ssh_tools.wait_for(lambda: any_host.read(status.log)))
    stopped = any_host.stop("stubborn", drain_seconds=0.5)
    assert child in stopped.killed_pids
    assert stopped.state == "stopped"
    assert stopped.members == ()
    assert gone(child)
    assert all(gone(pid) for pid in (*stopped.ended_pids, *stopped.killed_pids))
    assert set(status.members) <= {*stopped.ended_pids, *stopped.killed_pids}
    again = any_host.stop("stubborn")
    assert (again.state, again.ended_pids, again.killed_pids) == ("stopped", (), ())


def test_a_job_that_ends_at_sigterm_keeps_its_own_exit_code(host, ssh_tools):
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print('up', flush=True)"
    status = host.start(Job("polite", (sys.executable, "-c", f"{code}; time.sleep(600)")))
    ssh_tools.wait_for(lambda: host.read(status.log))
    stopped = host.stop("polite")
    assert (stopped.state, stopped.exit_code, stopped.killed_pids) == ("stopped", 5, ())


def test_death_by_a_signal_and_the_137_of_a_shell_are_told_apart(host, ssh_tools):
    host.start(Job("killed", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")))
    assert wait_exited(host, "killed", ssh_tools).exit_code == -9
    host.start(Job("shell", ("sh", "-c", "exit 137")))
    assert wait_exited(host, "shell", ssh_tools).exit_code == 137


def test_a_job_that_was_killed_with_its_keeper_is_lost_and_says_so(host, ssh_tools):
    status = host.start(Job("sleep", SLEEP))
    os.killpg(status.identity["pgid"], signal.SIGKILL)
    lost = wait_exited(host, "sleep", ssh_tools)
    assert (lost.state, lost.exit_code) == ("lost", None)
    assert "killed together with its keeper" in lost.why


def test_a_command_whose_keeper_alone_was_killed_still_runs_and_is_stopped(host, ssh_tools):
    status = host.start(Job("sleep", SLEEP))
    os.kill(status.identity["pid"], signal.SIGKILL)
    ssh_tools.wait_for(lambda: gone(status.identity["pid"]))
    left = host.status("sleep")
    assert left.state == "running"
    assert len(left.members) == 1
    assert host.start(Job("sleep", SLEEP)).attached
    host.stop("sleep")
    assert gone(left.members[0])


def test_after_a_reboot_the_job_is_lost_and_a_new_holder_of_its_pid_is_left_alone(host, tmp_path):
    status = host.start(Job("sleep", SLEEP))
    file = tmp_path / "far" / "jobs" / "sleep" / "job.state.json"
    now = json.loads(file.read_text())
    file.write_text(json.dumps({**now, "identity": {**now["identity"], "boot_id": "the boot before"}}))
    try:
        after = host.status("sleep")
        assert (after.state, after.members) == ("lost", ())
        assert "rebooted" in after.why
        host.stop("sleep")
        assert not gone(status.identity["pid"])
    finally:
        file.write_text(json.dumps(now))


def test_a_command_that_cannot_be_run_is_refused_and_may_be_tried_again(host, tmp_path):
    program = tmp_path / "program"
    job = Job("absent", (str(program),))
    with pytest.raises(SlipstreamError, match="the command of job absent cannot be run"):
        host.start(job)
    assert host.status("absent") is None
    program.write_text("#!/bin/sh\nexit 4\n")
    program.chmod(0o755)
    assert not host.start(job).attached


def test_names_of_jobs_are_no_paths():
    with pytest.raises(ValueError, match="small letters"):
        Job("../x", ("true",))
    with pytest.raises(ValueError, match="name of a variable"):
        Job("x", ("true",), env={"A=B": "c"})
    with pytest.raises(ValueError, match="NUL"):
        Job("x", ("true", "a\0b"))


# ---- locks of the host ----------------------------------------------------------------------------------------------


@pytest.fixture
def locked(tmp_path):
    def job(name, owner, **options):
        return Job(name, SLEEP, owner=owner, locks=("gpus",), lock_folder=str(tmp_path / "locks"), **options)

    return job


def test_a_lock_is_shared_by_its_owner_and_refused_to_others(host, locked):
    holder = host.start(locked("server", "ours"))
    assert host.start(locked("bench", "ours")).state == "running"
    with pytest.raises(SlipstreamError, match="gpus of this host is held by job") as error:
        host.start(locked("other", "theirs"))
    assert error.value.fault == "F15"
    assert f"process {holder.identity['pid']}" in str(error.value)
    assert "of ours" in str(error.value)
    assert host.status("other") is None
    host.stop("server")
    with pytest.raises(SlipstreamError, match="job bench of ours"):
        host.start(locked("other", "theirs"))
    host.stop("bench")
    assert host.start(locked("other", "theirs")).state == "running"


def test_a_killed_holder_holds_nothing(host, locked, ssh_tools):
    holder = host.start(locked("server", "ours"))
    os.killpg(holder.identity["pgid"], signal.SIGKILL)
    ssh_tools.wait_for(lambda: host.status("server").state == "lost")
    assert host.start(locked("other", "theirs")).state == "running"


def test_a_lock_is_held_while_a_child_of_the_job_lives(host, locked, ssh_tools, tmp_path):
    """The command has ended and its keeper too; what it left behind still uses the GPUs."""
    script = f"{sys.executable} -c 'import time; time.sleep(600)' & exit 0"
    host.start(Job("left", ("sh", "-c", script), owner="ours", locks=("gpus",), lock_folder=str(tmp_path / "locks")))
    ssh_tools.wait_for(lambda: host.status("left").state == "exited")
    assert len(ssh_tools.wait_for(lambda: len(m := host.status("left").members) == 1 and m)) == 1
    with pytest.raises(SlipstreamError, match="job left of ours"):
        host.start(locked("other", "theirs"))
    host.stop("left")
    assert host.start(locked("other", "theirs")).state == "running"


def test_a_lock_from_before_a_reboot_holds_nothing(host, locked, tmp_path):
    host.start(locked("server", "ours"))
    for file in (tmp_path / "locks" / "gpus").iterdir():
        holder = json.loads(file.read_text())
        file.write_text(json.dumps({**holder, "boot_id": "the boot before"}))
    assert host.start(locked("other", "theirs")).state == "running"


def test_two_owners_at_once_get_one_lock(host, locked):
    found, refused = [], []

    def start(name):
        try:
            found.append(host.start(locked(name, name)))
        except SlipstreamError as error:
            refused.append(error)

    threads = [threading.Thread(target=start, args=(f"owner{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(refused)) == (1, 2)
    assert {error.fault for error in refused} == {"F15"}


def test_a_lock_folder_that_is_a_link_is_refused(host, tmp_path, locked):
    (tmp_path / "elsewhere").mkdir()
    Path(tmp_path / "locks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SlipstreamError, match="is no directory"):
        host.start(locked("server", "ours"))
    assert list((tmp_path / "elsewhere").iterdir()) == []

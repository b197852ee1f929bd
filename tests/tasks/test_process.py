"""Detached processes: identity, stopping a whole group, and never the wrong one."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import process
from slipstream.tasks.process import (
    STATE_SUFFIX,
    ProcessIdentity,
    group_members,
    is_alive,
    our_processes,
    read_record,
    start_detached,
    stop_group,
)

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
# A parent with a child that ignores SIGTERM; the parent prints the child's pid.
STUBBORN = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    started = []

    def run(command, **options):
        name = f"p{len(started)}"
        detached = start_detached(
            command, log=tmp_path / f"{name}.log", state_file=tmp_path / f"{name}.json", **options
        )
        started.append(detached)
        return detached

    yield run
    for detached in started:
        stop_group(detached.identity, drain_seconds=0)


def gone(pid):
    return not Path(f"/proc/{pid}").exists() or ProcessIdentity.of(pid) is None


def test_a_started_process_leads_its_own_session_and_is_recorded(start, tmp_path):
    detached = start([*SLEEP], notes={"port": 1})
    identity = detached.identity
    assert os.getsid(identity.pid) == os.getpgid(identity.pid) == identity.pid == identity.pgid
    assert identity.pid not in (os.getsid(0), os.getpgid(0))
    assert is_alive(identity)
    assert read_record(detached.state_file) == detached.record
    assert detached.record.command == tuple(SLEEP)
    assert detached.record.notes == {"port": 1}
    assert os.readlink(f"/proc/{identity.pid}/cwd") == "/"


def test_arguments_and_variables_arrive_unquoted_and_output_goes_to_the_log(start):
    words = ["a b", "$(id)", '"', "two\nlines", "--", "-x"]
    code = "import os, sys, json; print(json.dumps([sys.argv[1:], os.environ['SOME_VALUE'], sys.flags.safe_path]))"
    detached = start([sys.executable, "-P", "-c", code, *words], env={"SOME_VALUE": "x y$(id)"})
    wait_for(lambda: detached.exit_code() is not None)
    assert json.loads(Path(detached.record.log).read_text()) == [words, "x y$(id)", True]


def test_stopping_ends_the_whole_group_also_one_that_ignores_sigterm(start):
    detached = start([sys.executable, "-c", STUBBORN])
    log = Path(detached.record.log)
    wait_for(lambda: log.read_text().strip())
    child = int(log.read_text())
    counts = []
    report = stop_group(detached.identity, drain_seconds=0.5, waiting=counts.append)
    assert report.ended == (detached.identity.pid,)
    assert report.killed == (child,)
    assert counts[0] == 2
    assert gone(child)
    assert group_members(detached.identity) == []
    assert detached.exit_code() == -signal.SIGTERM


def test_children_are_found_after_their_parent_was_killed(start):
    detached = start([sys.executable, "-c", STUBBORN])
    log = Path(detached.record.log)
    wait_for(lambda: log.read_text().strip())
    child = int(log.read_text())
    os.kill(detached.identity.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(detached.identity))
    assert [member.pid for member in group_members(detached.identity)] == [child]
    assert stop_group(detached.identity, drain_seconds=0.2).killed == (child,)
    assert gone(child)


def test_a_member_that_left_the_group_but_not_the_session_is_found(start):
    code = "import os, time; p = os.fork(); os.setpgid(0, 0) if p == 0 else print(p, flush=True); time.sleep(600)"
    detached = start([sys.executable, "-c", code])
    log = Path(detached.record.log)
    wait_for(lambda: log.read_text().strip())
    child = int(log.read_text())
    wait_for(lambda: os.getpgid(child) == child)
    stop_group(detached.identity, drain_seconds=5)
    assert gone(child)


def test_a_descendant_with_a_session_of_its_own_is_ours(tmp_path):
    """As torchrun starts its ranks; they end with it, so no group has to hold them."""
    code = "import os, time; p = os.fork(); os.setsid() if p == 0 else print(p, flush=True); time.sleep(600)"
    state, log = tmp_path / f"x{STATE_SUFFIX}", tmp_path / "x.log"
    detached = start_detached([sys.executable, "-c", code], log=log, state_file=state)
    wait_for(lambda: log.read_text().strip())
    child = int(log.read_text())
    wait_for(lambda: os.getsid(child) == child)
    assert our_processes(tmp_path) == {detached.identity.pid, child}
    os.kill(child, signal.SIGKILL)
    stop_group(detached.identity, drain_seconds=0)
    assert our_processes(tmp_path) == set()


@pytest.mark.parametrize("change", [{"start_time": 1}, {"boot_id": "another boot"}], ids=["pid reused", "rebooted"])
def test_a_later_holder_of_the_pid_is_left_alone(start, change):
    detached = start(SLEEP)
    recorded_long_ago = dataclasses.replace(detached.identity, **change)
    assert not is_alive(recorded_long_ago)
    report = stop_group(recorded_long_ago, drain_seconds=0)
    assert report.ended == report.killed == ()
    assert is_alive(detached.identity)


def test_a_zombie_is_not_alive():
    child = subprocess.Popen(SLEEP, start_new_session=True)
    identity = ProcessIdentity.of(child.pid)
    assert identity is not None
    child.kill()
    wait_for(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert not is_alive(identity)
    assert group_members(identity) == []
    child.wait()


def test_a_second_start_over_a_living_process_is_refused(start, tmp_path):
    detached = start(SLEEP)
    with pytest.raises(SlipstreamError, match=f"names process {detached.identity.pid}, which still runs") as error:
        start_detached(SLEEP, log=tmp_path / "x.log", state_file=detached.state_file)
    assert error.value.fault == "F15"
    assert is_alive(detached.identity)


def test_a_program_that_does_not_exist_says_so(start):
    detached = start(["/no/such/program"])
    wait_for(lambda: detached.exit_code() is not None)
    assert detached.exit_code() == 127
    assert "cannot run /no/such/program" in process.tail(Path(detached.record.log))


def test_a_broken_state_file_is_named(tmp_path):
    file = tmp_path / "server.json"
    file.write_text('{"identity": {"pid": 1}}')
    with pytest.raises(SlipstreamError, match=r"server\.json is not the state file of a process"):
        read_record(file)


def test_tail_gives_the_last_lines(tmp_path):
    log = tmp_path / "log"
    assert process.tail(log) == ""
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    assert process.tail(log, lines=2) == "line 98\nline 99"

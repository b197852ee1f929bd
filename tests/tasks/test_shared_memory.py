"""Shared memory that a killed server leaves: ours goes once nobody holds it, everybody else's stays."""

import mmap
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from slipstream.configs.schema import Deployment
from slipstream.tasks import cleanup
from slipstream.tasks.process import group_members, start_detached, stop_group
from slipstream.tasks.shared_memory import FOLDER, read_segments

# A server whose child holds one segment by a mapping and another by a descriptor. Arguments: their names.
HOLD = """
import mmap, os, sys, time
if os.fork() == 0:
    mapped, opened = ("/dev/shm/" + name for name in sys.argv[1:])
    file = open(mapped, "wb+"); file.truncate(8192); memory = mmap.mmap(file.fileno(), 8192); file.close()
    other = open(opened, "wb+"); other.truncate(4096)
    print("holding", flush=True)
time.sleep(600)
"""


@pytest.fixture
def names():
    """Two names of segments; whatever is left of them is removed."""
    made = [f"nccl-test{os.getpid()}{letter}" for letter in "abc"]
    yield made
    for name in made:
        (Path(FOLDER) / name).unlink(missing_ok=True)


@pytest.fixture
def server(tmp_path, names):
    """A server that holds the first two segments; its state file is in the workdir."""
    process = start_detached(
        [sys.executable, "-c", HOLD, *names[:2]],
        log=tmp_path / "server.log",
        state_file=tmp_path / "server.state.json",
        notes={"host": "127.0.0.1", "port": 0, cleanup.SEGMENTS_BEFORE: cleanup.segments_before()},
    )
    deadline = time.monotonic() + 30
    while "holding" not in (tmp_path / "server.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield process
    stop_group(process.identity, drain_seconds=0)


@pytest.fixture
def deployment():
    return Deployment(server={"shutdown_timeout_seconds": 5.0, "device": "cpu"})


def there(names):
    return [segment.name for segment in read_segments() if segment.name in names]


def test_what_a_stopped_server_leaves_is_removed(server, names, deployment, tmp_path):
    (stopped,) = cleanup.clean(tmp_path, deployment)
    assert there(names) == []
    assert [words.split()[0] for words in stopped.segments] == names[:2]
    assert "removed the shared memory that it left" in str(stopped)


def test_of_a_server_that_was_killed_before_only_a_note_can_tell(server, names, deployment, tmp_path):
    cleanup.note_segments(server.state_file)
    (Path(FOLDER) / names[2]).write_bytes(b"of somebody who is gone")
    for member in group_members(server.identity):
        os.kill(member.pid, signal.SIGKILL)
    server.exit_code()
    said = []
    (stopped,) = cleanup.clean(tmp_path, deployment, say=said.append)
    assert (stopped.ended, stopped.killed) == ((), ())
    assert there(names) == [names[2]]  # nobody holds it, and nothing says that it was ours
    assert any(names[2] in line and "left alone" in line for line in said)
    assert list(tmp_path.glob("*.json*")) == []


def test_without_a_note_of_the_launch_nothing_is_touched(server, names, deployment, tmp_path):
    record = server.state_file.read_text()
    server.state_file.write_text(record.replace(cleanup.SEGMENTS_BEFORE, "other"))
    (stopped,) = cleanup.clean(tmp_path, deployment)
    assert stopped.segments == ()
    assert there(names) == names[:2]


def test_what_somebody_else_holds_as_well_stays(server, names, deployment, tmp_path):
    with (Path(FOLDER) / names[0]).open("rb+") as file:
        memory = mmap.mmap(file.fileno(), 8192)
    cleanup.clean(tmp_path, deployment)
    assert there(names) == [names[0]]
    memory.close()


def test_what_was_there_before_the_launch_is_not_ours(names, deployment, tmp_path):
    """Also where a server of ours uses it."""
    (Path(FOLDER) / names[0]).write_bytes(b"before")
    code = "import sys, time; file = open(sys.argv[1]); print(1, flush=True); time.sleep(600)"
    process = start_detached(
        [sys.executable, "-c", code, f"{FOLDER}/{names[0]}"],
        log=tmp_path / "server.log",
        state_file=tmp_path / "server.state.json",
        notes={"host": "127.0.0.1", "port": 0, cleanup.SEGMENTS_BEFORE: cleanup.segments_before()},
    )
    while not (tmp_path / "server.log").read_text():
        assert process.exit_code() is None
    cleanup.clean(tmp_path, deployment)
    assert there(names) == [names[0]]


def test_a_later_segment_of_the_same_name_is_another(server, names, deployment, tmp_path):
    cleanup.note_segments(server.state_file)
    stop_group(server.identity, drain_seconds=0)
    path = Path(FOLDER) / names[0]
    other = path.with_name(names[2])
    other.write_bytes(b"a successor's")
    other.replace(path)
    cleanup.clean(tmp_path, deployment)
    assert path.read_bytes() == b"a successor's"
    assert there(names) == [names[0]]

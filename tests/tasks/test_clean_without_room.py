"""`slipstream clean` on disks that take nothing any more, for real: a tmpfs that is full, one that is read-only."""

import subprocess
import sys

import pytest

from slipstream.configs.schema import Deployment
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import cleanup
from slipstream.tasks.lock import WorkdirInUse, workdir_lock
from slipstream.tasks.process import group_members, start_detached, stop_group
from slipstream.tasks.stage import Stage, run_stage

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def left(disk, tmp_path):
    """(workdir on the disk, what an earlier run left there: two servers and Prefect's own)."""
    workdir = disk / "work"
    found = [
        start_detached(SLEEP, log=tmp_path / f"{name}.log", state_file=folder / f"{name}.state.json")
        for folder, name in ((workdir, "server"), (workdir, "baseline"), (workdir / "prefect", "server"))
    ]
    yield workdir, found
    for process in found:
        stop_group(process.identity, drain_seconds=0)


def fill(disk):
    """To the last byte."""
    with (disk / "somebody-elses").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 65_536)
        except OSError:
            pass
        try:
            while True:
                file.write(b"x")
        except OSError:
            pass


def clean(workdir, tmp_path):
    config = tmp_path / "d.yaml"
    config.write_text(f"host: {{workdir: {workdir}}}\nserver: {{shutdown_timeout_seconds: 5.0}}\n")
    words = [sys.executable, "-P", "-m", "slipstream.flows.cli", "clean", str(config)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_on_a_full_disk_everything_is_stopped(disk, left, tmp_path):
    workdir, found = left
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        (workdir / "x").write_text("x" * 10_000)
    with pytest.raises(SlipstreamError, match="is full") as error:  # every other stage ends before it begins
        run_stage(Stage("other", 1, (), (), lambda context: {}), Deployment(), workdir)
    assert error.value.runbook == "disk-full.md"
    done = clean(workdir, tmp_path)
    assert [group_members(one.identity) for one in found] == [[], [], []]
    assert "stopped server (pid" in done.stdout
    assert list(workdir.rglob("*.state.json*")) == []
    # The records that went made room for the manifest.
    assert (done.returncode, done.stderr) == (0, "")


def test_where_its_own_manifest_has_no_room_it_says_so_in_the_end(disk, left, tmp_path, monkeypatch):
    workdir, found = left
    fill(disk)
    real = cleanup.stop_each

    def fill_again(*arguments, **options):
        stopped = real(*arguments, **options)
        fill(disk)
        return stopped

    monkeypatch.setattr(cleanup, "stop_each", fill_again)
    with pytest.raises(SlipstreamError, match="stage cleanup did its work, and its manifest could not") as error:
        run_stage(cleanup.STAGE, Deployment(), workdir)
    assert (error.value.runbook, "nothing else is left" in error.value.do) == ("disk-full.md", True)
    assert [group_members(one.identity) for one in found[:2]] == [[], []]


def test_on_a_disk_that_has_become_read_only_all_is_stopped_and_what_stays_is_named(disk, left, tmp_path):
    workdir, found = left
    (workdir / "last-good").mkdir()
    (workdir / "last-good" / "record-1.json").write_text("{}")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    done = clean(workdir, tmp_path)
    assert [group_members(one.identity) for one in found] == [[], [], []]
    assert done.returncode == 1
    for words in ("record-1.json", "baseline.state.json", "server.state.json", "a restore would bring", "prefect"):
        assert words in done.stderr, done.stderr
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert clean(workdir, tmp_path).returncode == 0
    assert list(workdir.rglob("*.state.json")) == list(workdir.rglob("record*")) == []


def test_two_who_end_it_at_once_wait_for_each_other(disk, left):
    """Without room for a lock's file the folder itself is held."""
    workdir, _ = left
    with workdir_lock(workdir, needs_room=False):
        assert (workdir / ".lock").is_file()  # with room it is the same as ever
    fill(disk)
    take = "from pathlib import Path; import sys; from slipstream.tasks.lock import workdir_lock\n"
    take += "with workdir_lock(Path(sys.argv[1]), needs_room=False): print('held')"
    with workdir_lock(workdir, needs_room=False):
        other = subprocess.Popen([sys.executable, "-c", take, str(workdir)], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=3)
    assert other.communicate(timeout=60)[0] == "held\n"
    (disk / "somebody-elses").unlink()
    with workdir_lock(workdir):
        fill(disk)
        done = subprocess.run([sys.executable, "-c", take, str(workdir)], capture_output=True, text=True)
    assert WorkdirInUse.__name__ in done.stderr  # who holds it by its file is named, on a full disk as well

"""Whoever dies while a server is replaced, and whenever: what shall serve is known, and restore makes it so.

The launches are the real stage in a process of its own that is ended by SIGKILL; the server is a stand-in that starts
in no time (stub_server.py). With the real one: test_restore.py.
"""

import errno
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import cleanup, last_good, launch, restore, server
from slipstream.tasks.last_good import read_last_good
from slipstream.tasks.manifest import read_json, write_json
from slipstream.tasks.process import group_members, read_record, start_detached
from slipstream.tasks.stage import Stage, run_stage

STUB = Path(__file__).with_name("stub_server.py")


@pytest.fixture
def stub(launchable, launch_workdir, monkeypatch):
    """(deployment, workdir) in which a draft `old` is served."""

    def command(deployment, plan, ready_file):
        return [sys.executable, str(STUB), "--draft", str(plan.draft.absolute()), "--state-file", str(ready_file)]

    monkeypatch.setattr(server, "server_command", command)
    monkeypatch.setattr(server, "check_settings", lambda *_: None)
    monkeypatch.setattr(launch, "smoke_test", lambda *_: {})
    make_draft(launchable, launch_workdir, "old")
    run_stage(launch.STAGE, launchable, launch_workdir)
    assert what_serves(launch_workdir) == "old"
    return launchable, launch_workdir


def make_draft(deployment, workdir, mark):
    """Convert makes another draft in the place of the one before; tune chooses for it."""

    def convert(context):
        shutil.copytree(workdir / "convert" / "draft", context.out / "draft")
        (context.out / "draft" / "mark").write_text(mark)
        return {}

    def tune(context):
        shutil.copy(workdir / "tune" / "choice.json", context.out)
        return {}

    number = {"old": 2, "new": 3}[mark]
    run_stage(Stage("convert", number, ("resolve",), (), convert), deployment, workdir)
    run_stage(Stage("tune", number, ("convert",), (), tune), deployment, workdir)


def what_serves(workdir):
    """The draft of the one server that runs and answers; None where there is none."""
    record = read_record(workdir / "server.state.json")
    if record is None or not group_members(record.identity) or not server.answers(workdir):
        return None
    return server.read_settings(read_json(workdir / "server.ready.json")["url"])["draft"]["fingerprint"]


def killed(stage, deployment, workdir, patch):
    """Runs a stage in a process of its own, which ends itself by SIGKILL where `patch` tells it to."""
    child = os.fork()
    if child == 0:
        try:
            patch()
            run_stage(stage, deployment, workdir)
        finally:
            os._exit(7)  # it came to its end: the place to die was not on the way
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"not killed: {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def at(module, name, *, after=False):
    """A patch: dies when the function of that name is called, or when it has returned."""

    def patch():
        real = getattr(module, name)

        def dying(*arguments, **options):
            if after:
                real(*arguments, **options)
            die()

        setattr(module, name, dying)

    return patch


def term_then_die():
    """Dies while the old server drains."""

    def dying(identity, **_):
        os.killpg(identity.pgid, signal.SIGTERM)
        die()

    cleanup.stop_group = dying


STEPS = {
    "before anything is stopped": (at(launch, "clean"), "kept"),
    "while the old one drains": (term_then_die, "restored"),
    "before its record is forgotten": (at(cleanup, "forget"), "restored"),
    "when room is made": (at(launch, "clean", after=True), "restored"),
    "when the new one is started": (at(server, "start_detached", after=True), "restored"),
    "while the new one starts": (at(server, "_wait_until_healthy"), "restored"),
    "in the smoke test": (at(launch, "smoke_test"), "restored"),
    "before the new one is noted": (at(last_good, "write_json"), "restored"),
    "when the new one is noted": (at(launch, "keep_last_good", after=True), "new"),
}


# Those that lie between two others of the same outcome are run by hand.
BETWEEN = ("before its record is forgotten", "when room is made", "while the new one starts", "in the smoke test")


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[pytest.mark.soak] if step in BETWEEN else []) for step in STEPS]
)
def test_a_launch_that_is_killed_is_taken_back_unless_its_server_was_proven(stub, step):
    deployment, workdir = stub
    patch, expected = STEPS[step]
    before = read_last_good(workdir).identity
    make_draft(deployment, workdir, "new")
    killed(launch.STAGE, deployment, workdir, patch)
    figures = run_stage(restore.STAGE, deployment, workdir).figures
    assert figures["server"] == ("restored" if expected == "restored" else "kept")
    assert what_serves(workdir) == ("new" if expected == "new" else "old")
    assert (read_last_good(workdir).identity == before) == (expected == "kept")
    kept = {path.name for path in (workdir / "last-good").glob("draft*")}
    assert len(kept) == (2 if expected == "new" else 1)  # the draft of the good server before it stays, too
    assert read_last_good(workdir).draft in kept
    assert run_stage(restore.STAGE, deployment, workdir).figures["server"] == "kept"


@pytest.mark.parametrize("step", [at(restore, "clean", after=True), at(server, "start_detached", after=True)])
def test_a_restore_that_is_killed_can_be_repeated(stub, step):
    deployment, workdir = stub
    make_draft(deployment, workdir, "new")
    killed(launch.STAGE, deployment, workdir, at(launch, "smoke_test"))
    killed(restore.STAGE, deployment, workdir, step)
    assert run_stage(restore.STAGE, deployment, workdir).figures["server"] == "restored"
    assert what_serves(workdir) == "old"


def test_a_clean_end_is_final_even_where_it_was_killed(stub):
    deployment, workdir = stub
    killed(cleanup.STAGE, deployment, workdir, term_then_die)
    assert run_stage(restore.STAGE, deployment, workdir).figures == {"server": "none"}
    assert what_serves(workdir) is None
    run_stage(launch.STAGE, deployment, workdir)  # finds nothing in its way
    run_stage(cleanup.STAGE, deployment, workdir)
    assert run_stage(restore.STAGE, deployment, workdir).figures == {"server": "none"}


def test_a_server_comes_back_where_making_room_for_the_next_one_fails(stub, monkeypatch):
    """Memory of a GPU that stays full is found when the server is stopped already."""
    deployment, workdir = stub

    def stays(_):
        raise SlipstreamError("memory of GPUs [0] is not back", expected="", do="", fault="F15")

    with monkeypatch.context() as patch:
        patch.setattr(cleanup, "_wait_for_gpus", stays)
        with pytest.raises(SlipstreamError, match="is not back"):
            run_stage(launch.STAGE, deployment, workdir)
    assert what_serves(workdir) is None
    assert run_stage(restore.STAGE, deployment, workdir).figures["server"] == "restored"
    assert what_serves(workdir) == "old"


def test_a_record_of_an_older_release_is_read_and_a_damaged_one_keeps_nobody_from_the_end(stub):
    deployment, workdir = stub
    folder = workdir / "last-good"
    value = read_json(folder / "record-1.json")
    (folder / value.pop("draft")).rename(folder / "draft")
    (folder / "record-1.json").unlink()
    write_json(folder / "record.json", value | {"wanted": False})
    assert read_last_good(workdir) is None  # one that was ended cleanly
    write_json(folder / "record.json", value)
    cleanup.clean(workdir, deployment)
    assert run_stage(restore.STAGE, deployment, workdir).figures["server"] == "restored"
    assert what_serves(workdir) == "old"
    whole = read_json(folder / "record-1.json")
    (folder / "record.json").unlink()  # that before it: below
    for part in (
        {"settings": {}},
        {"command": ["python"]},
        {"port": "any"},
        {"of a newer release": 1},
        {"identity": 1},
    ):
        write_json(folder / "record-1.json", whole | part)
        with pytest.raises(SlipstreamError, match="names no server") as error:
            run_stage(restore.STAGE, deployment, workdir)
        assert error.value.runbook == "roll-back.md"
        assert "then none is brought back" in error.value.do
        assert what_serves(workdir) == "old"  # it is told before anything is stopped
    run_stage(cleanup.STAGE, deployment, workdir)
    assert what_serves(workdir) is None
    assert run_stage(restore.STAGE, deployment, workdir).figures == {"server": "none"}


def test_a_server_that_hangs_or_lost_its_front_is_started_again(stub):
    deployment, workdir = stub
    os.kill(read_last_good(workdir).identity.pid, signal.SIGKILL)
    assert run_stage(restore.STAGE, deployment, workdir).figures["server"] == "restored"
    assert what_serves(workdir) == "old"


def test_a_launch_that_fails_beside_a_damaged_record_says_why_it_failed(stub, monkeypatch, pipeline):
    deployment, workdir = stub
    listener = pipeline.Listener()
    (workdir / "last-good" / "record-1.json").write_text("{")

    def differs(*_):
        raise SlipstreamError("A_1 differs")

    monkeypatch.setattr(launch, "smoke_test", differs)
    with pytest.raises(SlipstreamError, match="A_1 differs"):
        run_stage(launch.STAGE, deployment, workdir, listener)
    assert any("record-1.json is not readable" in text for text in listener.warned)


def test_a_damaged_record_is_named_with_the_good_server_before_it_which_nobody_takes_by_himself(stub):
    deployment, workdir = stub
    folder = workdir / "last-good"
    make_draft(deployment, workdir, "new")
    run_stage(launch.STAGE, deployment, workdir)
    assert what_serves(workdir) == "new"
    (folder / "record-2.json").write_text("{")
    with pytest.raises(SlipstreamError, match=r"record-2\.json is not readable") as error:
        run_stage(restore.STAGE, deployment, workdir)
    assert what_serves(workdir) == "new"
    assert "record-1.json holds whole" in error.value.do
    assert "draft draft-1" in error.value.do
    (folder / "record-2.json").unlink()  # as it says
    assert run_stage(restore.STAGE, deployment, workdir).figures["server"] == "restored"
    assert what_serves(workdir) == "old"
    # What is not whole is not offered: neither without its draft, nor damaged itself.
    for spoil in (lambda: shutil.rmtree(folder / "draft-1"), lambda: (folder / "record-2.json").write_text("[]")):
        spoil()
        (folder / "record-9.json").write_text("{}")
        with pytest.raises(SlipstreamError, match=r"record-9\.json names no server") as error:
            read_last_good(workdir)
        assert "record-2" not in error.value.do
    # A good launch leaves itself alone there.
    run_stage(launch.STAGE, deployment, workdir)
    assert [path.name for path in folder.glob("record*")] == ["record-10.json"]
    assert [path.name for path in folder.glob("draft*")] == [read_last_good(workdir).draft]


def test_what_is_left_beside_a_good_server_is_stopped_past_a_damaged_record(stub):
    deployment, workdir = stub
    (workdir / "a.state.json").write_text("{")
    half = start_detached(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        log=workdir / "half.log",
        state_file=workdir / "half.state.json",
    )
    with pytest.raises(SlipstreamError, match=r"a\.state\.json is not readable"):
        run_stage(restore.STAGE, deployment, workdir)
    assert not group_members(half.identity)
    assert what_serves(workdir) == "old"
    with pytest.raises(SlipstreamError, match=r"a\.state\.json is not readable"):
        run_stage(launch.STAGE, deployment, workdir)  # before room is made
    assert what_serves(workdir) == "old"
    (workdir / "a.state.json").unlink()


def test_a_launch_that_cannot_be_noted_leaves_no_server(stub, monkeypatch):
    deployment, workdir = stub
    make_draft(deployment, workdir, "new")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(last_good, "write_json", full)
        with pytest.raises(SlipstreamError, match=r"disk .* is full") as error:
            run_stage(launch.STAGE, deployment, workdir)
    assert error.value.runbook == "disk-full.md"
    assert read_record(workdir / "server.state.json") is None
    assert run_stage(restore.STAGE, deployment, workdir).figures["server"] == "restored"
    assert what_serves(workdir) == "old"


@pytest.mark.parametrize("damaged", ["{", "{}"])
def test_a_damaged_ready_file_keeps_nobody_from_stopping_its_server(stub, damaged):
    deployment, workdir = stub
    before = read_record(workdir / "server.state.json").identity
    (workdir / "server.ready.json").write_text(damaged)
    assert run_stage(restore.STAGE, deployment, workdir).figures["server"] == "restored"
    assert not group_members(before)
    assert what_serves(workdir) == "old"
    (workdir / "server.ready.json").write_text(damaged)
    run_stage(cleanup.STAGE, deployment, workdir)
    assert read_record(workdir / "server.state.json") is None

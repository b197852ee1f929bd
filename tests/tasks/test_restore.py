"""Restore: the last good server comes back as it was, unless a clean end had stopped it; killed: test_way_back.py."""

import shutil
import sys

import pytest

from slipstream.engine.acceptance import AcceptanceCounts
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import cleanup, launch, restore
from slipstream.tasks.counters import read_settings
from slipstream.tasks.facts import PARITY
from slipstream.tasks.last_good import read_last_good, what_makes_it
from slipstream.tasks.manifest import write_json
from slipstream.tasks.process import group_members, is_alive, read_record, start_detached
from slipstream.tasks.stage import Stage, run_stage


def test_a_failed_launch_is_taken_back_with_the_draft_that_was_served(
    launchable, launch_workdir, tiny_models, pipeline
):
    workdir, listener = launch_workdir, pipeline.Listener()
    assert run_stage(restore.STAGE, launchable, workdir).figures == {"server": "none"}
    first = run_stage(launch.STAGE, launchable, workdir).figures
    before = read_settings(first["base_url"])

    # A good server is left alone; what else was started, such as a half-launched one, is stopped.
    half = start_detached(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        log=workdir / "half.log",
        state_file=workdir / "half.state.json",
    )
    assert run_stage(restore.STAGE, launchable, workdir).figures == {"server": "kept", "pid": first["pid"]}
    assert not group_members(half.identity)
    assert is_alive(read_record(workdir / "server.state.json").identity)

    # The draft of convert is another one by now, and its launch, which makes room, fails in the smoke test.
    def convert(context):
        shutil.copytree(tiny_models.draft, context.out / "draft")
        (context.out / "draft" / "new.json").write_text("{}")
        return {}

    def parity(context):
        counts = AcceptanceCounts(2, [10, 10, 500]).to_dict()
        write_json(context.out / PARITY, {"acceptance": {"benchmark": {"served": counts}}})
        return {}

    run_stage(Stage("convert", 2, ("resolve",), (), convert), launchable, workdir)
    choice = {"num_steps": 2, "candidate": 2}
    tune = lambda context: write_json(context.out / "choice.json", choice) or {}  # noqa: E731
    run_stage(Stage("tune", 1, ("convert",), (), tune), launchable, workdir)
    run_stage(Stage("parity", 1, ("resolve", "convert"), (), parity), launchable, workdir)
    with pytest.raises(SlipstreamError, match="A_1 of the server"):
        run_stage(launch.STAGE, launchable, workdir, listener)
    assert any("`slipstream stage restore CONFIG` brings it back" in text for text in listener.warned)
    assert read_record(workdir / "server.state.json") is None

    back = run_stage(restore.STAGE, launchable, workdir).figures
    assert back["server"] == "restored"
    assert back["pid"] != first["pid"]
    now = read_settings(back["base_url"])
    assert what_makes_it(now) == what_makes_it(before)
    assert now["draft"]["directory"].endswith("last-good/draft-1")
    assert read_last_good(workdir).identity.pid == back["pid"]
    assert run_stage(restore.STAGE, launchable, workdir).figures == {"server": "kept", "pid": back["pid"]}

    # A cleanup is an end: none is brought back.
    run_stage(cleanup.STAGE, launchable, workdir)
    assert run_stage(restore.STAGE, launchable, workdir).figures == {"server": "none"}
    assert read_record(workdir / "server.state.json") is None


def test_a_server_that_comes_back_as_another_is_refused(launchable, launch_workdir):
    workdir = launch_workdir
    run_stage(launch.STAGE, launchable, workdir)
    cleanup.clean(workdir, launchable)
    draft = workdir / "last-good" / "draft-1"
    config = draft / "config.json"
    text = config.read_text()
    config.unlink()  # not through the link: convert's own stays as it is
    config.write_text(text + "\n")
    with pytest.raises(SlipstreamError, match="could not be brought back") as error:
        run_stage(restore.STAGE, launchable, workdir)
    assert "draft" in str(error.value)
    assert read_record(workdir / "server.state.json") is None

"""A server leaves, drains and joins; a roll's mark on its host. The server is a stand-in (stub_server.py)."""

import shutil
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from slipstream.configs.schema import Deployment
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import cleanup, drain, replica, restore, server
from slipstream.tasks.last_good import keep_last_good
from slipstream.tasks.manifest import MANIFEST, read_json, read_manifest, write_json
from slipstream.tasks.roll_mark import begin_roll, end_roll, in_roll
from slipstream.tasks.stage import run_stage

STUB = Path(__file__).with_name("stub_server.py")


class World:
    """A workdir in which servers are started that drafts of a mark tell apart."""

    def __init__(self, workdir):
        self.workdir = workdir
        workdir.mkdir()
        self.deployment = Deployment(roll={"leave_seconds": 1, "drain_seconds": 0.4}, host={"workdir": str(workdir)})

    def launch(self, mark, *flags):
        draft = self.workdir / "convert" / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        (draft / "mark").write_text(mark)
        leave = drain.leave_file(self.workdir)
        words = ["--draft", str(draft), "--state-file", str(self.workdir / "server.ready.json"), "--leave-file", leave]
        command = [sys.executable, str(STUB), *map(str, (*words, *flags))]
        made = server.start_command(self.deployment, self.workdir, command, 0, lambda _: None, left=True)
        keep_last_good(self.workdir, draft, made.settings)
        drain.join(self.workdir)
        return made

    def get(self, path):
        url = read_json(self.workdir / "server.ready.json")["url"]
        try:
            with urllib.request.urlopen(f"{url}{path}") as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def run(self, stage):
        return run_stage(stage, self.deployment, self.workdir).figures["server"]


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "work")
    yield made
    cleanup.clean(made.workdir, made.deployment)


def test_a_server_that_is_started_left_is_healthy_for_us_alone_until_it_joins(world):
    world.launch("one")
    assert world.get("/health")[0] == 200
    drain.leave(world.workdir)
    assert world.get("/health")[0] == 503
    assert world.get("/work") == (200, '"one"')
    assert server.answers(world.workdir)


def test_drain_waits_for_what_runs_and_restore_has_it_join(world):
    made = world.launch("one")
    asked = threading.Thread(target=world.get, args=("/work",))
    asked.start()
    assert world.run(drain.STAGE) == "drained"
    assert not drain.read_health(made.url).in_flight
    assert world.get("/health")[0] == 503
    asked.join()
    assert world.run(restore.STAGE) == "kept"
    assert world.get("/health")[0] == 200
    cleanup.clean(world.workdir, world.deployment)
    assert world.run(drain.STAGE) == "none"


def test_a_server_that_does_not_come_to_its_end_joins_again(world):
    made, hold = world.launch("one"), world.workdir / "convert" / "draft" / "hold"
    hold.touch()
    asked = threading.Thread(target=world.get, args=("/work",))
    asked.start()
    with pytest.raises(SlipstreamError, match=r"still answers 1 requests \d s after it left") as error:
        world.run(drain.STAGE)
    assert drain.read_health(made.url).in_flight == 1
    hold.unlink()
    asked.join()
    assert error.value.runbook == "roll-replicas.md"
    assert world.get("/health")[0] == 200


def test_a_server_that_knows_no_leaving_is_named(world):
    world.launch("one", "--leave-file", world.workdir / "another")
    with pytest.raises(SlipstreamError, match="was asked to leave, and its health says ready"):
        world.run(drain.STAGE)
    assert not drain.leave_file(world.workdir).exists()


def test_restore_goes_back_to_what_served_when_the_roll_began_however_often_it_is_begun(world):
    old = world.launch("old")
    begin_roll(world.workdir)
    world.launch("new")
    begin_roll(world.workdir)  # another roll, after one that was killed
    world.launch("newer")
    assert world.run(restore.STAGE) == "restored"
    assert world.get("/work") == (200, '"old"')
    assert world.get("/health")[0] == 200
    assert not in_roll(world.workdir)
    assert old.identity.pid != read_json(world.workdir / "server.state.json")["identity"]["pid"]
    assert world.run(restore.STAGE) == "kept"


def test_a_roll_that_ended_is_not_gone_back_from(world):
    world.launch("old")
    begin_roll(world.workdir)
    world.launch("new")
    end_roll(world.workdir)
    assert world.run(restore.STAGE) == "kept"
    assert world.get("/work") == (200, '"new"')


def test_where_nothing_served_when_the_roll_began_nothing_serves_after_it_is_taken_back(world):
    begin_roll(world.workdir)
    world.launch("new")
    assert world.run(restore.STAGE) == "none"
    assert not server.answers(world.workdir)
    begin_roll(world.workdir)
    world.launch("new")
    run_stage(cleanup.STAGE, world.deployment, world.workdir)  # a clean end ends the roll, too
    assert not in_roll(world.workdir)
    assert world.run(restore.STAGE) == "none"


def test_a_stage_arrives_whole_or_not_at_all(tmp_path):
    incoming = tmp_path / "incoming" / "tune"
    incoming.mkdir(parents=True)
    (incoming / "choice.json").write_text("{}")
    manifest = {
        "fingerprint": "f",
        "identity": "i",
        "config": {"benchmark.prompts": "/far/inputs/1/p", "other": "/farther"},
        "inputs": {"train": "t"},
        "figures": {},
        "files": {"choice.json": {"bytes": 2, "sha256": "0" * 64}},
    }
    write_json(incoming / MANIFEST, manifest)
    with pytest.raises(SlipstreamError, match=r"stage tune did not arrive as it was made: choice.json"):
        replica.take(tmp_path, "tune", "/far", "/here")
    assert not (tmp_path / "tune").exists()
    assert not incoming.exists()  # so that it is sent again
    incoming.mkdir()
    (incoming / "choice.json").write_text("{}")
    manifest["files"]["choice.json"]["sha256"] = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    write_json(incoming / MANIFEST, manifest)
    assert replica.take(tmp_path, "tune", "/far", "/here")
    made = read_manifest(tmp_path / "tune")
    assert made["config"] == {"benchmark.prompts": "/here/inputs/1/p", "other": "/farther"}
    assert made["inputs"] == {}

"""Launch: a server is started, proven to be the planned one, and stopped when it is not."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.engine.acceptance import AcceptanceCounts, JointAcceptance
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.serving.main import engine_options, parse_arguments
from slipstream.tasks import launch, server
from slipstream.tasks.facts import PARITY
from slipstream.tasks.manifest import write_json
from slipstream.tasks.ports import port_is_free
from slipstream.tasks.process import ProcessIdentity, group_members, is_alive, read_record
from slipstream.tasks.reporting import NullReporter
from slipstream.tasks.server import ServerPlan, check_settings, running_server, server_command, start_server
from slipstream.tasks.stage import Stage, StageContext, run_stage

K = 2


class Listener(NullReporter):
    """Remembers what was said."""

    def __init__(self):
        self.said, self.warned, self.phases = [], [], []

    def say(self, stage, text, *, markup):
        self.said.append(text)

    def warn(self, stage, text):
        self.warned.append(text)

    def progress(self, stage, done, total, fields):
        self.phases.append((done, total, fields["phase"]))


@pytest.fixture
def deployment(launchable):
    return launchable


@pytest.fixture
def workdir(launch_workdir):
    return launch_workdir


@pytest.fixture
def plan(tiny_models):
    return ServerPlan(tiny_models.target, tiny_models.draft, K, slots=("slot_1", "slot_2", "slot_4"))


def measured_parity(deployment, workdir, counts):
    """A parity of the present draft that measured `counts`."""

    def parity(context):
        write_json(context.out / PARITY, {"acceptance": {"benchmark": {"served": counts.to_dict()}}})
        return {}

    run_stage(Stage("parity", 1, ("resolve", "convert"), (), parity), deployment, workdir)


def nothing_runs(workdir):
    return not list(workdir.glob("*.state.json")) and not list(workdir.glob("*.ready.json"))


def test_launch_leaves_a_proven_server_and_a_second_launch_replaces_it(deployment, workdir):
    listener = Listener()
    figures = run_stage(launch.STAGE, deployment, workdir, listener).figures
    record = read_record(workdir / "server.state.json")
    assert figures["pid"] == record.identity.pid
    assert is_alive(record.identity)
    assert len(group_members(record.identity)) == 2  # front and engine
    assert figures["settings"] == {
        "num_steps": K,
        "choose_steps": False,
        "verify_width": K + 1,
        "slots": ["slot_1", "slot_2", "slot_4"],
        "dtype": "bfloat16",
        "threads": 1,
    }
    smoke = figures["smoke"]
    assert smoke["prompts"] == 3
    assert smoke["acceptance"]["num_steps"] == K
    assert smoke["acceptance"]["rounds"] > 0
    assert smoke["parity_first_step"] is None
    assert any("parity has not measured A_1" in text for text in listener.warned)
    assert listener.phases[-1][2] == "ready"
    assert [done for done, _, _ in listener.phases] == sorted(done for done, _, _ in listener.phases)
    assert json.loads((workdir / "launch" / "settings.json").read_text())["pid"] == figures["pid"]

    # The same again, now with a parity that saw another draft: the old server goes, and the new one is not left either.
    wrong = AcceptanceCounts(K, [10, 10, 500])
    measured_parity(deployment, workdir, wrong)
    with pytest.raises(SlipstreamError, match=r"A_1 of the server is 0\.\d+ .* parity measured 0\.981"):
        run_stage(launch.STAGE, deployment, workdir, Listener())
    assert not group_members(record.identity)
    assert nothing_runs(workdir)


def test_a_server_that_dies_is_told_with_its_last_words(deployment, workdir, plan, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(plan.draft, draft)
    (draft / "model.safetensors").write_bytes(b"\x10" * 50)
    with pytest.raises(SlipstreamError, match="the server ended while it was") as error:
        start_server(deployment, workdir, dataclasses.replace(plan, draft=draft))
    text = str(error.value)
    assert "exit code 1" in text
    assert f"{draft / 'model.safetensors'} (50 bytes) cannot be read" in text
    assert str(workdir / "server.log") in text
    assert "--num-steps 2" in text  # the command, to be repeated by hand
    assert nothing_runs(workdir)


def test_a_server_that_is_not_ready_in_time_is_stopped(deployment, workdir, plan):
    hasty = deployment.model_copy(
        update={"server": deployment.server.model_copy(update={"startup_timeout_seconds": 0.3})}
    )
    with pytest.raises(SlipstreamError, match="not ready after 0 s"):
        start_server(hasty, workdir, plan)
    assert nothing_runs(workdir)


def test_other_settings_than_planned_stop_the_server(deployment, workdir, plan):
    swapped = dataclasses.replace(plan, slots=("slot_2", "slot_1", "slot_4"))
    with pytest.raises(SlipstreamError, match="order of the slots") as error:
        start_server(deployment, workdir, swapped)
    assert error.value.fault == "F3"
    assert nothing_runs(workdir)


def test_a_server_runs_for_the_time_of_a_with_and_names_its_death(deployment, workdir, plan):
    with running_server(deployment, workdir, plan, name="short") as running:
        answer = running.complete([5, 6, 7], 8)
        assert answer["usage"]["completion_tokens"] <= 8
        assert running.acceptance().num_steps == K
        os.kill(running.settings["engine_pid"], signal.SIGKILL)
        with pytest.raises(SlipstreamError):
            running.complete([5, 6, 7], 8)
        port = int(running.url.rpartition(":")[2])
    assert port_is_free("127.0.0.1", port)
    assert nothing_runs(workdir)
    assert "was ended by SIGKILL" in Path(running.log).read_text()


SETTINGS = {
    "num_steps": K,
    "verify_width": K + 1,
    "slots": ["slot_1", "slot_2", "slot_4"],
    "dtype": "bfloat16",
    "max_context_tokens": 128,
    "max_running_requests": 2,
    "block_size_tokens": 16,
    "prefill_chunk_tokens": 256,
    "tensor_parallel_size": 1,
    "injections": [],
    "choose_steps": False,
    "threads": 1,
}


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("num_steps", 1, "F1"),
        ("verify_width", 16, "F1"),
        ("slots", ["slot_1", "slot_2", "slot_3"], "F2"),
        ("slots", ["slot_1", "slot_4", "slot_2"], "F3"),
        ("dtype", "float32", ""),
        ("max_context_tokens", 64, "F14"),
        ("max_running_requests", 8, ""),
        ("block_size_tokens", 32, ""),
        ("prefill_chunk_tokens", 128, ""),
        ("tensor_parallel_size", 2, ""),
        ("injections", ["F5:slot=2,kind=normed"], ""),
        ("choose_steps", True, ""),
        ("threads", 2, ""),
    ],
)
def test_every_setting_is_read_back(deployment, plan, key, value, fault):
    check_settings(deployment, plan, SETTINGS)
    with pytest.raises(SlipstreamError) as error:
        check_settings(deployment, plan, {**SETTINGS, key: value})
    assert error.value.fault == fault
    assert str(value) in error.value.found
    assert str(SETTINGS[key]) in error.value.expected


def test_the_command_line_carries_every_value(deployment, plan, tmp_path):
    plan = dataclasses.replace(plan, capture_slots=(1, 3), diagnostics=True)
    words = server_command(deployment, plan, tmp_path / "f")
    assert words[1:4] == ["-P", "-m", "slipstream.engine.serving.main"]
    flags = dict(zip(words[4:-1:2], words[5:-1:2], strict=True))
    assert words[-1] == "--diagnostics"
    assert flags == {
        "--target": str(plan.target),
        "--draft": str(plan.draft),
        "--leave-file": str(tmp_path / "f.leave"),
        "--num-steps": "2",
        "--host": "127.0.0.1",
        "--port": "0",
        "--state-file": str(tmp_path / "f"),
        "--max-running-requests": "2",
        "--max-context-tokens": "128",
        "--block-size-tokens": "16",
        "--prefill-chunk-tokens": "256",
        "--device": "auto",
        "--dtype": "bfloat16",
        "--tensor-parallel-size": "1",
        "--shutdown-timeout-seconds": "20.0",
        "--threads": "1",
        "--capture-slots": "1,3",
    }


def test_k_is_chosen_where_there_is_something_to_choose(deployment, plan, tmp_path):
    server = deployment.server.model_copy(update={"choose_steps": True})
    choosing = deployment.model_copy(update={"server": server})
    told = engine_options(parse_arguments(server_command(choosing, plan, tmp_path / "f")[4:]))
    assert (told.choose_steps, told.num_steps) == (True, K)
    check_settings(choosing, plan, {**SETTINGS, "choose_steps": True})
    with pytest.raises(SlipstreamError, match="choose_steps"):
        check_settings(choosing, plan, SETTINGS)
    baseline = dataclasses.replace(plan, draft=None, num_steps=0, slots=())
    assert not engine_options(parse_arguments(server_command(choosing, baseline, tmp_path / "f")[4:])).choose_steps


def test_another_process_at_the_address_is_not_taken_for_ours():
    ours = SimpleNamespace(identity=ProcessIdentity(pid=7, pgid=7, start_time=1, boot_id="b"))
    server.check_identity(ours, {"pid": 7}, "http://host:1")
    with pytest.raises(SlipstreamError, match="process 8 answers at http://host:1") as error:
        server.check_identity(ours, {"pid": 8}, "http://host:1")
    assert error.value.fault == "F15"


def test_the_first_steps_are_compared_with_their_chance():
    launch.check_first_step(JointAcceptance(1, 600, 1000), JointAcceptance(1, 50, 100))
    launch.check_first_step(JointAcceptance(1, 600, 1000), JointAcceptance(1, 1, 5))  # too few to tell
    with pytest.raises(SlipstreamError, match=r"A_1 of the server is 0\.200 \(20/100 rounds\), parity measured 0\.600"):
        launch.check_first_step(JointAcceptance(1, 600, 1000), JointAcceptance(1, 20, 100))
    with pytest.raises(SlipstreamError, match="no counted round"):
        launch.check_first_step(JointAcceptance(1, 600, 1000), JointAcceptance(1, 0, 0))


def test_a_parity_of_another_draft_is_not_compared(deployment, workdir):
    listener = Listener()
    context = StageContext(launch.STAGE, deployment, workdir, workdir / "out", listener)
    assert launch.parity_first_step(context) is None
    measured_parity(deployment, workdir, AcceptanceCounts(K, [4, 3, 3]))
    assert launch.parity_first_step(context) == JointAcceptance(1, 6, 10)
    run_stage(Stage("convert", 2, ("resolve",), (), lambda context: {}), deployment, workdir)  # the draft made anew
    assert launch.parity_first_step(context) is None
    measured_parity(deployment, workdir, AcceptanceCounts(K, [0, 0, 0]))
    assert launch.parity_first_step(context) is None
    assert [text.split(",")[0] for text in listener.warned] == [
        "smoke: parity has not measured A_1",
        "smoke: parity is of another draft",
        "smoke: parity has no counted round",
    ]


def test_rounds_between_two_looks():
    before = AcceptanceCounts(2, [1, 2, 3], ended=1, clamped=2)
    after = AcceptanceCounts(2, [5, 5, 5], ended=4, clamped=4)
    assert after.since(before) == AcceptanceCounts(2, [4, 3, 2], ended=3, clamped=2)

"""Stage train over several processes of one host: as from one, and nothing is left of them however they end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.training.checkpoint import load_checkpoint
from slipstream.engine.training.log import read_metrics
from slipstream.tasks import extract, torchrun, train, train_rank
from slipstream.tasks.lock import LOCK
from slipstream.tasks.stage import run_stage
from slipstream.tasks.torchrun import Launch, Meeting, processes_here
from slipstream.tasks.train_words import EXIT_PEER_LOST, Heard

STAGE = "import json, sys; from pathlib import Path; from slipstream.configs.schema import Deployment; \
from slipstream.tasks import train; from slipstream.tasks.stage import run_stage; \
run_stage(train.STAGE, Deployment(**json.loads(sys.argv[1])), Path(sys.argv[2]))"
LONG = {"epochs": 100, "checkpoint_every_seconds": 0.05}


def extracted(pipeline, chats, tiny, folder, **training):
    made = pipeline.make_pipeline(folder, chats, tiny)
    changed = made.deployment.training.model_copy(update={"batch_tokens": 300, **training})
    deployment = made.deployment.model_copy(update={"training": changed})
    run_stage(extract.STAGE, deployment, made.workdir)
    return deployment, made.workdir


def with_processes(deployment, processes):
    return deployment.model_copy(update={"training": deployment.training.model_copy(update={"processes": processes})})


def ranks_of(workdir):
    """rank -> pid of the living ranks (and "torchrun" -> its pid) that train in `workdir`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            own = [v for v in (folder / "environ").read_text().split("\0") if v.startswith("RANK=")]
        except OSError:
            continue
        if any(f'"{workdir}/extract' in word for word in words):
            is_rank = "slipstream.tasks.train_rank" in words and "slipstream.tasks.torchrun" not in words
            found[int(own[0][5:]) if is_rank else "torchrun"] = int(folder.name)
    return found


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


def test_two_processes_make_the_draft_and_the_figures_of_one(pipeline, chats, tiny, tmp_path):
    deployment, workdir = extracted(pipeline, chats, tiny, tmp_path)
    one = run_stage(train.STAGE, deployment, workdir)
    masters = load_checkpoint(one.dir / "checkpoint")["optimizer"]["masters"]
    evaluation, rows = json.loads((one.dir / "evaluation.json").read_text()), read_metrics(one.dir)
    # how many trained is no part of what was made: nothing is made again for it
    assert run_stage(train.STAGE, with_processes(deployment, 2), workdir).status == "skipped"
    listener = pipeline.Listener()
    two = run_stage(train.STAGE, with_processes(deployment, 2), workdir, listener, force=True)
    assert (one.figures["ranks"], two.figures["ranks"]) == (1, 2)
    ours = load_checkpoint(two.dir / "checkpoint")["optimizer"]["masters"]
    assert all(torch.allclose(ours[name], masters[name], rtol=0, atol=1e-4) for name in masters)
    assert json.loads((two.dir / "evaluation.json").read_text())["answers"] == evaluation["answers"]
    assert two.figures["replayed"] == one.figures["replayed"]
    assert [row["step"] for row in read_metrics(two.dir)] == [row["step"] for row in rows]
    assert two.figures["loss"] == pytest.approx(one.figures["loss"], rel=1e-5)
    assert listener.progressed[-1] == (1.0, 1.0)
    assert any("K = 3: replayed accept length" in text for text in listener.said)
    assert {path.name for path in two.dir.iterdir()} == {path.name for path in one.dir.iterdir()}
    assert ranks_of(workdir) == {}


def test_whatever_dies_the_rest_goes_with_it_and_another_number_goes_on(pipeline, chats, tiny, tmp_path):
    deployment, workdir = extracted(pipeline, chats, tiny, tmp_path, **LONG)
    two = with_processes(deployment, 2)
    checkpoint = workdir / "train.partial" / "checkpoint" / "training.pt"

    # the stage itself, by SIGKILL: the kernel ends torchrun and the ranks
    command = [sys.executable, "-P", "-c", STAGE, json.dumps(two.model_dump(mode="json")), str(workdir)]
    stage = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(checkpoint.is_file)
    assert sorted(map(str, ranks_of(workdir))) == ["0", "1", "torchrun"]
    stage.kill()
    stage.wait()
    wait_for(lambda: not ranks_of(workdir))

    # a rank
    first = load_checkpoint(checkpoint.parent)["step"]
    killed = []

    class Kills(pipeline.Listener):
        def progress(self, stage, done, total, fields):
            if not killed and fields["step"] > first:
                killed.append(ranks_of(workdir)[1])
                os.kill(killed[0], signal.SIGKILL)

    listener = Kills()
    with pytest.raises(SlipstreamError, match="was ended by SIGKILL while it trained") as error:
        run_stage(train.STAGE, two, workdir, listener)
    assert error.value.found.startswith(f"training rank 1 of 2 (pid {killed[0]})")
    assert f"goes on at step {first}, " in " ".join(listener.said)
    assert ranks_of(workdir) == {}
    assert not (workdir / LOCK).exists()

    # one process goes on where two were
    again = load_checkpoint(checkpoint.parent)["step"]
    assert again >= first
    listener = pipeline.Listener()
    done = run_stage(train.STAGE, deployment, workdir, listener)
    assert f"goes on at step {again}, " in " ".join(listener.said)
    steps = [row["step"] for row in read_metrics(done.dir)]
    assert sorted(set(steps)) == list(range(1, done.figures["steps"] + 1))


class Silent:
    """Nobody listens."""


def heard(*lines):
    made = Heard(Silent(), " on user@b:22")
    for line in lines:
        made.line(line if isinstance(line, str) else json.dumps(line))
    return made


def ended(rank, exit_code):
    return {"event": "rank_ended", "rank": rank, "exit_code": exit_code}


START = {"event": "rank", "rank": 1, "size": 4, "pid": 7}
WORDS = {"found": "a store of others", "expected": "ours", "do": "extract", "runbook": "", "fault": "F17"}


@pytest.mark.parametrize(
    ("lines", "words", "culprit"),
    [
        # what rank 0 raises is the stage's own error, what another raises names it
        ([{"event": "rank_failed", "rank": 0, "error": WORDS}], "F17: a store of others\n  expected: ours", True),
        (
            [START, {"event": "rank_failed", "rank": 1, "error": WORDS}, ended(1, 1)],
            "F17: training rank 1 of 4 (pid 7) on user@b:22: a store of others",
            True,
        ),
        ([{"event": "rank_failed", "rank": 2, "error": "KeyError"}], "rank 2 on user@b:22 failed: KeyError", True),
        ([{"event": "rank_failed", "rank": None, "error": WORDS}], "a store of others on user@b:22", True),
        # of several that ended the one that did not end for another's sake
        (
            [
                START,
                ended(0, EXIT_PEER_LOST),
                ended(2, -15),
                ended(1, -11),
            ],
            "training rank 1 of 4 (pid 7) on user@b:22 was ended by SIGSEGV",
            True,
        ),
        ([ended(0, EXIT_PEER_LOST)], "lost the ranks of another host", False),
        (["Traceback", "ValueError: no port"], "on user@b:22; its last lines:\nTraceback\nValueError", False),
    ],
)
def test_an_error_names_the_rank_that_began_it(lines, words, culprit):
    made = heard(*lines)
    assert words in str(made.error())
    assert made.culprit == culprit


def test_auto_is_a_process_a_card_and_more_than_cards_are_refused(monkeypatch):
    assert processes_here("auto", "cpu") == 1
    assert processes_here(3, "cpu") == 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (processes_here("auto", "cuda"), processes_here(2, "cuda")) == (4, 2)
    with pytest.raises(SlipstreamError, match=r"training\.processes is 5, and torch sees 4 cards"):
        processes_here(5, "cuda")


def test_a_launch_survives_json_and_says_where_to_meet():
    meeting = Meeting("gpu1", 29400, 2)
    for where in (None, meeting):
        launch = Launch(2, "cpu", 1, where, "/store", None, None)
        assert Launch.of(json.loads(launch.to_json())) == launch
    words = torchrun.arguments(launch)
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=gpu1", "--master-port=29400", "--nproc-per-node=2"} <= {
        *words
    }


def test_the_first_host_holds_all_and_the_others_their_shards():
    shards = {"a": "s0", "b": "s1", "c": "s2"}

    class Store:
        def conversation_ids(self, split):
            return list(shards)

        def entry(self, name):
            return type("Entry", (), {"shard": shards[name]})

    holders = train_rank.holders_of(Store(), (("s1",), ("s1", "s2")))
    assert holders == [[0], [0, 1, 2], [0, 2]]

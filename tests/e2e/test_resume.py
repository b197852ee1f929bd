"""The real command on a tiny random target, ended in the hardest ways: Ctrl-C and kill -9 during training.

One workdir, in order: interrupted, killed, finished, run again. The other hard end, kill -9 of the server during the
benchmark, is tests/tasks/test_measured_lifecycle.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import yaml

from slipstream.tasks.manifest import MANIFEST, read_json

TOPICS = ["sea", "sky", "sun", "wind", "rain", "stone", "tree", "bird", "fish", "star", "snow", "ice"]
WAIT_SECONDS = 300.0


@dataclass
class House:
    """A deployment of a tiny target, and the processes that were started for it."""

    root: Path
    config: Path

    @property
    def workdir(self) -> Path:
        return self.root / "work"

    def command(self, *words: str) -> "subprocess.Popen[str]":
        """`slipstream WORDS CONFIG` in its own session, as a terminal would start it."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PREFECT_API_URL", None)
        environment.pop("PREFECT_HOME", None)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "slipstream.flows.cli", *words, str(self.config)],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def started(self, name: str) -> dict[str, Any]:
        return read_json(self.workdir / name / MANIFEST)["started"]

    def processes(self) -> list[str]:
        """Command lines of living processes that belong to this workdir."""
        found = []
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
                home = process.environ().get("PREFECT_HOME", "")
            except psutil.Error:
                continue
            if process.pid != os.getpid() and (str(self.root) in line or str(self.root) in home):
                found.append(line)
        return found


@pytest.fixture(scope="module")
def house(chats: ModuleType, tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> House:
    return make_house(chats, tiny, tmp_path_factory.mktemp("resume"))


def make_house(chats: ModuleType, tiny: ModuleType, root: Path) -> House:
    target = chats.save_chat_target(root / "target", tiny, 0)
    prompts = [
        {"id": f"c-{topic}", "category": "ab"[i % 2], "turns": [f"a word about {topic}"]}
        for i, topic in enumerate(TOPICS)
    ]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    deployment = {
        "target": {"source": str(target)},
        "data": {
            "prompts": str(root / "prompts.jsonl"),
            "holdout_fraction": 0.25,
            "max_prompt_tokens": 64,
            "max_new_tokens": 24,
            "batch_size": 8,
        },
        "capture": {"slots": [1, 2, 3]},
        "draft": {"draft_vocab_size": 120, "intermediate_size": 48},
        "training": {"num_steps": 2, "epochs": 100_000, "max_seconds": 8.0, "checkpoint_every_seconds": 0.2},
        "speculation": {"num_steps": 2, "max_num_steps": 2},
        "server": {"max_context_tokens": 128, "max_running_requests": 2},
        "host": {"workdir": str(root / "work"), "cache_dir": str(root / "cache"), "threads": 1},
        "benchmark": {"num_prompts": 2, "max_new_tokens": 12, "pairs": 1, "warmup_prompts": 0},
        "gates": {"min_speedup": 1e-6, "max_tau_gap": 1e6, "max_slot_error": 10.0, "max_argmax_difference": 1.0},
    }
    # Prefect reads this file, and would look for its server there.
    (root / ".env").write_text("PREFECT_API_URL=http://127.0.0.1:1/api\nPREFECT_SERVER_EPHEMERAL_ENABLED=false\n")
    config = root / "tiny.yaml"
    config.write_text(yaml.safe_dump(deployment))
    return House(root, config)


def wait_for_training(house: House, process: "subprocess.Popen[str]") -> None:
    """Until training has written a checkpoint of this run."""
    folder = house.workdir / "train.partial"
    began = time.time()
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the run ended with {process.returncode}:\n{process.communicate()[0]}")
        if any(p.is_file() and p.stat().st_mtime > began for p in folder.glob("checkpoint*/*")):
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"training did not begin in time:\n{process.communicate()[0]}")


def finish(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    return output


def test_ctrl_c_during_training_leaves_no_process_and_no_lock(house: House) -> None:
    process = house.command("run")
    wait_for_training(house, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: the whole group
    output = finish(process)
    assert process.returncode == 130, output
    assert house.processes() == []
    assert not (house.workdir / ".lock").exists()
    assert (house.workdir / "train.partial").is_dir()


def test_kill_9_during_training_loses_nothing(house: House) -> None:
    extracted = house.started("extract")
    process = house.command("run")
    wait_for_training(house, process)
    second = house.command("run")
    output = finish(second)
    assert second.returncode == 1
    assert f"in use by process {process.pid}" in output
    assert process.poll() is None  # and it did no harm to the first
    process.kill()
    output = finish(process)
    assert "train: goes on where an earlier run stopped" in output
    assert house.started("extract") == extracted
    assert (house.workdir / ".lock").exists()  # of a dead process: the next run sees that


def test_next_run_resumes_training_finishes_and_leaves_a_clean_machine(house: House) -> None:
    process = house.command("run")
    output = finish(process)
    assert process.returncode == 0, output
    assert "train: goes on where an earlier run stopped" in output
    assert "goes on at step" in output
    assert house.processes() == []
    assert (house.workdir / "report" / "report.html").is_file()
    for words in ("no speculation", "accept length / ceiling", "ms a round", "same answers", "gates"):
        assert words in output


def test_second_run_skips_every_finished_stage(house: House) -> None:
    process = house.command("run")
    output = finish(process)
    assert process.returncode == 0, output
    for stage in ("resolve", "regenerate", "extract", "train", "convert", "parity", "tune", "benchmark", "report"):
        assert f"{stage:<11} unchanged, skipped" in output
    assert house.processes() == []


def test_clean_stops_what_a_killed_run_left(house: House) -> None:
    """kill -9 while the server is up: server and Prefect stay behind until the next run, or `slipstream clean`."""
    process = house.command("run")
    state_file = house.workdir / "server.state.json"
    deadline = time.monotonic() + WAIT_SECONDS
    while not state_file.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    finish(process)
    assert house.processes() != []
    cleaning = house.command("clean")
    output = finish(cleaning)
    assert cleaning.returncode == 0, output
    assert house.processes() == []

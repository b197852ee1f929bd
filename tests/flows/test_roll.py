"""Flow roll over two hosts in Linux namespaces, under a stream of requests that a balancer sends by /health alone.

The hosts' servers are stand-ins that start in no time (roll_stand_ins.py); everything around them is real: SSH, files,
stages as jobs, marks, records. With real servers: tests/e2e/test_roll.py.
"""

import dataclasses
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from slipstream.configs.host import Host as HostSection
from slipstream.configs.schema import Deployment
from slipstream.engine.errors import SlipstreamError
from slipstream.flows.by_hand import run_stages
from slipstream.tasks.hosts.host import HostUnreachable
from slipstream.tasks.hosts.replicas import RECORD, REPLICAS, bring_draft, open_replicas, read_roll, stop_others
from slipstream.tasks.manifest import read_manifest, write_json
from slipstream.tasks.registry import get_stage
from slipstream.tasks.reporting import NullReporter
from slipstream.tasks.stage import run_stage

TESTS = Path(__file__).parents[1]
HOSTS = TESTS / "tasks" / "hosts"
PORT = 8000
K = 2
PATIENCE_SECONDS = 120.0
LOOK_SECONDS = 0.1  # of the balancer; a server leaves for ten times that


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


class Listener(NullReporter):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, stage: str, text: str, *, markup: bool) -> None:
        self.said.append(text)


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


class Balancer:
    """Looks at /health of every server now and then, and sends requests to those that say 200."""

    def __init__(self, urls: list[str]) -> None:
        self.urls, self.wanted = urls, set[str]()
        self.answers: list[tuple[str, str]] = []  # url, mark
        self.lost: list[tuple[str, Exception]] = []
        self._on = True
        self._threads = [threading.Thread(target=self._look), *(threading.Thread(target=self._ask) for _ in range(4))]
        for thread in self._threads:
            thread.start()

    def _look(self) -> None:
        while self._on:
            for url in self.urls:
                try:
                    get(f"{url}/health")
                    self.wanted.add(url)
                except OSError:
                    self.wanted.discard(url)
            time.sleep(LOOK_SECONDS)

    def _ask(self) -> None:
        while self._on:
            wanted = list(self.wanted)
            if not wanted:
                time.sleep(LOOK_SECONDS)
                continue
            url = random.choice(wanted)
            try:
                self.answers.append((url, get(f"{url}/work")))
            except (OSError, ValueError) as error:
                self.lost.append((url, error))

    def marks(self) -> set[str]:
        """What answered to the next dozen requests or more, once both servers are asked."""
        wait_for(lambda: self.wanted == set(self.urls))
        before = len(self.answers)
        wait_for(lambda: len(self.answers) > before + 16)
        return {mark for _, mark in self.answers[before + 4 :]}  # the first may have been asked before

    def end(self) -> None:
        self._on = False
        for thread in self._threads:
            thread.join()


class Fleet:
    """Two hosts, a deployment over both, and what the first one made of it."""

    def __init__(self, root: Path, ssh_tools: ModuleType, machine_tools: ModuleType, models: Any) -> None:
        self.root, self.models = root, models
        self.old = self.new = ""
        self.control, site = root / "control", root / "site"
        for folder in (self.control, site):
            folder.mkdir()
        shutil.copy(Path(__file__).with_name("roll_stand_ins.py"), site / "sitecustomize.py")
        shutil.copy(TESTS / "tasks" / "stub_server.py", site)
        kind = machine_tools.machine_class(ssh_tools)
        self.machines = [kind(root / f"machine{number}", number) for number in range(2)]
        known = root / "known_hosts"
        for number, one in enumerate(self.machines):
            one.trust()
            host = one.host(root / f"far{number}")
            machine_tools.use_this_python(host, root / f"python{number}", site)
            host.close()
        known.write_text("".join((one.folder / "known_hosts").read_text() for one in self.machines))
        first, second = self.machines
        prompts = root / "prompts.jsonl"
        lines = [{"id": f"p{i}", "category": "words", "turns": [f"word {i}"]} for i in range(3)]
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.workdir = root / "here" / "demo"
        section = HostSection(
            kind="ssh",
            address=first.listen,
            identity_file=first.user_key,
            known_hosts=known,
            directory=str(root / "far0"),
            workdir=self.workdir,
            connect_timeout_seconds=3.0,
            keepalive_seconds=1,
            reconnect_seconds=2,
            threads=1,
            more=({"address": second.listen, "identity_file": second.user_key, "directory": str(root / "far1")},),
        )
        self.deployment = Deployment(
            target={"source": str(models.target)},
            data={"max_prompt_tokens": 64, "max_new_tokens": 32},
            capture={"slots": (1, 2, 4)},
            draft={"draft_vocab_size": 86},
            training={"num_steps": K},
            speculation={"num_steps": K},
            server={"max_context_tokens": 128, "max_running_requests": 2, "host": "0.0.0.0", "port": PORT},
            benchmark={"prompts": str(prompts), "num_prompts": 3, "max_new_tokens": 32},
            roll={"leave_seconds": 1, "drain_seconds": 20.0},
            host=section,
        )
        self.config = root / "deployment.yaml"
        self.config.write_text(yaml.safe_dump(self.deployment.model_dump(mode="json")))
        self.urls = [f"http://{one.listen}:{PORT}" for one in self.machines]

    def run_dir(self, number: int) -> Path:
        return self.root / f"far{number}" / "runs" / "demo"

    def make(self, mark: str) -> None:
        """The first host has made a draft of that mark, as the stages up to parity leave it there."""
        self.new = mark
        far = self.run_dir(0)
        there = self.deployment.model_dump(mode="json")
        there["host"] = {"workdir": str(far), "cache_dir": str(self.root / "far0" / "cache"), "threads": 1}
        sha256 = hashlib.sha256((self.root / "prompts.jsonl").read_bytes()).hexdigest()
        sent = self.root / "far0" / "inputs" / sha256[:16] / "prompts.jsonl"
        sent.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.root / "prompts.jsonl", sent)
        there["benchmark"]["prompts"] = str(sent)
        made = Deployment.model_validate(there, strict=False)

        def convert(context: Any) -> dict[str, Any]:
            shutil.copytree(self.models.draft, context.out / "draft")
            (context.out / "draft" / "mark").write_text(mark)
            return {}

        def tune(context: Any) -> dict[str, Any]:
            write_json(context.out / "choice.json", {"num_steps": K, "candidate": K})
            return {}

        def nothing(_: Any) -> dict[str, Any]:
            return {}

        def resolve(_: Any) -> dict[str, Any]:
            return {"model_dir": str(self.models.target), "identity": {"target": "t", "tokenizer": "k"}}

        runs = {"resolve": resolve, "convert": convert, "tune": tune}
        for name in ("resolve", "regenerate", "extract", "train", "convert", "tune", "parity"):
            stage = dataclasses.replace(get_stage(name), run=runs.get(name, nothing))
            run_stage(stage, made, far, force=name == "convert")

    def roll(self, *overrides: str) -> list[dict[str, Any]]:
        from slipstream.flows.roll import roll

        return roll(str(self.config), list(overrides))

    def killed_in_turn(self, number: int, env: dict[str, str]) -> None:
        """A roll in a process of its own, which is ended by SIGKILL while that host's new server is being proven."""
        hang = self.control / f"hang-{self.machines[number].name}"
        hang.touch()
        words = "import sys; from slipstream.flows.roll import roll; roll(sys.argv[1])"
        with (self.root / "killed.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", words, str(self.config)], env=env, stdout=log, stderr=log
            )
        try:
            wait_for(lambda: process.poll() is not None or self.what_serves(number, health=True) == "left")
            assert process.poll() is None, (self.root / "killed.log").read_text()[-3000:]
        finally:
            process.kill()
            process.wait()
            hang.unlink()

    def what_serves(self, number: int, *, health: bool = False) -> str:
        """The mark that a host's server answers with, or the phase of its health; "" where none answers."""
        try:
            return get(f"{self.urls[number]}/health")["phase"] if health else get(f"{self.urls[number]}/work")
        except urllib.error.HTTPError as error:
            return str(json.loads(error.read())["phase"])
        except OSError:
            return ""

    def end(self) -> None:
        for one in self.machines:
            one.stop()


@pytest.fixture(scope="module")
def made(
    load_test_module: Callable[[Path], ModuleType], tiny_models: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    ssh_tools, machine_tools = load_test_module(HOSTS / "ssh_server.py"), load_test_module(HOSTS / "machines.py")
    ssh_tools.need_sshd()
    machine_tools.need_namespaces()
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), ssh_tools, machine_tools, tiny_models)
    yield fleet
    fleet.end()


@pytest.fixture
def fleet(made: Fleet, with_prefect: str) -> Fleet:
    """Both hosts serve `fleet.old`; the first one has made `fleet.new`."""
    for file in made.control.iterdir():
        file.unlink()
    if not made.old or {made.what_serves(0), made.what_serves(1)} != {made.old}:
        if not made.new or {made.what_serves(0), made.what_serves(1)} != {made.new}:
            made.make("first")
            made.roll()
        made.old, made.new = made.new, f"{made.new} and on"
        made.make(made.new)
    return made


@pytest.fixture
def balancer(fleet: Fleet) -> Iterator[Balancer]:
    made = Balancer(fleet.urls)
    assert made.marks() == {fleet.old}
    yield made
    made.end()


def restore(fleet: Fleet) -> None:
    """`slipstream stage restore CONFIG`."""
    run_stages(("restore",), fleet.config, None, None, as_json=True, force=True)


def test_a_roll_brings_the_draft_and_loses_no_request(fleet: Fleet, balancer: Balancer) -> None:
    rows = fleet.roll()
    assert balancer.marks() == {fleet.new}
    assert balancer.lost == []
    assert {mark for _, mark in balancer.answers} == {fleet.old, fleet.new}
    assert [row["base_url"] for row in rows] == [f"http://0.0.0.0:{PORT}"] * 2
    assert len({row["pid"] for row in rows}) == 2 or rows[0]["host"] != rows[1]["host"]
    assert read_roll(fleet.workdir) is None
    # what serving needs lies there as it was made, and nothing else
    first, second = fleet.run_dir(0), fleet.run_dir(1)
    for stage in ("convert", "tune", "parity"):
        ours, theirs = read_manifest(first / stage), read_manifest(second / stage)
        assert (theirs["identity"], theirs["files"]) == (ours["identity"], ours["files"])
        for name in ours["files"]:
            assert (second / stage / name).read_bytes() == (first / stage / name).read_bytes()
    prompts = read_manifest(second / "tune")["config"]["benchmark.prompts"]
    assert prompts.startswith(f"{fleet.root}/far1/inputs/")
    assert not any((second / stage).exists() for stage in ("regenerate", "extract", "train", "incoming", "before-roll"))
    # what lies there is not sent again, what does not is
    for damaged, sent in (("", []), ("mark", ["mark"])):
        if damaged:
            (second / "convert" / "draft" / damaged).unlink()
        listener = Listener()
        with open_replicas(fleet.deployment, fleet.workdir, listener) as replicas:
            bring_draft(replicas, fleet.workdir)
        arrived = [line.partition(f"{replicas[1].name}: ")[2] for line in listener.said if "here -> " in line]
        assert [line.partition(":")[0] for line in arrived] == sent
    assert (second / "convert" / "draft" / "mark").read_text() == fleet.new


def test_a_successor_that_does_not_come_up_has_all_go_back(fleet: Fleet, balancer: Balancer) -> None:
    (fleet.control / f"fail-{fleet.machines[1].name}").touch()
    with pytest.raises(SlipstreamError, match=r"A_1 of the server is 0\.1"):
        fleet.roll()
    assert balancer.marks() == {fleet.old}
    assert balancer.lost == []
    assert (fleet.urls[0], fleet.new) in balancer.answers  # it was replaced already
    assert (fleet.urls[1], fleet.new) not in balancer.answers  # it was never proven
    assert read_roll(fleet.workdir) is None
    assert not any((fleet.run_dir(number) / "before-roll").exists() for number in range(2))


def test_a_killed_roll_is_taken_back_by_restore_and_begun_anew_by_the_next(
    fleet: Fleet, prefect_api: dict[str, str]
) -> None:
    fleet.killed_in_turn(1, {**prefect_api, "PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    record = json.loads((fleet.workdir / RECORD).read_text())
    assert record["phase"] == "rolling"
    assert list(record["hosts"].values()) == ["replaced", "in turn"]
    assert fleet.what_serves(0) == fleet.new
    restore(fleet)
    assert [fleet.what_serves(0), fleet.what_serves(1)] == [fleet.old] * 2
    assert [fleet.what_serves(0, health=True), fleet.what_serves(1, health=True)] == ["ready", "ready"]
    assert read_roll(fleet.workdir) is None

    fleet.killed_in_turn(0, {**prefect_api, "PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    fleet.roll()
    assert [fleet.what_serves(0), fleet.what_serves(1)] == [fleet.new] * 2
    assert read_roll(fleet.workdir) is None


def test_nothing_is_touched_for_a_roll_that_cannot_come(fleet: Fleet, balancer: Balancer) -> None:
    pids = [json.loads((fleet.run_dir(number) / "server.state.json").read_text())["identity"] for number in range(2)]

    def refused(words: str, *overrides: str) -> None:
        with pytest.raises(SlipstreamError, match=words):
            fleet.roll(*overrides)

    refused("there is nothing to roll: server.port is 0", "server.port=0")
    refused("there is nothing to roll: the deployment has one host", "host.more=[]")
    (fleet.control / f"target-{fleet.machines[1].name}").write_text("other")
    shutil.rmtree(fleet.run_dir(1) / "resolve")
    refused(f"the target on .*{fleet.machines[1].listen}.* is another one: target differ")
    (fleet.control / f"target-{fleet.machines[1].name}").unlink()
    shutil.rmtree(fleet.run_dir(1) / "resolve")
    tune = fleet.run_dir(0) / "tune"
    tune.rename(fleet.root / "away")
    refused("stage tune is not done on .*: has not run")
    (fleet.root / "away").rename(tune)
    fleet.machines[1].unplug()
    with pytest.raises(HostUnreachable, match=fleet.machines[1].listen):
        fleet.roll()
    fleet.machines[1].plug()
    assert read_roll(fleet.workdir) is None
    for number in range(2):
        assert json.loads((fleet.run_dir(number) / "server.state.json").read_text())["identity"] == pids[number]
    assert balancer.marks() == {fleet.old}
    assert [lost for lost in balancer.lost if lost[0] == fleet.urls[0]] == []


def test_a_clean_end_ends_every_replica(fleet: Fleet) -> None:
    from slipstream.flows.cleanup import cleanup

    cleanup(str(fleet.config))
    assert [fleet.what_serves(0), fleet.what_serves(1)] == ["", ""]
    assert not (fleet.workdir / REPLICAS).exists()
    stop_others(fleet.deployment, fleet.workdir, NullReporter())  # there is nothing to reach any more
    restore(fleet)
    assert [fleet.what_serves(0), fleet.what_serves(1)] == ["", ""]

"""Several hosts: shares of the work, one host that dies, replicas that are replaced one by one under load."""

import random
import sys
import threading
import time
import urllib.request

import pytest
from pydantic import ValidationError

from slipstream.configs.host import Host as HostSection
from slipstream.configs.schema import Deployment
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.hidden_store import HiddenStateStore
from slipstream.tasks import extract, regenerate, resolve
from slipstream.tasks.conversations import CONVERSATIONS, read_conversations
from slipstream.tasks.hosts.fleet import Replica, lay_shares, on_a_living_host, roll, run_share
from slipstream.tasks.hosts.host import HostUnreachable, Job
from slipstream.tasks.hosts.open_host import each_deployment
from slipstream.tasks.manifest import read_manifest
from slipstream.tasks.shares import done_stores, shares_folder
from slipstream.tasks.stage import run_stage

PROMPTS = 6
# Answers slowly, and says how many requests it is answering. Arguments: port, version.
SERVER = """
import sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, version = int(sys.argv[1]), sys.argv[2]
if version == "broken": sys.exit(7)
running, lock = [0], threading.Lock()
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/running":
            body = str(running[0]).encode()
        else:
            with lock: running[0] += 1
            time.sleep(0.15)
            body = version.encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
        if self.path != "/running":
            with lock: running[0] -= 1
    def log_message(self, *_): pass
ThreadingHTTPServer(("0.0.0.0", port), Handler).serve_forever()
"""


# ---- the hosts of a deployment ---------------------------------------------------------------------------------------


def test_further_hosts_are_written_by_what_differs():
    section = HostSection(
        kind="ssh",
        address="gpu1",
        user="ops",
        more=({"address": "gpu2"}, {"address": "gpu3", "port": 2222, "user": "x"}),
    )
    each = each_deployment(Deployment(host=section))
    assert [str(one.host.ssh_address) for one in each] == ["ops@gpu1", "ops@gpu2", "x@gpu3:2222"]
    assert all(one.host.more == () for one in each)
    assert each_deployment(Deployment())[0].host.kind == "local"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"more": ({"address": "a"},)}, "host.kind is local"),
        ({"kind": "ssh", "address": "a", "more": ({"address": "A"},)}, "every host once"),
        ({"kind": "ssh", "address": "a", "more": ({"address": "-oProxyCommand=x"},)}, "a name or address alone"),
        ({"kind": "ssh", "address": "a", "more": ({"address": "b", "user": "a b"},)}, "ADDRESS"),
        ({"kind": "ssh", "address": "a", "more": ({"adress": "b"},)}, "adress"),
    ],
)
def test_what_is_no_fleet(values, words):
    with pytest.raises(ValidationError, match=words):
        HostSection(**values)


# ---- shares ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(machine, machine_tools, chats, tiny, tmp_path):
    """(machines, deployment over both, workdir here)."""
    machines = [machine(), machine()]
    target = chats.save_chat_target(tmp_path / "target", tiny)
    names = [f"p{i}" for i in range(PROMPTS)]
    prompts = chats.write_prompts(tmp_path / "prompts.jsonl", {name: [f"word {name} and more"] for name in names})
    known = tmp_path / "known_hosts"
    known.write_text("".join((one.folder / "known_hosts").read_text() for one in machines))
    for number, one in enumerate(machines):
        host = one.host(tmp_path / f"far{number}")
        machine_tools.use_this_python(host, tmp_path / f"python{number}")
        host.close()
    first, second = machines
    section = HostSection(
        kind="ssh",
        address=first.listen,
        identity_file=first.user_key,
        known_hosts=known,
        directory=str(tmp_path / "far0"),
        workdir=tmp_path / "here" / "demo",
        connect_timeout_seconds=3.0,
        keepalive_seconds=1,
        reconnect_seconds=2,
        threads=1,
        more=({"address": second.listen, "identity_file": second.user_key, "directory": str(tmp_path / "far1")},),
    )
    made = Deployment(
        target={"source": str(target), "dtype": "float32"},
        data={"prompts": str(prompts), "max_prompt_tokens": 64, "max_new_tokens": 12, "temperatures": (0.0, 0.8)},
        capture={"slots": (1, 2, 3)},
        server={"max_context_tokens": 128, "prefill_chunk_tokens": 16, "dtype": "float32", "device": "cpu"},
        host=section,
    )
    return machines, made, section.workdir


def share_by_threads(deployment, workdir, machines, machine_tools):
    """The functions alone. One host dies when its share begins. Returns what was told of shares that moved."""
    listeners = [machine_tools.Listener(), machine_tools.Listener("started", machines[1].power_off)]
    warned = []
    listeners[1].warn = lambda stage, text: warned.append(text)
    threads = [
        threading.Thread(target=run_share, args=(number, deployment, workdir, listeners[number])) for number in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [text for text in warned if "goes to another host" in text]


def test_two_hosts_share_the_work_one_dies_and_the_whole_is_as_from_one(fleet, machine_tools, tmp_path):
    machines, deployment, workdir = fleet
    (moved,) = share_by_threads(deployment, workdir, machines, machine_tools)
    assert machines[1].listen in moved

    class Here:
        """The host of the whole run, where it is this machine."""

        def file_facts(self, path):
            return None

        def put(self, source, target, *, say):
            path = tmp_path / "far" / target
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.read_bytes())

    assert lay_shares(Here(), deployment, workdir, lambda _: None) == 2
    whole = tmp_path / "far" / "runs" / "demo"
    one = deployment.model_copy(update={"host": HostSection(workdir=tmp_path / "alone", threads=1)})
    for stage in (resolve.STAGE, regenerate.STAGE, extract.STAGE):
        run_stage(stage, one, whole)
    as_from_one_host(one, whole, tmp_path / "alone")


def as_from_one_host(alone, whole, folder):
    """What lies in `whole` is what one machine makes by itself, and was taken from the shares."""
    for stage in (resolve.STAGE, regenerate.STAGE, extract.STAGE):
        run_stage(stage, alone, folder)
    expected = read_conversations(folder / "regenerate" / CONVERSATIONS)
    assert read_conversations(whole / "regenerate" / CONVERSATIONS) == expected
    for stage in ("regenerate", "extract"):
        assert read_manifest(whole / stage)["figures"]["resumed"] == len(expected) > PROMPTS
    ours, theirs = (HiddenStateStore(place / "extract" / "store") for place in (whole, folder))
    assert sorted(ours.conversation_ids()) == sorted(theirs.conversation_ids())
    for name in theirs.conversation_ids():
        one, other = ours.read(name), theirs.read(name)
        assert one.split == other.split
        assert bool((one.teacher == other.teacher).all())
        assert all(bool((one.slots[slot] == other.slots[slot]).all()) for slot in other.slots)


@pytest.mark.soak
def test_the_flow_fans_out_over_two_hosts_of_which_one_dies(fleet, machine_tools, tmp_path, monkeypatch):
    """Flow `stage` on a real Prefect server: shares as mapped tasks, laid on the first host, whose stages take them."""
    from slipstream.flows.prefect_server import prefect_server

    machines, deployment, _ = fleet
    config = tmp_path / "deployment.yaml"
    config.write_text(deployment.model_dump_json())
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with prefect_server(tmp_path / "prefect"):
        from slipstream.flows import fan_out
        from slipstream.flows.stage import StageName, stage

        ran, real = [], fan_out.run_share

        def run(number, deployment, workdir, reporter, *, count):
            ran.append(number)
            if number == 1:
                reporter = machine_tools.Listener("started", machines[1].power_off)
            return real(number, deployment, workdir, reporter, count=count)

        monkeypatch.setattr(fan_out, "run_share", run)
        for name in (StageName.RESOLVE, StageName.REGENERATE, StageName.EXTRACT):
            assert stage(name, str(config))["status"] == "done"
    assert sorted(ran) == [0, 1]
    one = deployment.model_copy(update={"host": HostSection(workdir=tmp_path / "alone", threads=1)})
    as_from_one_host(one, tmp_path / "far0" / "runs" / "demo", tmp_path / "alone")


def test_work_moves_only_where_a_host_is_lost(fleet):
    machines, deployment, _ = fleet
    each = each_deployment(deployment)
    said, asked = [], []

    def work(host, there):
        asked.append(there.host.address)
        return host.hello()["host"]

    assert on_a_living_host(1, each, work, said.append) == machines[1].name
    machines[1].power_off()
    assert on_a_living_host(1, each, work, said.append) == machines[0].name
    assert len(said) == 1

    def broken(host, there):
        raise SlipstreamError("the work itself is wrong", expected="", do="")

    with pytest.raises(SlipstreamError, match="the work itself"):
        on_a_living_host(0, each, broken, said.append)
    machines[0].power_off()
    with pytest.raises(HostUnreachable):
        on_a_living_host(0, each, work, said.append)


# ---- replicas --------------------------------------------------------------------------------------------------------


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


class Load:
    """Threads that ask whatever replica is in at the moment, and count what is lost."""

    def __init__(self):
        self.urls, self.lock, self.answers, self.lost, self.on = [], threading.Lock(), [], [], True
        self.threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(6)]

    def _ask(self):
        while self.on:
            with self.lock:
                url = random.choice(self.urls)
            try:
                self.answers.append(get(f"{url}/work"))
            except OSError as error:
                self.lost.append(error)

    def end(self):
        self.on = False
        for thread in self.threads:
            thread.join()


@pytest.fixture
def replicas(machine, ssh_tools):
    """Makes (replicas of two hosts that all turn to a version, the load on them, host -> serve)."""
    machines = [machine(), machine()]
    hosts = [one.host(one.base) for one in machines]
    load = Load()

    def serve(number, version):
        host, url = hosts[number], f"http://{machines[number].listen}:8000"
        host.stop("server", drain_seconds=0)
        host.start(Job("server", (sys.executable, "-c", SERVER, "8000", version)))

        def answers():
            assert host.status("server").state == "running", "the server ended"
            try:
                return get(f"{url}/running")
            except OSError:
                return None

        ssh_tools.wait_for(answers)

    def replica(number, new):
        url = f"http://{machines[number].listen}:8000"

        def leave():
            with load.lock:
                load.urls.remove(url)
            time.sleep(0.05)  # whoever has just chosen it has asked by now

        return Replica(
            machines[number].name,
            leave,
            lambda: int(get(f"{url}/running")),
            lambda: serve(number, new),
            lambda: serve(number, "old"),
            lambda: load.urls.append(url),
        )

    for number, one in enumerate(machines):
        serve(number, "old")
        load.urls.append(f"http://{one.listen}:8000")
    for thread in load.threads:
        thread.start()
    ssh_tools.wait_for(lambda: len(load.answers) > 6)
    yield replica, load, serve
    load.end()
    for host in hosts:
        host.close()


def test_a_roll_of_two_replicas_loses_no_request_and_a_bad_one_leaves_all_as_they_were(replicas, ssh_tools):
    replica, load, serve = replicas
    said = []
    # the second one does not come up: both do the old again
    with pytest.raises(AssertionError, match="the server ended"):
        roll([replica(0, "new"), replica(1, "broken")], said.append, time.sleep, drain_seconds=20)
    assert load.lost == []
    assert {get(f"{url}/work") for url in load.urls} == {"old"}
    assert len(load.urls) == 2
    assert sum("replaced" in line for line in said) == 1
    assert sum("the old server is back" in line for line in said) == 2
    # and when it does
    roll([replica(0, "new"), replica(1, "new")], said.append, time.sleep, drain_seconds=20)
    before = len(load.answers)
    ssh_tools.wait_for(lambda: len(load.answers) > before + 6)
    assert load.lost == []
    assert {get(f"{url}/work") for url in load.urls} == {"new"}
    assert {"old", "new"} <= set(load.answers)
    # without leaving and draining, requests are lost
    serve(0, "newer")
    ssh_tools.wait_for(lambda: load.lost)


def test_a_replica_that_does_not_drain_is_left_as_it_is():
    done, waited = [], []
    names = ("leave", "replace", "go_back", "join")
    parts = {name: lambda name=name: done.append(name) for name in names}
    with pytest.raises(SlipstreamError, match="still answers 3 requests after 2 s") as error:
        roll([Replica("one", running=lambda: 3, **parts)], lambda _: None, waited.append, drain_seconds=2)
    assert done == ["leave", "join"]
    assert 2.0 <= sum(waited) < 2.5
    assert error.value.runbook == "roll-back.md"


@pytest.mark.parametrize("error", [OSError("no answer"), KeyboardInterrupt()])
def test_a_replica_that_cannot_be_asked_is_put_back(error):
    done = []

    def running():
        raise error

    parts = {name: lambda name=name: done.append(name) for name in ("leave", "replace", "go_back", "join")}
    with pytest.raises(type(error)):
        roll([Replica("one", running=running, **parts)], lambda _: None, lambda _: None)
    assert done == ["leave", "join"]


def test_one_that_does_not_come_back_keeps_no_other_from_it():
    done, said = [], []

    def fail(words):
        raise OSError(words)

    def replica(number, **parts):
        told = {name: lambda name=name: done.append(f"{name} {number}") for name in ("leave", "go_back", "join")}
        return Replica(f"r{number}", **({"running": lambda: 0, "replace": lambda: None} | told | parts))

    replicas = [
        replica(0),
        replica(1, go_back=lambda: fail("its disk is full")),
        replica(2, replace=lambda: fail("the successor"), go_back=lambda: fail("its port is held")),
    ]
    with pytest.raises(OSError, match="the successor"):
        roll(replicas, said.append, lambda _: None)
    assert done[-3:] == ["leave 0", "go_back 0", "join 0"]
    assert [done.count(f"join {number}") for number in range(3)] == [2, 1, 0]
    assert [line.rpartition(": ")[2] for line in said if "is not back" in line] == [
        "its port is held",
        "its disk is full",
    ]


def test_a_share_that_is_not_whole_is_neither_laid_nor_opened_and_manifests_come_last(tmp_path):
    deployment, sent = Deployment(), []
    place = tmp_path / "demo" / shares_folder(deployment)
    for share, names in {"0-of-2": ("shard-0", "manifest.json"), "1-of-2": ("shard-0",)}.items():
        (place / share / "store").mkdir(parents=True)
        for name in (CONVERSATIONS, *(f"store/{name}" for name in names)):
            (place / share / name).write_text("x")

    class There:
        def file_facts(self, path):
            return None

        def put(self, source, target, *, say):
            sent.append(source)

    assert done_stores(deployment, tmp_path / "demo") == [place / "0-of-2" / "store"]
    assert lay_shares(There(), deployment, tmp_path / "demo", lambda _: None) == 1
    names = (CONVERSATIONS, "store/shard-0", "store/manifest.json")
    assert sent == [place / "0-of-2" / name for name in names]

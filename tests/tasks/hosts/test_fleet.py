"""Several hosts: shares of the work, one host that dies. Their servers: tests/flows/test_roll.py."""

import json
import threading
from pathlib import Path

import pytest
from pydantic import ValidationError

from slipstream.configs.host import Host as HostSection
from slipstream.configs.schema import Deployment
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.hidden_store import HiddenStateStore
from slipstream.tasks import extract, regenerate, resolve
from slipstream.tasks.conversations import CONVERSATIONS, read_conversations
from slipstream.tasks.hosts import fleet as fleet_of_hosts
from slipstream.tasks.hosts.fleet import fetched_share, lay_shares, on_a_living_host, run_share
from slipstream.tasks.hosts.host import MAX_READ_BYTES, HostUnreachable
from slipstream.tasks.hosts.open_host import each_deployment
from slipstream.tasks.manifest import read_manifest
from slipstream.tasks.reporting import NullReporter
from slipstream.tasks.shares import done_stores, shares_folder
from slipstream.tasks.stage import run_stage

PROMPTS = 6


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
    section = machine_tools.host_section(machines, tmp_path)
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


def test_a_share_is_fetched_whose_manifest_is_large_and_the_manifest_comes_last(host, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_of_hosts, "run_far_stage", lambda *_: None)
    monkeypatch.setattr(fleet_of_hosts, "open_host", lambda _: host)
    run = Path(host.directory) / "runs" / "demo-0-of-1"
    store = run / "extract" / "store"
    for folder in (run / "regenerate", store):
        folder.mkdir(parents=True)
    (run / "regenerate" / CONVERSATIONS).write_text("x")
    manifest = json.dumps({"shards": [{"name": "shard-0"}], "conversations": "c" * MAX_READ_BYTES})
    (store / "manifest.json").write_text(manifest)
    deployment, workdir = Deployment(), tmp_path / "demo"
    with pytest.raises(SlipstreamError, match=r"no file .*shard-0"):
        run_share(0, deployment, workdir, NullReporter())
    assert fetched_share((0, 1), deployment, workdir) is None
    (store / "shard-0").write_text("hidden states")
    folder = run_share(0, deployment, workdir, NullReporter())
    assert fetched_share((0, 1), deployment, workdir) == folder
    assert {path.name: path.read_text() for path in (folder / "store").iterdir()} == {
        "manifest.json": manifest,
        "shard-0": "hidden states",
    }

"""Training over two hosts in namespaces of their own, by real SSH and torchrun: as on one host; a host that is lost."""

import dataclasses
import shutil

import pytest
import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.hidden_store import StoreWriter
from slipstream.engine.store_manifest import StoreManifest
from slipstream.engine.training.checkpoint import load_checkpoint
from slipstream.tasks import extract, train
from slipstream.tasks.hosts.far_stage import run_far_stage, stop_far_stages
from slipstream.tasks.hosts.far_training import stop_nodes, train_over_hosts
from slipstream.tasks.hosts.store_parts import choose_parts
from slipstream.tasks.stage import run_stage
from slipstream.tasks.stage_runner import stage_runner

SHARD_BYTES = 20_000


@pytest.fixture
def fleet(machine, machine_tools, pipeline, chats, tiny, tmp_path, monkeypatch):
    """Makes (machines, deployment over both, the same on this machine alone) with a store of several shards on the
    first host, of which the second has extracted one itself."""

    def make(**training):
        monkeypatch.setitem(StoreWriter.__init__.__kwdefaults__, "shard_bytes", SHARD_BYTES)
        made = pipeline.make_pipeline(tmp_path / "p", chats, tiny)
        training = {"batch_tokens": 300, "hosts": "all", **training}
        deployment = made.deployment.model_copy(
            update={"training": made.deployment.training.model_copy(update=training)}
        )
        run_stage(extract.STAGE, deployment, made.workdir)
        shutil.copytree(made.workdir, tmp_path / "far0" / "runs" / "demo")

        machines = [machine(), machine()]
        address, _ = machines[0].cable_to(machines[1])
        section = machine_tools.host_section(machines, tmp_path)
        there = deployment.training.model_copy(update={"rendezvous_address": address})
        return machines, deployment.model_copy(update={"host": section, "training": there}), (deployment, made.workdir)

    return make


def lay_share(store, folder):
    """The store's second shard, as a share that a host extracted itself has it: under another name."""
    whole = StoreManifest.load(store)
    shard = dataclasses.replace(whole.shards[1], name="states-00000.safetensors")
    folder.mkdir(parents=True)
    shutil.copy(store / whole.shards[1].name, folder / shard.name)
    StoreManifest(whole.spec, [shard], {}, complete=True).save(folder)


def test_two_hosts_make_the_draft_of_one(fleet, machine_tools, tmp_path):
    machines, deployment, (alone, folder) = fleet()
    workdir, runs = deployment.host.workdir, tmp_path / "far1" / "runs"
    lay_share(folder / "extract" / "store", runs / "demo-1-of-2" / "extract" / "store")
    spoilt = runs / "demo.train-part" / "states-00000.safetensors"  # as a disk may leave it
    spoilt.parent.mkdir()
    spoilt.write_bytes(bytes((folder / "extract" / "store" / spoilt.name).stat().st_size))
    one = run_stage(train.STAGE, alone, folder)

    listener = machine_tools.Listener()
    with stage_runner(deployment, workdir, listener) as run:
        two = run(train.STAGE)
        assert (two.status, two.figures["ranks"]) == ("done", 2)
        assert run(train.STAGE).status == "skipped"
    assert two.figures["loss"] == pytest.approx(one.figures["loss"], rel=1e-5)
    assert two.figures["replayed"] == one.figures["replayed"]
    ours, theirs = (
        load_checkpoint(place / "train" / "checkpoint")["optimizer"]["masters"]
        for place in (tmp_path / "far0" / "runs" / "demo", folder)
    )
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-4) for name in theirs)

    # the second host has its part of the store and nothing else: its own shard by a link, what was missing by copy
    part = runs / "demo.train-part"
    shards = sorted(path.name for path in part.glob("*.safetensors"))
    whole = StoreManifest.load(part)
    assert "states-00001.safetensors" in shards
    assert 1 < len(shards) < len(whole.shards)
    assert (part / "states-00001.safetensors").stat().st_nlink == 2
    for name in shards:
        assert (part / name).read_bytes() == (folder / "extract" / "store" / name).read_bytes()
    assert any(
        f"holds {len(shards)} of {len(whole.shards)} shards, 1 of them its own" in text for text in listener.said
    )
    assert sorted(path.name for path in runs.iterdir()) == ["demo-1-of-2", "demo.train-part"]
    host = machines[1].host(tmp_path / "far1")
    (job,) = host.jobs("demo")
    assert (job.name, job.state, job.exit_code) == ("demo-train-node-1", "exited", 0)
    host.close()


def test_a_lost_host_ends_all_by_name_and_the_run_goes_on_from_the_checkpoint(fleet, machine_tools, tmp_path):
    machines, deployment, _ = fleet(epochs=2000, checkpoint_every_seconds=0.05)
    workdir, first = deployment.host.workdir, machines[0].host(tmp_path / "far0")
    checkpoint = tmp_path / "far0" / "runs" / "demo" / "train.partial" / "checkpoint"
    # hosts that do not reach each other are told at once
    training = deployment.training.model_copy(update={"rendezvous_address": "192.0.2.1"})
    apart = deployment.model_copy(update={"training": training})
    with pytest.raises(SlipstreamError, match=r"does not reach the first host at 192\.0\.2\.1:29400: "):
        train_over_hosts(first, apart, workdir, machine_tools.Listener())
    with pytest.raises(SlipstreamError, match="a host was lost while all trained") as error:
        train_over_hosts(first, deployment, workdir, machine_tools.Listener("progress", machines[1].power_off))
    assert machines[1].listen in error.value.found
    assert error.value.runbook == "host-unreachable.md"
    (job,) = first.jobs("demo")
    assert job.members == ()
    assert "train_rank" not in first.run(("ps", "-e", "-o", "args=")).stdout
    step = load_checkpoint(checkpoint)["step"]
    assert step > 0
    # the first host goes on alone
    listener = machine_tools.Listener("progress", lambda: first.stop("demo-train"))
    with pytest.raises(SlipstreamError):
        run_far_stage(first, "train", deployment, workdir, listener)
    assert any(f"goes on at step {step}, " in text for text in listener.said)
    first.close()


@pytest.mark.soak
def test_an_interruption_leaves_it_running_and_a_rank_that_dies_on_the_other_host_is_named(
    fleet, machine_tools, ssh_tools, tmp_path
):
    machines, deployment, _ = fleet(epochs=4000, checkpoint_every_seconds=0.05)
    workdir = deployment.host.workdir
    first, second = (one.host(tmp_path / f"far{number}") for number, one in enumerate(machines))

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_over_hosts(first, deployment, workdir, machine_tools.Listener("progress", interrupt))
    pids = [set(host.jobs("demo")[0].members) for host in (first, second)]
    assert all(pids)

    def rank_of(host):
        lines = [line.split(None, 1) for line in host.run(("ps", "-e", "-o", "pid=,args=")).stdout.splitlines()]
        (pid,) = [pid for pid, words in lines if "-m slipstream.tasks.train_rank" in words and "--nnodes" not in words]
        return pid

    rank = rank_of(second)
    listener = machine_tools.Listener("progress", lambda: second.run(("kill", "-KILL", rank)))
    with pytest.raises(SlipstreamError, match="was ended by SIGKILL while it trained") as error:
        train_over_hosts(first, deployment, workdir, listener)
    assert error.value.found.startswith(f"training rank 1 of 2 (pid {rank}) on ")
    assert machines[1].listen in error.value.found
    assert any("found it running" in text for text in listener.said)
    for host in (first, second):
        assert host.jobs("demo")[0].members == ()
        assert "train_rank" not in host.run(("ps", "-e", "-o", "args=")).stdout

    # what the clean-up does: nothing is left on either
    def clean():
        stop_nodes(deployment, workdir, said.append)
        stop_far_stages(first, workdir, said.append)

    said = []
    with pytest.raises(SlipstreamError):
        train_over_hosts(first, deployment, workdir, machine_tools.Listener("progress", clean))
    assert any("stopped demo-train-node-1 on " in text for text in said)
    assert [host.jobs("demo")[0].members for host in (first, second)] == [(), ()]
    # an error of the stage itself comes as it is, and nobody waits for the other host
    store = tmp_path / "far0" / "runs" / "demo" / "extract" / "store" / "states-00000.safetensors"
    data = store.read_bytes()
    store.write_bytes(data[:-8] + b"12345678")
    with pytest.raises(SlipstreamError, match="extract is damaged"):
        train_over_hosts(first, deployment, workdir, machine_tools.Listener())
    assert [host.jobs("demo")[0].members for host in (first, second)] == [(), ()]
    for host in (first, second):
        host.close()


def test_shares_of_the_store():
    sizes = {f"s{i}": 10 for i in range(9)}
    assert choose_parts(sizes, [set(), set()]) == [["s0", "s1", "s2"], ["s3", "s4", "s5"]]
    # what a host has it keeps, and gets no more than its share
    assert choose_parts(sizes, [{"s7", "s1"}, {f"s{i}" for i in range(2, 7)}]) == [
        ["s1", "s7", "s0"],
        ["s2", "s3", "s4", "s5", "s6"],
    ]
    assert choose_parts({"s0": 5}, [set(), set()]) == [["s0"], ["s0"]]

"""Eight ranks on a far host, by `prefect deployment run` alone: a worker's flow launches them there over OpenSSH,
speculates and benchmarks; one rank is killed; flow `cleanup` proves that all are gone, and leaves a foreigner alone.

With -m soak flow `lifecycle` makes everything there, too, parity with eight ranks included.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from slipstream.configs.load import load
from slipstream.tasks.hosts.far_stage import send_deployment
from slipstream.tasks.hosts.host import Job
from slipstream.tasks.registry import get_stage
from slipstream.tasks.stage import run_stage

K = 2
RANKS = 8
# Run by every Python there: a rank holds a segment as NCCL's would, by a mapping alone.
SEGMENT = """
import mmap, os, sys
if any("rank_process" in word for word in sys.orig_argv):
    with open(f"/dev/shm/nccl-{os.getpid()}", "wb+") as _file:
        _file.truncate(65536)
        _held = mmap.mmap(_file.fileno(), 65536)
"""
LISTEN = "import socket, sys, time; s = socket.create_server(('127.0.0.1', 0)); print(1, flush=True); time.sleep(600)"


@pytest.mark.parametrize("flow", ["serve", pytest.param("lifecycle", marks=pytest.mark.soak)])
def test_eight_ranks_of_which_one_is_killed(
    flow: str,
    worlds: ModuleType,
    chats: ModuleType,
    tiny: ModuleType,
    load_test_module: Callable[[Path], ModuleType],
    tmp_path: Path,
) -> None:
    values = deployment(load_test_module, chats, tiny, tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SEGMENT)
    with worlds.far_host(load_test_module, tmp_path, tmp_path / "site", command_seconds=120) as far:
        world = worlds.World(tmp_path, {**values, "host": {**values["host"], **far.section}})
        if flow == "serve":
            make_draft(world, far.host)
        with world.up():
            serve_and_clean(world, far.host, flow)


def deployment(
    load_test_module: Callable[[Path], ModuleType], chats: ModuleType, tiny: ModuleType, root: Path
) -> dict[str, Any]:
    house = load_test_module(Path(__file__).with_name("test_resume.py")).make_house(chats, tiny, root)
    values: dict[str, Any] = yaml.safe_load(house.config.read_text())
    values["target"]["dtype"] = "float32"
    # About a second, in which it learns enough by heart for some drafts to be accepted.
    values["training"] |= {"epochs": 60, "max_seconds": 60.0, "dtype": "float32"}
    values["training"] |= {"learning_rate": 1e-2, "batch_tokens": 512}
    values["benchmark"] |= {"prompts": values["data"]["prompts"], "max_new_tokens": 24}
    values["server"] |= {"tensor_parallel_size": RANKS, "device": "cpu", "dtype": "float32"}
    values["server"] |= {"startup_timeout_seconds": 300.0, "after": "keep"}
    return values


def make_draft(world: Any, host: Any) -> None:
    """The stages before a launch, in this process: they differ in nothing from those of one rank."""
    written = load(world.root / "configs" / "smollm2.yaml").deployment
    there = load(send_deployment(host, written, host.directory, written.host.workdir.name)).deployment
    for name in ("resolve", "regenerate", "extract", "train", "convert", "tune"):
        run_stage(get_stage(name), there, there.host.workdir)


def serve_and_clean(world: Any, host: Any, flow: str) -> None:
    workdir = world.root / "far" / "runs" / "work"

    def out(*command: str) -> str:
        return str(host.run(command).stdout)

    def alive() -> set[int]:
        lines = (line.split() for line in out("ps", "-e", "-o", "pid=,stat=").splitlines())
        return {int(pid) for pid, state in lines if not state.startswith("Z")}

    def segments() -> set[str]:
        return {name for name in out("ls", "/dev/shm").split() if name.startswith("nccl-")}

    # Somebody else, who looks like us, and what somebody else left.
    foreign = host.start(Job("foreign", (sys.executable, "-c", LISTEN, "slipstream.engine.serving.rank_process")))
    out("sh", "-c", "echo foreign > /dev/shm/nccl-foreign")

    run = world.run(flow)
    launched, benchmark = (
        json.loads((workdir / stage / "manifest.json").read_text())["figures"] for stage in ("launch", "benchmark")
    )
    assert launched["smoke"]["tokens"] > 0
    assert benchmark["served_num_steps"] == benchmark["num_steps"] == K
    assert 1.0 < benchmark["accept_length"] <= K + 1  # drafts are among what eight ranks accepted
    assert benchmark["differing_prompts"] == []  # and they say what eight ranks say without a draft
    if flow == "serve":
        shown = json.loads(world.artifacts(run)["slipstream-benchmark"])
        assert {"figure": "accept_length", "value": benchmark["accept_length"]} in shown
    leader = launched["pid"]
    group = [int(pid) for pid in out("ps", "-o", "pid=", "-s", str(leader)).split()]
    ranks = [int(pid) for pid in group if "rank_process" in out("cat", f"/proc/{pid}/cmdline")]
    assert len(ranks) == RANKS - 1  # rank 0 is the engine, behind the front
    assert len(group) >= RANKS + 1
    port = int(launched["base_url"].rpartition(":")[2])
    listening = f":{port:04X} 00000000:0000 0A"
    assert listening in out("cat", "/proc/net/tcp")
    assert segments() == {"nccl-foreign", *(f"nccl-{pid}" for pid in ranks)}  # none of the benchmark's other side

    out("kill", "-STOP", str(ranks[5]))  # and one that can do nothing for its own end
    out("kill", "-KILL", str(ranks[2]))
    run = world.run("cleanup")
    assert f"'pid': {leader}" in world.artifacts(run)["slipstream-cleanup"]
    assert not alive() & set(group)
    assert out("ls", "/dev/shm").split() == ["nccl-foreign"]
    assert any("nccl-foreign" in line and "left alone" in line for line in world.log(run))
    assert listening not in out("cat", "/proc/net/tcp")
    assert host.status("foreign").members == foreign.members  # alive, port and all
    assert not list(workdir.glob("server*.json"))
    (stopped,) = json.loads((workdir / "cleanup" / "manifest.json").read_text())["figures"]["stopped"]
    assert (stopped["pid"], len(stopped["segments"])) == (leader, RANKS - 1)
    log = (workdir / "server.log").read_text()
    assert f"rank {ranks.index(ranks[2]) + 1} of 8 (pid {ranks[2]}) was ended by SIGKILL" in log
    print(json.dumps(world.figures))

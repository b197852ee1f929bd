"""Eight ranks on a far host: launched there by their stage; one is killed; the clean-up proves that all are gone."""

import json
import shutil
import sys

import pytest

from slipstream.configs.host import Host as HostSection
from slipstream.configs.schema import Deployment
from slipstream.tasks.hosts.far_stage import run_far_stage
from slipstream.tasks.hosts.host import Job
from slipstream.tasks.manifest import write_json
from slipstream.tasks.stage import Stage, run_stage

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


@pytest.fixture
def deployment(tiny_models, tmp_path, machine):
    one = machine()
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "category": "words", "turns": [f"word {i}"]} for i in range(2)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = Deployment(
        target={"source": str(tiny_models.target)},
        data={"max_prompt_tokens": 64, "max_new_tokens": 32},
        capture={"slots": (1, 2, 4)},
        draft={"draft_vocab_size": 86},
        training={"num_steps": K},
        speculation={"num_steps": K},
        server={
            "max_context_tokens": 128,
            "max_running_requests": 2,
            "startup_timeout_seconds": 300.0,
            "tensor_parallel_size": RANKS,
            "device": "cpu",
            "dtype": "float32",
        },
        host={"threads": 1},
        benchmark={"prompts": str(prompts), "num_prompts": 2, "max_new_tokens": 12},
    )

    def convert(context):
        shutil.copytree(tiny_models.draft, context.out / "draft")
        return {}

    def tune(context):
        write_json(context.out / "choice.json", {"num_steps": K, "candidate": K})
        return {}

    for stage in (
        Stage("resolve", 1, (), ("target",), lambda context: {"model_dir": str(tiny_models.target)}),
        Stage("convert", 1, ("resolve",), (), convert),
        Stage("tune", 1, ("convert",), (), tune),
    ):
        run_stage(stage, made, tmp_path / "far" / "runs" / "demo")
    section = HostSection(kind="ssh", address=one.listen, workdir=tmp_path / "here" / "demo", threads=1)
    return one, made.model_copy(update={"host": section})


def test_eight_ranks_of_which_one_is_killed(deployment, machine_tools, ssh_tools, tmp_path):
    one, deployed = deployment
    host, workdir = one.host(tmp_path / "far", command_seconds=120), deployed.host.workdir
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SEGMENT)
    machine_tools.use_this_python(host, tmp_path / "python", tmp_path / "site")

    def out(*command):
        return host.run(command).stdout

    def alive():
        lines = (line.split() for line in out("ps", "-e", "-o", "pid=,stat=").splitlines())
        return {int(pid) for pid, state in lines if not state.startswith("Z")}

    # Somebody else, who looks like us, and what somebody else left.
    foreign = host.start(Job("foreign", (sys.executable, "-c", LISTEN, "slipstream.engine.serving.rank_process")))
    out("sh", "-c", "echo foreign > /dev/shm/nccl-foreign")

    launched = run_far_stage(host, "launch", deployed, workdir, machine_tools.Listener())
    assert launched.figures["smoke"]["tokens"] > 0
    leader = launched.figures["pid"]
    group = [int(pid) for pid in out("ps", "-o", "pid=", "-s", str(leader)).split()]
    ranks = [int(pid) for pid in group if "rank_process" in out("cat", f"/proc/{pid}/cmdline")]
    assert len(ranks) == RANKS - 1  # rank 0 is the engine, behind the front
    assert len(group) >= RANKS + 1
    port = int(launched.figures["base_url"].rpartition(":")[2])
    assert {name for name in out("ls", "/dev/shm").split() if name.startswith("nccl-")} == {
        "nccl-foreign",
        *(f"nccl-{pid}" for pid in ranks),
    }

    out("kill", "-STOP", str(ranks[5]))  # and one that can do nothing for its own end
    out("kill", "-KILL", str(ranks[2]))
    listener = machine_tools.Listener()
    cleaned = run_far_stage(host, "cleanup", deployed, workdir, listener)
    (stopped,) = cleaned.figures["stopped"]
    assert stopped["pid"] == leader
    assert not alive() & set(group)
    assert out("ls", "/dev/shm").split() == ["nccl-foreign"]
    assert len(stopped["segments"]) == RANKS - 1
    assert any("nccl-foreign" in line and "left alone" in line for line in listener.said)
    listening = out("cat", "/proc/net/tcp")
    assert f":{port:04X} 00000000:0000 0A" not in listening
    assert host.status("foreign").members == foreign.members  # alive, port and all
    assert not list((tmp_path / "far" / "runs" / "demo").glob("server*.json"))
    log = (tmp_path / "far" / "runs" / "demo" / "server.log").read_text()
    assert f"rank {ranks.index(ranks[2]) + 1} of 8 (pid {ranks[2]}) was ended by SIGKILL" in log
    host.close()

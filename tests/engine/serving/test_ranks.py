"""Real servers of several ranks: the same answers as one device, effective settings, and their end when a rank dies."""

import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

from slipstream.engine.drafts.eagle3.checkpoint import load_draft, save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine, EngineConfig
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.loader import load_target
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.serving.engine_options import MAX_RANKS, EngineOptions
from slipstream.engine.serving.ranks import Ranks
from slipstream.engine.serving.trace_file import unpack_trace
from slipstream.tasks.parity_findings import ParityPrompt, examine
from slipstream.tasks.parity_target import TargetReference

RANKS = 2
K = 3
LONG = {"prompt": "abc", "max_tokens": 120, "ignore_eos": True, "stream": True}
# Five are promised to people; here the machine may be busy with anything else.
DEAD_SECONDS = 15.0


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def seconds_until_gone(pids) -> float:
    began = time.monotonic()
    while not all(map(gone, pids)):
        assert time.monotonic() - began < DEAD_SECONDS, f"{[pid for pid in pids if not gone(pid)]} still run"
        time.sleep(0.02)
    return time.monotonic() - began


TWO_CARDS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < RANKS, reason="needs two NVIDIA GPUs"
    ),
]


@dataclass(frozen=True)
class Case:
    """What is served: models "dense", or "kimi" with a draft of this kind; by so many ranks; whose rank is killed."""

    models: str
    ranks: int = RANKS
    killed: int = 1
    device: str = "cpu"


CASES = [
    Case("dense"),
    Case("kimi grouped"),
    Case("kimi latent", 8, 5),
    pytest.param(Case("dense", device="cuda"), marks=TWO_CARDS),
]


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def kimi_target(load_test_module, tiny_server, tmp_path_factory) -> Path:
    """Tiny Kimi with INT4 experts and the tokenizer of the dense target."""
    target = tmp_path_factory.mktemp("kimi") / "target"
    size = tiny_server.save_tokenizer(target)
    kimi = load_test_module(Path(__file__).parents[2] / "checkpoints" / "kimi.py")
    kimi.synthesise(target, vocab_size=size, bos_token_id=0, num_hidden_layers=3)
    return target


@pytest.fixture
def models(case, request, tiny, tiny_server, tmp_path):
    if case.models == "dense":
        return request.getfixturevalue("tiny_models")
    directory = request.getfixturevalue("kimi_target")
    target = load_target(directory, torch.float32)
    draft = tiny.tiny_draft(target, slots=(0, 1, 3), latent=case.models == "kimi latent")
    record = DraftRecord(TargetIdentity.from_dir(directory), Family.KIMI_K25, "0" * 64)
    save_draft(tmp_path / "draft", draft, record)
    return tiny_server.Models(directory, tmp_path / "draft")


@pytest.fixture
def server(tiny_server, models, tmp_path, case, monkeypatch):
    if case.device == "cuda":  # kernels are compiled, where no cache has them
        monkeypatch.setattr(tiny_server, "START_SECONDS", 400.0)
    flags = ("--tensor-parallel-size", str(case.ranks), "--device", case.device)
    made = tiny_server.start(tmp_path, models, K, "--dtype", "float32", "--diagnostics", *flags)
    yield made
    if made.process.poll() is None:
        made.stop()


def compare_traces(server, models, case, prompts):
    """Parity of what these ranks captured, drafted and accepted, through HTTP; of Kimi whom they sent rows to, too."""
    target = load_target(models.target, "float32")
    draft = load_draft(models.draft, torch.float32, target_embedding=target.embed_tokens.weight).eval()
    asked = [ParityPrompt(f"p{i}", "validation", ids, 10) for i, ids in enumerate(prompts)]
    bodies = [{"prompt": p.token_ids, "max_tokens": 10, "temperature": 0.0, "ignore_eos": True} for p in asked]
    answers = [httpx.post(f"{server.url}/slipstream/trace", json=body, timeout=60) for body in bodies]
    traces = [unpack_trace(answer.content) for answer in answers]
    slots = draft.config.slots
    reference, networks = TargetReference(models.target), {"export": draft}
    found = examine(asked, traces, target, reference, networks, slots, K, num_ranks=case.ranks)
    assert found.failures(max_slot_share=0.01, max_argmax_difference=0.0, max_tau_gap=0.0) == []
    assert found.acceptance["validation"].rounds > 10
    assert (found.experts is None) == (case.models == "dense")
    if found.experts is not None:
        assert (found.experts.own_differ, found.experts.differ) == (0, 0)
        assert found.experts.choices == 2 * found.logits.positions > 0


def test_ranks_serve_what_one_device_serves_until_one_is_killed(server, models, case):
    settings = httpx.get(f"{server.url}/slipstream/settings", timeout=60).json()
    assert settings["tensor_parallel_size"] == case.ranks
    assert settings["rank_exchange"] in {"cpu": ("gloo",), "cuda": ("peer memory", "NCCL")}[case.device]
    pids = settings["rank_pids"]
    assert len(set(pids)) == case.ranks
    assert pids[0] == settings["engine_pid"] == server.engine_pid
    groups = {os.getpgid(pid) for pid in [*pids, server.process.pid]}
    assert len(groups) == 1  # for who stops it from outside

    target = load_target(models.target, "float32", case.device)
    draft = load_draft(models.draft, torch.float32, target_embedding=target.embed_tokens.weight).eval()
    sizes = {"max_running_requests": 4, "max_context_tokens": 128}
    config = EngineConfig(num_steps=K, **sizes, dtype="float32", device=case.device)
    one = Engine(target, config, Eagle3Proposer(draft, K))
    prompts = [list(range(3, 3 + n)) for n in (5, 40, 17)]
    asked = [
        {"temperature": 0, "max_tokens": 24},
        {"temperature": 0.8, "seed": 11, "max_tokens": 24},
        {"temperature": 1.0, "top_p": 0.9, "seed": 12, "max_tokens": 9},
    ]
    expected = one.generate(prompts, [SamplingParams(**a, ignore_eos=True) for a in asked])
    answers: list[list[int]] = [[] for _ in prompts]

    def ask(i: int) -> None:
        body = {"prompt": prompts[i], **asked[i], "ignore_eos": True, "return_token_ids": True}
        answers[i] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["token_ids"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [completion.token_ids for completion in expected]

    if case.device == "cpu":
        compare_traces(server, models, case, prompts)

    # A client that leaves, and a seed that the server draws: every rank must hear of both.
    with server.client() as client, client.stream("POST", "/v1/completions", json=LONG) as answer:
        next(answer.iter_lines())
    body = {"prompt": "abc", "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]["completion_tokens"] == 12

    lines: list[str] = []
    began = threading.Event()

    def stream() -> None:
        try:
            with server.client() as client, client.stream("POST", "/v1/completions", json=LONG) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    began.set()
        except httpx.HTTPError as error:
            lines.append(f"broken: {type(error).__name__}")

    thread = threading.Thread(target=stream)
    thread.start()
    assert began.wait(60)
    killed = pids[case.killed]
    os.kill(killed, signal.SIGKILL)
    seconds = seconds_until_gone(pids)
    thread.join(60)
    assert server.process.wait(60) == 3
    print(f"{case}: the others were gone {seconds:.2f} s after the kill")
    log = server.log.read_text()
    assert f"rank {case.killed} of {case.ranks} (pid {killed}) was ended by SIGKILL while serving" in log
    assert '"code":"engine_gone"' in [line for line in lines if line][-1]


# What every Python process of the server runs at its start: rank 1 does `what` in place of, or within, `where`.
SABOTAGE = """
import os, signal, sys
if "--rank=1" in sys.orig_argv:
    from slipstream.engine import rank_group
    def {where}(*args, **kwargs):
        {what}
    connect = rank_group.connect
    def connect_and_spoil(*args, **kwargs):
        joined = connect(*args, **kwargs)
        from slipstream.engine.serving import engine_build
        engine_build.load_target = load_target
        return joined
    rank_group.connect = {at_connect}
"""


@pytest.mark.parametrize(
    ("where", "what", "words"),
    [
        ("connect", "os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL while connecting"),
        ("load_target", "raise ValueError('no such luck')", "exit code 1 while loading: ValueError: no such luck"),
    ],
)
def test_a_rank_that_dies_at_the_start_is_named(tiny_server, tiny_models, tmp_path, monkeypatch, where, what, words):
    at_connect = "connect_and_spoil" if where == "load_target" else "spoiled"
    name = where if where == "load_target" else "spoiled"
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE.format(where=name, what=what, at_connect=at_connect))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(AssertionError, match="exit code 1") as error:
        tiny_server.start(tmp_path, tiny_models, K, "--tensor-parallel-size", str(RANKS))
    assert f"rank 1 of {RANKS} (pid" in str(error.value)
    assert words in str(error.value)
    assert not (tmp_path / "state.json").exists()


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def start_and_find_ranks(tiny_server, tiny_models, log: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A server that only begins to start, and the process ids of its engine and ranks."""
    command = tiny_server.command(tiny_models, K, "--tensor-parallel-size", str(RANKS))
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (ranks := [rank for engine in children(process.pid) for rank in children(engine)]):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return process, [*children(process.pid), *ranks]


def test_ctrl_c_while_the_ranks_start_ends_all_quietly(tiny_server, tiny_models, tmp_path):
    process, pids = start_and_find_ranks(tiny_server, tiny_models, tmp_path / "log")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 0
    seconds_until_gone(pids)
    assert (tmp_path / "log").read_text() == "slipstream server: stopped\n"


def test_the_ranks_end_with_the_front(tiny_server, tiny_models, tmp_path):
    process, pids = start_and_find_ranks(tiny_server, tiny_models, tmp_path / "log")
    os.kill(process.pid, signal.SIGKILL)
    print(f"front killed: the ranks were gone after {seconds_until_gone(pids):.2f} s")
    process.wait(60)


def test_no_except_of_rank_0_takes_the_death_of_a_rank_for_its_own():
    before = set(children(os.getpid()))
    ranks = Ranks(EngineOptions("/nowhere", None, 0, tensor_parallel_size=2))

    def serve() -> None:
        with ranks.watched():
            (pid,) = set(children(os.getpid())) - before
            try:
                os.kill(pid, signal.SIGKILL)
                time.sleep(60)
            except Exception:
                pytest.fail("the engine loop would have refused a request for it, and gone on")

    with pytest.raises(SlipstreamError, match=r"rank 1 of 2 \(pid \d+\) was ended by SIGKILL while starting"):
        serve()


def test_threads_are_shared_out():
    options = EngineOptions("t", None, 0)
    cores = len(os.sched_getaffinity(0))
    assert options.threads_per_rank is None
    assert EngineOptions("t", None, 0, tensor_parallel_size=2).threads_per_rank == max(1, cores // 2)
    assert EngineOptions("t", None, 0, tensor_parallel_size=64).threads_per_rank == 1
    assert EngineOptions("t", None, 0, tensor_parallel_size=2, threads=3).threads_per_rank == 3
    for size in (-1, 0, MAX_RANKS + 1, 10**9):
        with pytest.raises(SlipstreamError, match=f"tensor_parallel_size = {size}"):
            EngineOptions("t", None, 0, tensor_parallel_size=size).check()
    EngineOptions("t", None, 0, tensor_parallel_size=MAX_RANKS).check()

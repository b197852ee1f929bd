"""A real server of two ranks: the same answers as one device, effective settings, and its end when a rank dies."""

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch

from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine, EngineConfig
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.loader import load_target
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.serving.engine_options import EngineOptions

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


@pytest.fixture
def server(tiny_server, tiny_models, tmp_path):
    size = ("--tensor-parallel-size", str(RANKS))
    made = tiny_server.start(tmp_path, tiny_models, K, "--dtype", "float32", "--diagnostics", *size)
    yield made
    if made.process.poll() is None:
        made.stop()


def test_two_ranks_serve_what_one_device_serves_until_one_is_killed(server, tiny_models):
    settings = httpx.get(f"{server.url}/slipstream/settings", timeout=60).json()
    assert settings["tensor_parallel_size"] == RANKS
    pids = settings["rank_pids"]
    assert len(set(pids)) == RANKS
    assert pids[0] == settings["engine_pid"] == server.engine_pid
    groups = {os.getpgid(pid) for pid in [*pids, server.process.pid]}
    assert len(groups) == 1  # for who stops it from outside

    target = load_target(tiny_models.target, "float32")
    draft = load_draft(tiny_models.draft, torch.float32, target_embedding=target.embed_tokens.weight).eval()
    config = EngineConfig(num_steps=K, max_running_requests=4, max_context_tokens=128, dtype="float32")
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
    os.kill(pids[1], signal.SIGKILL)
    seconds = seconds_until_gone(pids)
    thread.join(60)
    assert server.process.wait(60) == 3
    print(f"rank 1 of {RANKS} killed while serving: the others were gone after {seconds:.2f} s")
    assert f"rank 1 of {RANKS} (pid {pids[1]}) was ended by SIGKILL while serving" in server.log.read_text()
    assert '"code":"engine_gone"' in [line for line in lines if line][-1]


def test_the_ranks_end_with_the_front(server):
    pids = httpx.get(f"{server.url}/slipstream/settings", timeout=60).json()["rank_pids"]
    os.kill(server.process.pid, signal.SIGKILL)
    print(f"front killed: the ranks were gone after {seconds_until_gone(pids):.2f} s")
    server.process.wait(60)


def test_a_rank_that_dies_at_the_start_is_named_with_its_last_words(tiny_server, tiny_models, tmp_path):
    size = ("--tensor-parallel-size", str(RANKS), "--capture-slots", "99")
    with pytest.raises(AssertionError) as error:
        tiny_server.start(tmp_path, tiny_models, K, *size)
    assert "exit code 1" in str(error.value)
    assert "slots [99] are outside 0..4" in str(error.value)  # whichever rank is first to say so


def test_threads_are_shared_out():
    options = EngineOptions("t", None, 0)
    cores = len(os.sched_getaffinity(0))
    assert options.threads_per_rank is None
    assert EngineOptions("t", None, 0, tensor_parallel_size=2).threads_per_rank == max(1, cores // 2)
    assert EngineOptions("t", None, 0, tensor_parallel_size=1000).threads_per_rank == 1
    assert EngineOptions("t", None, 0, tensor_parallel_size=2, threads=3).threads_per_rank == 3
    with pytest.raises(SlipstreamError, match="tensor_parallel_size = 0"):
        EngineOptions("t", None, 0, tensor_parallel_size=0).check()

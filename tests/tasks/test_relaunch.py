"""SIGKILL of a server, an immediate relaunch at the same port, and hundreds of requests.

Elsewhere a server in the place of one that was killed looked healthy and hung after about a hundred requests
(SGLang's issue 22779): what the dead one left in its port, its shared memory or its ranks was still there.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from slipstream.tasks import launch
from slipstream.tasks.ports import free_port
from slipstream.tasks.process import group_members, read_record
from slipstream.tasks.stage import run_stage

REQUESTS = 300
AT_ONCE = 4  # two run, two wait


@pytest.mark.parametrize(
    "whole", [pytest.param(True, marks=pytest.mark.soak, id="all of it"), pytest.param(False, id="its front")]
)
def test_a_killed_server_is_replaced_at_once_and_serves_hundreds_of_requests(launchable, launch_workdir, whole):
    fixed = launchable.server.model_copy(update={"port": free_port(), "max_running_requests": 2})
    deployment = launchable.model_copy(update={"server": fixed})
    run_stage(launch.STAGE, deployment, launch_workdir)
    first = read_record(launch_workdir / "server.state.json").identity
    with httpx.Client(base_url=f"http://127.0.0.1:{fixed.port}", timeout=60, trust_env=False) as client:
        under_way = ThreadPoolExecutor(2)
        for _ in range(2):  # it dies in the middle of work
            under_way.submit(client.post, "/v1/completions", json=body(0, max_tokens=60))
        for member in group_members(first) if whole else [first]:
            os.kill(member.pid, signal.SIGKILL)
        under_way.shutdown()
    figures = run_stage(launch.STAGE, deployment, launch_workdir).figures
    assert not group_members(first)
    assert figures["base_url"] == f"http://127.0.0.1:{fixed.port}"

    def ask(number):
        answer = httpx.post(f"{figures['base_url']}/v1/completions", json=body(number), timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["completion_tokens"]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        tokens = list(pool.map(ask, range(REQUESTS)))
    assert len(tokens) == REQUESTS
    assert min(tokens) >= 1
    assert read_record(launch_workdir / "server.state.json").identity.pid == figures["pid"]
    assert len(group_members(read_record(launch_workdir / "server.state.json").identity)) == 2  # front and engine live


def body(number, max_tokens=3):
    return {"prompt": [5 + number % 50, 6, 7], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

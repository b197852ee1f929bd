"""What clients do wrong to a real server, and what it tells about itself."""

import asyncio
import os
import signal
import socket
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.engine.serving.trace_file import unpack_trace


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def http(served):
    with served.client() as client:
        yield client
        assert client.get("/health").json()["status"] == "ready"  # nothing that a client does ends the server


def message(answer, status=400):
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.json()["error"]["message"]


def test_a_prompt_longer_than_the_context_names_both_numbers(http):
    words = message(http.post("/v1/completions", json={"prompt": "x" * 300}))
    assert "300 tokens" in words
    assert "128 tokens" in words
    assert "128" in message(http.post("/v1/completions", json={"prompt": [5] * 128}))
    longest = http.post("/v1/completions", json={"prompt": [5] * 127}).json()
    assert longest["usage"]["completion_tokens"] == 1


def test_malformed_json_is_refused(http):
    assert "not valid JSON" in message(http.post("/v1/chat/completions", content=b'{"messages": ['))


def test_a_token_id_that_does_not_exist_is_refused(http):
    assert "out of range" in message(http.post("/v1/completions", json={"prompt": [5, 259]}))


def test_fields_that_are_not_supported_are_refused(http):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for field, value in (("n", 3), ("logit_bias", {"1": 2}), ("presence_penalty", 1), ("tools", [{}]), ("whatever", 1)):
        assert field in message(http.post("/v1/chat/completions", json={**chat, field: value}))


def test_bytes_that_are_no_http_are_answered_and_dropped(served, http):
    with socket.create_connection(("127.0.0.1", served.state["port"]), timeout=10) as raw:
        raw.sendall(b"\x00\x01\x02 nonsense\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_blocks(served, http, stream):
    before = served.stats()
    assert before["free_blocks"] == before["total_blocks"]
    body = b'{"prompt": "abc", "max_tokens": 100, "ignore_eos": true, "stream": %s}' % str(stream).lower().encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    os.kill(served.engine_pid, signal.SIGSTOP)  # the request is surely unfinished when its client leaves
    try:
        with socket.create_connection(("127.0.0.1", served.state["port"]), timeout=10) as raw:
            raw.sendall(head + body)
            wait_for(lambda: http.get("/health").json()["in_flight"] == 1)
        wait_for(lambda: http.get("/health").json()["in_flight"] == 0)
    finally:
        os.kill(served.engine_pid, signal.SIGCONT)
    after = served.stats()
    assert after["running"] == after["waiting"] == 0
    assert after["free_blocks"] == after["total_blocks"]
    assert after["generated_tokens"] - before["generated_tokens"] < 100
    endings = http.get("/metrics").text
    assert 'finish_reason="aborted"' in endings


def test_many_clients_share_the_server(served):
    limits = httpx.Limits(max_connections=12)
    body = {"max_tokens": 20, "temperature": 1, "ignore_eos": True, "return_token_ids": True}

    async def ask():
        async with httpx.AsyncClient(base_url=served.url, timeout=60, limits=limits) as client:
            bodies = [{**body, "prompt": "x" * (i + 1), "seed": i} for i in range(12)]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=one) for one in bodies))
            return [answer.json()["choices"][0]["token_ids"] for answer in answers]

    together = asyncio.run(ask())
    with served.client() as client:
        for i in (0, 5, 11):  # company changes no token
            alone = client.post("/v1/completions", json={**body, "prompt": "x" * (i + 1), "seed": i}).json()
            assert alone["choices"][0]["token_ids"] == together[i]


def test_metrics_add_up(http):
    http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 40, "ignore_eos": True})
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name, sample.labels.get("position"), sample.labels.get("num_steps")] = sample.value
    rounds = found["slipstream_rounds_total", None, "3"]
    hits = [found["slipstream_joint_accepted_rounds_total", str(k), "3"] for k in (1, 2, 3)]
    assert rounds > 0
    assert found["slipstream_engine_rounds_total", None, "3"] > 0
    assert found["slipstream_draft_tokens_total", None, "3"] == 3 * rounds
    assert found["slipstream_accepted_tokens_total", None, "3"] == sum(hits)
    assert rounds >= hits[0] >= hits[1] >= hits[2]
    assert found["slipstream_accept_length", None, "3"] == pytest.approx(1 + sum(hits) / rounds)
    assert found["slipstream_requests_running", None, None] == 0


def test_settings_tell_what_is_in_force(served, http):
    settings = http.get("/slipstream/settings").json()
    assert (settings["num_steps"], settings["verify_width"]) == (3, 4)
    assert settings["slots"] == ["slot_1", "slot_2", "slot_4"]
    assert (settings["dtype"], settings["max_context_tokens"], settings["threads"]) == ("bfloat16", 128, 1)
    assert (settings["pid"], settings["engine_pid"]) == (served.process.pid, served.engine_pid)
    assert settings["draft"]["draft_vocab_size"] == 86
    assert settings["row_invariance"]["promise"]
    assert {"draft", "verify", "rest"} <= set(settings["stats"]["seconds"])


def test_a_trace_comes_as_one_file(http):
    body = {"prompt": "abc", "max_tokens": 12, "ignore_eos": True}
    trace = unpack_trace(http.post("/slipstream/trace", json=body).content)
    plain = http.post("/v1/completions", json={**body, "return_token_ids": True}).json()
    assert trace.token_ids == plain["prompt_token_ids"] + plain["choices"][0]["token_ids"]
    assert set(trace.states) == {"slot_1", "slot_2", "slot_4"}
    assert {state.shape for state in (*trace.states.values(), trace.teacher)} == {(14, 64)}
    assert trace.target_argmax.tolist()[2:] == trace.token_ids[3:]
    assert sum(1 + one.accepted for one in trace.rounds) >= 11
    assert trace.rounds[0].start == 4
    assert trace.rounds[0].draft_logits.shape == (3, 86)
    assert "stream" in message(http.post("/slipstream/trace", json={**body, "stream": True}))

"""The HTTP front over an engine that says what the test wants, with no model and no process."""

import asyncio
import contextlib
import json
import socket
import threading
from types import SimpleNamespace

import httpx
import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.serving.api import Front, create_app
from slipstream.engine.serving.client import EngineClient
from slipstream.engine.serving.engine_process import EngineLoop
from slipstream.engine.serving.protocol import Channel, Phase, Ready

MARK = 0  # end token


class ByteTokenizer:
    """Token b is byte b; 0 is the end mark."""

    stop_token_ids = (MARK,)

    def decode(self, token_ids, skip_special_tokens=True):
        return bytes(b for b in token_ids if b != MARK).decode(errors="replace")

    def encode(self, text):
        return list(text.encode())

    def encode_chat(self, messages):
        if messages[0]["content"] == "no template":
            raise SlipstreamError("no chat template", expected="one", fault="F10")
        return list(messages[0]["content"].encode())


class EchoEngine:
    """Answers the prompt itself, `width` tokens a round, until max_tokens or the end mark.

    A prompt that begins with "!" is refused; one that begins with "#" kills the loop after its first round.
    """

    def __init__(self, width):
        self.width, self.requests, self.aborted, self.params = width, {}, [], {}

    @property
    def has_work(self):
        return bool(self.requests)

    def add_request(self, request):
        if request.prompt_ids[:1] == list(b"!"):
            raise SlipstreamError("a prompt that cannot be", expected="another one")
        self.requests[request.request_id] = [*request.prompt_ids, MARK]
        self.params[request.request_id] = [request.params, request.params.max_tokens]

    def abort(self, request_id):
        self.aborted.append(request_id)
        return self.requests.pop(request_id, None) is not None

    def step(self):
        outputs = []
        for request_id, left in list(self.requests.items()):
            params, room = self.params[request_id]
            taken = left[: min(self.width, room)]
            self.requests[request_id] = left[len(taken) :]
            self.params[request_id][1] = room - len(taken)
            reason = "stop" if taken[-1] == MARK else "length" if room == len(taken) else None
            if reason:
                del self.requests[request_id]
            entries = [SimpleNamespace(logprob=-1.0, top=[(t, -1.0)][: params.logprobs]) for t in taken]
            wanted = params.logprobs is not None
            outputs.append(
                SimpleNamespace(
                    request_id=request_id,
                    new_token_ids=taken,
                    finish_reason=reason,
                    logprobs=entries if wanted else None,
                    trace=None,
                )
            )
            if taken[0] == ord("#"):
                self.dies = True
        if getattr(self, "dies", False) and len(outputs) and outputs[0].new_token_ids[0] != ord("#"):
            raise BrokenPipeError  # as a process that is killed: the socket closes without a word
        return outputs


def talk(script, width=3, ready=True, **front_options):
    """Runs `script(client, front, engine)` against an app whose engine loop runs in a thread."""
    ours, theirs = socket.socketpair()
    engine, channel = EchoEngine(width), Channel(theirs)

    def work():
        if not ready:
            channel.send(Phase("loading the target"))
        else:
            channel.send(Ready({"fingerprint": "f", "num_steps": width - 1}))
        with contextlib.suppress(BrokenPipeError):
            EngineLoop(engine, channel).run()
        theirs.close()

    async def main():
        client = EngineClient(ours)
        front = Front(client, "m", 64, tokenizer=ByteTokenizer(), **front_options)
        reading = asyncio.create_task(client.run())
        thread = threading.Thread(target=work)
        thread.start()
        transport = httpx.ASGITransport(create_app(front), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as http:
            try:
                if ready:
                    await client.ready.wait()
                else:
                    while client.phase == "starting":
                        await asyncio.sleep(0.01)
                return await script(http, front, engine)
            finally:
                await client.stop() if ready else ours.shutdown(socket.SHUT_RDWR)
                await asyncio.wait_for(reading, 10)
                thread.join(10)
                assert not thread.is_alive()

    return asyncio.run(main())


def events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


CASES = [
    ({"prompt": "hello, world"}, "hello, world", "stop", 13),
    ({"prompt": "hello, world", "max_tokens": 5}, "hello", "length", 5),
    ({"prompt": "hello, world", "stop": ["o, w"]}, "hell", "stop", 8),
    ({"prompt": "hello, world", "stop": "zzz"}, "hello, world", "stop", 13),
    ({"prompt": "h€llo", "max_tokens": 3}, "h\ufffd", "length", 3),
    ({"prompt": list(b"abc"), "logprobs": 1, "return_token_ids": True}, "abc", "stop", 4),
]


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(("body", "text", "reason", "count"), CASES)
def test_streamed_and_whole_answers_agree(body, text, reason, count, width):
    async def script(http, front, engine):
        whole = (await http.post("/v1/completions", json=body)).json()
        choice = whole["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, reason)
        assert whole["usage"]["completion_tokens"] == count
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        *chunks, usage, done = events((await http.post("/v1/completions", json={**body, **options})).text)
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"] == whole["usage"] == chunks[-1]["usage"]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]
        if "return_token_ids" in body:
            assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
            assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] == body["prompt"]
            streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
            for key in choice["logprobs"]:
                assert [entry for part in streamed for entry in part[key]] == choice["logprobs"][key]
        await front.client.stop()  # messages are handled in order: an abort, if any was sent, has arrived by now
        assert not engine.has_work
        assert len(engine.aborted) == (2 if text == "hell" else 0)

    talk(script, width)


def test_a_chat_is_rendered_and_answered_in_both_forms():
    async def script(http, front, engine):
        body = {"model": "m", "messages": [{"role": "user", "content": "abcd"}], "logprobs": True, "top_logprobs": 1}
        whole = (await http.post("/v1/chat/completions", json=body)).json()
        assert whole["object"] == "chat.completion"
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": "abcd"}
        assert whole["system_fingerprint"] == "f"
        entry = whole["choices"][0]["logprobs"]["content"][0]
        assert (entry["token"], entry["bytes"], entry["top_logprobs"][0]["token"]) == ("a", [97], "a")
        *chunks, done = events((await http.post("/v1/chat/completions", json={**body, "stream": True})).text)
        assert done == "[DONE]"
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks] == ["assistant", None]
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "abcd"
        assert all("usage" not in chunk for chunk in chunks)

    talk(script)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": "x" * 64}, 400, "the prompt has 64 tokens; the served context, answer included, is 64 tokens"),
        ({"prompt": "x" * 60, "max_tokens": 5}, 400, "60 tokens and max_tokens is 5: together 65"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": "a", "model": "other"}, 404, "'other' is not served here; 'm' is"),
        ({"prompt": "!"}, 400, "a prompt that cannot be; expected another one"),
    ],
)
def test_what_cannot_be_answered_says_why(body, status, words):
    async def script(http, front, engine):
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]
        assert (await http.post("/v1/completions", json={"prompt": "ok"})).status_code == 200

    talk(script)


def test_a_template_that_refuses_is_the_clients_error():
    async def script(http, front, engine):
        body = {"messages": [{"role": "user", "content": "no template"}]}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"

    talk(script)


def test_a_long_prompt_is_tokenised_without_holding_up_the_others():
    async def script(http, front, engine):
        release = threading.Event()
        plain = front.tokenizer.encode

        def slow(text):
            assert release.wait(20), "the other request was held up"
            return plain(text)

        front.tokenizer.encode = slow
        long = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x" * 70_000}))
        await asyncio.sleep(0)
        while not front.tokenizing.locked():
            await asyncio.sleep(0.01)
        assert (await http.post("/v1/completions", json={"prompt": list(b"abc")})).status_code == 200
        release.set()
        answer = await long
        assert answer.status_code == 400
        assert "70000 tokens" in answer.json()["error"]["message"]

    talk(script)


def test_a_server_without_a_usable_template_serves_text_and_says_why_not_chats():
    async def script(http, front, engine):
        chat = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert chat.status_code == 400
        assert "it is broken" in chat.json()["error"]["message"]
        assert (await http.post("/v1/completions", json={"prompt": "ok"})).status_code == 200

    talk(script, chat_problem="it is broken")


def test_an_unlimited_answer_may_fill_the_context():
    async def script(http, front, engine):
        await http.post("/v1/completions", json={"prompt": "x" * 60})
        assert [params.max_tokens for params, _ in engine.params.values()] == [4]

    talk(script)


def test_a_seed_is_drawn_once_for_requests_without():
    async def script(http, front, engine):
        for _ in range(2):
            await http.post("/v1/completions", json={"prompt": "x", "temperature": 1})
        first, second = (params.seed for params, _ in engine.params.values())
        assert first is not None
        assert first != second

    talk(script)


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe", b"[" * 100_000])
def test_malformed_json_is_a_400(body):
    async def script(http, front, engine):
        answer = await http.post("/v1/chat/completions", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"

    talk(script)


def test_the_served_model_answers_to_its_name():
    async def script(http, front, engine):
        front.model_name = "org/m"
        assert (await http.get("/v1/models/org/m")).json() == (await http.get("/v1/models")).json()["data"][0]
        other = await http.get("/v1/models/other")
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")

    talk(script)


def test_half_a_character_never_reaches_the_tokenizer():
    async def script(http, front, engine):
        for path, body in (
            ("completions", b'{"prompt": "\\ud800"}'),
            ("chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        ):
            answer = await http.post(f"/v1/{path}", content=body)
            assert answer.status_code == 400
            assert "lone surrogate" in answer.json()["error"]["message"]

    talk(script)


def test_stop_tokens_that_the_model_does_not_have_are_refused():
    async def script(http, front, engine):
        front.client.settings["vocab_size"] = 256
        answer = await http.post("/v1/completions", json={"prompt": "a", "stop_token_ids": [255, 256]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "stop_token_ids"
        assert "256; the model's token ids are 0 to 255" in answer.json()["error"]["message"]
        answer = await http.post("/v1/completions", json={"prompt": "a", "stop_token_ids": [255]})
        assert answer.status_code == 200

    talk(script)


def test_a_defect_of_ours_is_answered_in_openais_form_and_raised(monkeypatch):
    async def script(http, front, engine):
        monkeypatch.setattr(front.tokenizer, "encode", lambda text: 1 / 0, raising=False)
        with pytest.raises(ZeroDivisionError):  # so that uvicorn logs it
            await http.post("/v1/completions", json={"prompt": "a"})
        http._transport.raise_app_exceptions = False
        answer = await http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "ZeroDivisionError" in answer.json()["error"]["message"]

    talk(script)


def test_a_client_that_hangs_up_while_it_sends_is_no_defect():
    async def script(http, front, engine):
        parts = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
        sent = []

        async def receive():
            return next(parts)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await http._transport.app(scope, receive, send)
        assert sent[0]["status"] == 499

    talk(script)


def test_unknown_routes_and_methods_answer_in_openais_form():
    async def script(http, front, engine):
        for method, path, status in (
            ("GET", "/v2", 404),
            ("GET", "/v1/completions", 405),
            ("POST", "/slipstream/trace", 404),
        ):
            answer = await http.request(method, path)
            assert answer.status_code == status
            assert path in answer.json()["error"]["message"]

    talk(script)


def test_before_it_is_ready_health_tells_the_phase():
    async def script(http, front, engine):
        health = await http.get("/health")
        assert health.status_code == 503
        assert health.json()["phase"] == "loading the target"
        answer = await http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        assert "loading the target" in answer.json()["error"]["message"]
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "m"
        assert (await http.get("/metrics")).status_code == 200

    talk(script, ready=False)


def test_while_it_drains_new_requests_are_refused():
    async def script(http, front, engine):
        assert (await http.get("/health")).json()["status"] == "ready"
        front.draining = True
        health = await http.get("/health")
        assert (health.status_code, health.json()["phase"]) == (503, "draining")
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 503

    talk(script)


def test_a_server_that_was_told_to_leave_says_so_and_answers_all_the_same(tmp_path):
    leave = tmp_path / "leave"

    async def script(http, front, engine):
        leave.touch()
        health = await http.get("/health")
        assert (health.status_code, health.json()["phase"], health.json()["in_flight"]) == (503, "left", 0)
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        leave.unlink()
        assert (await http.get("/health")).status_code == 200

    talk(script, leave_file=leave)


@pytest.mark.parametrize("part", ["body", "answer"])
def test_a_request_is_in_flight_from_its_arrival_to_the_last_byte_of_its_answer(part):
    async def script(http, front, engine):
        async def health():
            return (await http.get("/health")).json()["in_flight"]

        seen = []

        async def body():
            yield b'{"prompt": '
            seen.append(await health())  # the engine has not heard of it
            yield b'"abc", "stream": true}'

        if part == "body":
            assert (await http.post("/v1/completions", content=body())).status_code == 200
        else:
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
            messages = [{"type": "http.request", "body": b'{"prompt": "abc", "stream": true}', "more_body": False}]

            async def receive():
                return messages.pop() if messages else await asyncio.Event().wait()

            async def send(message):
                if b"[DONE]" in message.get("body", b""):
                    seen.append(front.in_flight)  # the engine is done with it
                    assert not engine.has_work

            await create_app(front)(scope, receive, send)
        assert seen == [1]
        assert await health() == 0

    talk(script)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_in_the_middle_ends_answers_with_an_error(stream):
    async def script(http, front, engine):
        answer = await http.post("/v1/completions", json={"prompt": "#23456789", "stream": stream})
        if stream:
            *_, last = events(answer.text)
            assert last != "[DONE]"
            assert last["error"]["code"] == "engine_gone"
        else:
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "server_error"
        assert front.client.gone.is_set()
        assert (await http.get("/health")).json()["phase"] == "failed"
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 503

    talk(script)


def test_finished_requests_are_counted_by_how_they_ended():
    async def script(http, front, engine):
        for body in ({"prompt": "ab"}, {"prompt": "abc", "max_tokens": 1}, {"prompt": "!"}):
            await http.post("/v1/completions", json=body)
        text = front.metrics.text({}).decode()
        for reason in ("stop", "length", "refused"):
            assert f'slipstream_requests_total{{endpoint="completion",finish_reason="{reason}"}} 1.0' in text
        assert "slipstream_generated_tokens_total 4.0" in text
        assert "slipstream_time_to_first_token_seconds_count 2.0" in text

    talk(script)

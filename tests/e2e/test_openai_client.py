"""The real `openai` client against a real server: streamed and whole answers agree."""

import openai
import pytest

MESSAGES = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Name three rivers."}]


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 40},
        {"max_completion_tokens": 25, "temperature": 0.8, "top_p": 0.9, "seed": 7},
        {"max_tokens": 60, "temperature": 1.0, "seed": 11, "extra_body": {"top_k": 20}},
        {"temperature": 1.0, "seed": 5},
        {"max_tokens": 60, "stop": ["a", "e", "\n"], "temperature": 1.0, "seed": 3},
        {"max_tokens": 30, "extra_body": {"ignore_eos": True}, "temperature": 1.0, "seed": 3},
    ],
    ids=["greedy", "nucleus", "top-k", "to the end", "stop strings", "ignore_eos"],
)
def test_a_streamed_chat_equals_a_whole_one(client, options):
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=MESSAGES, **options)
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options
    )
    text, reasons, usage = "", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert reasons == [whole.choices[0].finish_reason]
    assert usage == whole.usage
    assert 0 < usage.completion_tokens <= options.get("max_tokens", options.get("max_completion_tokens", 128))
    if "stop" in options:
        assert reasons == ["stop"]
        assert not any(stop in text for stop in options["stop"])


def test_completions_and_logprobs(client):
    model = client.models.list().data[0].id
    answer = client.completions.create(model=model, prompt="abc", max_tokens=8, logprobs=2, temperature=0)
    found = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == answer.usage.completion_tokens
    for logprob, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 2
        assert logprob == max(top.values()) < 0  # greedy: the chosen token is the most likely one
    chat = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=1)
    for entry in chat.choices[0].logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob


def test_the_client_gets_typed_errors(client):
    model = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match="n = 2 is not supported"):
        client.chat.completions.create(model=model, messages=MESSAGES, n=2)
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x" * 500}])
    assert error.value.code == "context_length_exceeded"


def test_speculation_changes_no_token_over_http(tiny_server, tiny_models, served, tmp_path):
    plain = tiny_server.start(tmp_path, tiny_models, 0)
    try:
        nucleus = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
        for sampling in ({"temperature": 0}, nucleus, {"temperature": 1, "seed": 2}):
            body = {"prompt": "The river", "max_tokens": 60, "return_token_ids": True, "ignore_eos": True, **sampling}
            answers = []
            for server in (plain, served):
                with server.client() as http:
                    answers.append(http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"])
            assert answers[0] == answers[1]
            assert len(answers[0]) == 60
        assert plain.stats()["acceptance"][0]["num_steps"] == 0
    finally:
        plain.stop()

"""Every request field is understood or refused by its name; none is ignored."""

import json

import pytest

from slipstream.engine.serving.openai_types import ApiError, parse

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


def refusal(endpoint, body) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(endpoint, body)
    assert error.value.status == 400
    assert error.value.body()["error"]["type"] == "invalid_request_error"
    return error.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("best_of", 2),
        ("echo", True),
        ("suffix", "x"),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "function"}]),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "none"),
        ("user", "someone"),
        ("guided_json", {}),
        ("anything", 0),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_unsupported_fields_are_refused_by_name(endpoint, field, value):
    error = refusal(endpoint, {**(CHAT if endpoint == "chat" else TEXT), field: value})
    assert error.param == field
    assert field in error.message
    assert error.code == "unsupported_parameter"


def test_values_that_ask_for_what_happens_anyway_pass():
    body = {"n": 1, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "response_format": {"type": "text"}}
    assert parse("chat", {**CHAT, **body}).params.top_p == 1


def test_a_misspelt_field_names_its_neighbour():
    assert "did you mean 'temperature'?" in refusal("chat", {**CHAT, "temprature": 1}).message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", 10**400),
        ("top_k", 1.5),
        ("top_k", -2),
        ("seed", "a"),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", 1.0),
        ("stream", 1),
        ("ignore_eos", "yes"),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "a"),
        ("model", 5),
        ("return_token_ids", "x"),
    ],
)
def test_wrong_values_are_refused_by_name(field, value):
    assert refusal("completion", {**TEXT, field: value}).param == field


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("completion", {"prompt": "a\ud800"}, "prompt"),
        ("completion", {"prompt": ["\udfff"]}, "prompt[0]"),
        ("completion", {"prompt": "a", "stop": ["b", "\ud800"]}, "stop[1]"),
        ("completion", {"prompt": "a", "\ud800": 1}, "\\ud800"),
        ("chat", {"messages": [{"role": "user", "content": "\udc00"}]}, "messages[0].content"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]},
            "messages[0].content[0].text",
        ),
    ],
)
def test_half_a_character_is_refused_by_name(endpoint, body, param):
    error = refusal(endpoint, body)
    assert "lone surrogate" in error.message
    assert error.param == param
    json.dumps(error.body(), ensure_ascii=False).encode()


def test_whole_characters_beyond_16_bits_pass():
    assert parse("completion", {"prompt": json.loads('"\\ud83d\\ude00"')}).prompt == "\U0001f600"


def test_a_body_that_is_no_object_is_refused():
    assert "must be an object" in refusal("chat", [1]).message


def test_values_arrive():
    request = parse(
        "chat",
        {
            **CHAT,
            "model": "m",
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 5,
            "seed": -3,
            "max_completion_tokens": 7,
            "stop": "a",
            "stop_token_ids": [4, 5],
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 3,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        },
    )
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens) == (0.8, 0.9, 5, -3, 7)
    assert (params.stop_token_ids, params.ignore_eos, params.logprobs) == ((4, 5), True, 3)
    assert (request.stop, request.model, request.max_tokens_given) == (("a",), "m", True)
    assert request.stream
    assert request.include_usage
    assert request.continuous_usage
    assert request.return_token_ids


def test_defaults_are_greedy_and_unlimited():
    request = parse("completion", {"prompt": [1, 2], "temperature": None})
    assert request.params.is_greedy
    assert request.params.seed is None
    assert not request.max_tokens_given
    assert request.prompt == [1, 2]


def test_both_names_of_the_limit_must_agree():
    assert parse("chat", {**CHAT, "max_tokens": 5, "max_completion_tokens": 5}).params.max_tokens == 5
    both = {**CHAT, "max_tokens": 5, "max_completion_tokens": 6}
    assert refusal("chat", both).message == "max_tokens is 5 and max_completion_tokens is 6: set one of them"


def test_logprobs_have_two_forms():
    assert parse("chat", {**CHAT, "logprobs": True}).params.logprobs == 0
    assert parse("chat", {**CHAT, "logprobs": False}).params.logprobs is None
    assert parse("completion", {**TEXT, "logprobs": 2}).params.logprobs == 2
    assert refusal("chat", {**CHAT, "top_logprobs": 2}).param == "top_logprobs"
    assert refusal("chat", {**CHAT, "logprobs": True, "top_logprobs": 21}).param == "top_logprobs"
    assert refusal("completion", {**TEXT, "logprobs": 21}).param == "logprobs"


def test_stream_options_belong_to_streams():
    assert refusal("chat", {**CHAT, "stream_options": {"include_usage": True}}).param == "stream_options"
    options = {"stream": True, "stream_options": {"more": 1}}
    assert refusal("chat", {**CHAT, **options}).param == "stream_options.more"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": "y"}, "messages[0].name"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "extra": 1}]}, "messages[0].content[0].extra"),
        ("hi", "messages[0]"),
    ],
)
def test_messages_are_checked(message, param):
    assert refusal("chat", {"messages": [message]}).param == param


@pytest.mark.parametrize("messages", [None, [], "hi"])
def test_messages_are_needed(messages):
    assert refusal("chat", {"messages": messages}).param == "messages"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse("chat", {"messages": [{"role": "user", "content": parts, "tool_calls": None}]})
    assert request.messages == [{"role": "user", "content": "ab"}]


def test_prompts_have_four_forms_and_one_at_a_time():
    for prompt, expected in (("a", "a"), ([1], [1]), (["a"], "a"), ([[1, 2]], [1, 2])):
        assert parse("completion", {"prompt": prompt}).prompt == expected
    assert "send one request for each prompt" in refusal("completion", {"prompt": ["a", "b"]}).message
    for prompt in (None, [], [1, "a"], [-1], {}):
        assert refusal("completion", {"prompt": prompt}).param == "prompt"

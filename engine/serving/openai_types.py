"""Requests and answers in OpenAI's form. What we cannot do is refused by its name; nothing is ignored."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_STOP_STRINGS = 16
ROLES = ("system", "user", "assistant")

# Fields that we know and do not support, with the values that ask for exactly what happens anyway. Those pass (clients
# send them unasked); any other value is refused. Null always means "not set".
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


class ApiError(Exception):
    """An answer other than 200, in OpenAI's form. param: the field at fault. code: short, for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request.

    Args:
        model: name asked for, or None.
        messages: of a chat; None for a completion.
        prompt: of a completion, as text or as token ids; None for a chat.
        params: how to sample; `max_tokens` is meaningless while `max_tokens_given` is false.
        max_tokens_given: whether the client set a limit.
        stop: stop strings.
        stream, include_usage, continuous_usage: server-sent events; usage at the end; usage in every event.
        return_token_ids: add the ids of prompt and answer.
    """

    model: str | None
    messages: list[dict[str, str]] | None
    prompt: str | list[int] | None
    params: SamplingParams
    max_tokens_given: bool
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


def parse(endpoint: Literal["chat", "completion"], body: Any) -> GenerationRequest:
    """Checks a decoded JSON body field by field. Raises ApiError (400) that names the first bad one."""
    if not isinstance(body, Mapping):
        raise ApiError(400, f"the request body is a JSON {_json_type(body)}; it must be an object")
    _check_texts(body)
    special = {"messages", "max_completion_tokens", "top_logprobs"} if endpoint == "chat" else {"prompt"}
    known = {*_READERS, "logprobs", *special}
    for name, value in body.items():
        if name in NEUTRAL:
            if value is not None and not any(_same(value, neutral) for neutral in NEUTRAL[name]):
                raise _unsupported(name, f"only {_either(NEUTRAL[name])} is accepted", value)
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise _unsupported(name, f"did you mean {near[0]!r}?" if near else f"known are {sorted(known)}", value)
    values = {name: read(name, body.get(name)) for name, read in _READERS.items()}
    max_tokens = values.pop("max_tokens")
    if endpoint == "chat":
        # Newer clients say max_completion_tokens; both mean the same here.
        renamed = _integer("max_completion_tokens", body.get("max_completion_tokens"))
        if max_tokens is not None and renamed is not None and max_tokens != renamed:
            message = f"max_tokens is {max_tokens} and max_completion_tokens is {renamed}: set one of them"
            raise ApiError(400, message, param="max_completion_tokens")
        max_tokens = max_tokens if renamed is None else renamed
    params = SamplingParams(
        temperature=values.pop("temperature") or 0.0,
        top_k=_top_k(values.pop("top_k")),
        top_p=1.0 if (top_p := values.pop("top_p")) is None else top_p,
        seed=values.pop("seed"),
        max_tokens=1 if max_tokens is None else max_tokens,
        stop_token_ids=values.pop("stop_token_ids"),
        ignore_eos=values.pop("ignore_eos"),
        logprobs=_chat_logprobs(body) if endpoint == "chat" else _integer("logprobs", body.get("logprobs")),
    )
    try:
        params.validate()
    except SlipstreamError as error:
        raise ApiError(400, f"{error.found}; expected {error.expected}", param=error.found.split(" ")[0]) from error
    options = values.pop("stream_options")
    if options and not values["stream"]:
        raise ApiError(400, "stream_options is set, but stream is not true", param="stream_options")
    return GenerationRequest(
        messages=_messages(body.get("messages")) if endpoint == "chat" else None,
        prompt=_prompt(body.get("prompt")) if endpoint == "completion" else None,
        params=params,
        max_tokens_given=max_tokens is not None,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        **values,
    )


def _check_texts(body: Any) -> None:
    """Refuses half a surrogate pair in any text: JSON can say it, but it is no character and no tokenizer takes it."""
    left = [("", body)]
    while left:
        where, value = left.pop()
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            shown = ascii(where)[1:-1]
            message = f"{shown} holds a lone surrogate (half a character, \\ud800 to \\udfff): it is not valid text"
            raise ApiError(400, message, param=shown)
        if isinstance(value, Mapping):
            for key, inner in value.items():
                name = f"{where}.{key}" if where else key
                left += [(name, inner), (name, key)]
        elif isinstance(value, list):
            left += [(f"{where}[{i}]", inner) for i, inner in enumerate(value) if isinstance(inner, str | dict | list)]


# ---- one reader a kind of value; null and a missing field are the same


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise _wrong_type(name, value, "true or false")
    return bool(value)


def _integer(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise _wrong_type(name, value, "a whole number")
    return value


def _number(name: str, value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise _wrong_type(name, value, "a number")
    return value


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _wrong_type(name, value, "a text")
    return value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not _is_id_list(value):
        raise _wrong_type(name, value, "a list of token ids")
    return tuple(value)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(stops, tuple | list) or not all(isinstance(s, str) for s in stops):
        raise _wrong_type(name, value, "a text or a list of texts")
    if any(not s for s in stops):
        raise ApiError(400, "stop holds an empty text, which would end every answer at once", param=name)
    if len(stops) > MAX_STOP_STRINGS:
        raise ApiError(400, f"stop holds {len(stops)} texts; at most {MAX_STOP_STRINGS} are supported", param=name)
    return tuple(stops)


def _stream_options(name: str, value: Any) -> dict[str, bool]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong_type(name, value, "an object")
    for key in value:
        if key not in ("include_usage", "continuous_usage_stats"):
            raise _unsupported(f"{name}.{key}", "known are include_usage and continuous_usage_stats", value[key])
    return {key: _flag(f"{name}.{key}", flag) for key, flag in value.items()}


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "model": _text,
    "stream": _flag,
    "stream_options": _stream_options,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "seed": _integer,
    "max_tokens": _integer,
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "return_token_ids": _flag,
}


def _top_k(value: int | None) -> int:
    """vLLM's clients say -1 for off, transformers' say 0."""
    return 0 if value in (None, -1) else value


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    wanted = _flag("logprobs", body.get("logprobs"))
    top = _integer("top_logprobs", body.get("top_logprobs"))
    if top is not None and not wanted:
        raise ApiError(400, "top_logprobs is set, but logprobs is not true", param="top_logprobs")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise ApiError(400, f"top_logprobs is {top}; expected 0 to {MAX_LOGPROBS}", param="top_logprobs")
    return (top or 0) if wanted else None


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages must be a list of at least one message", param="messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(where: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _wrong_type(where, message, "an object with role and content")
    for key, value in message.items():
        if key not in ("role", "content") and value not in (None, [], ""):
            raise _unsupported(f"{where}.{key}", "known are role and content", value)
    role = message.get("role")
    if role not in ROLES:
        raise _unsupported(f"{where}.role", f"known are {list(ROLES)}", role)
    content = message.get("content")
    if isinstance(content, list):  # parts; a text in several pieces is still a text
        content = "".join(_text_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise _wrong_type(f"{where}.content", content, "a text")
    return {"role": role, "content": content}


def _text_part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise _unsupported(where, "only parts of type 'text' are supported", kind)
    if set(part) != {"type", "text"}:
        raise _unsupported(f"{where}.{sorted(set(part) - {'type', 'text'})[0]}", "known are type and text", part)
    return part["text"]


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a batch of one
    if isinstance(value, str) or (_is_id_list(value) and value):
        return value
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        raise _unsupported("prompt", "send one request for each prompt", f"{len(value)} prompts")
    raise ApiError(400, "prompt must be a text or a list of at least one token id", param="prompt")


def _is_id_list(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(v) for v in values)


def _unsupported(name: str, hint: str, value: Any) -> ApiError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return ApiError(400, f"{name} = {shown} is not supported: {hint}", param=name, code="unsupported_parameter")


def _wrong_type(name: str, value: Any, expected: str) -> ApiError:
    return ApiError(400, f"{name} is a JSON {_json_type(value)}; expected {expected}", param=name)


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")

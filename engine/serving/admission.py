"""What becomes of a request before it reaches the engine: it is checked, and its prompt turned into token ids."""

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.serving.answers import Answer
from slipstream.engine.serving.generation import Generation
from slipstream.engine.serving.openai_types import ApiError, GenerationRequest, parse

if TYPE_CHECKING:
    from slipstream.engine.serving.api import Front

# Tokenised at once; a longer prompt would hold up everybody's stream, and goes to a thread.
INLINE_PROMPT_CHARACTERS = 1 << 16
Endpoint = Literal["chat", "completion"]


@dataclass
class Job:
    """One accepted request: what was asked, its prompt as ids, its answer in the making."""

    endpoint: Endpoint
    request: GenerationRequest
    prompt_ids: list[int]
    generation: Generation
    answer: Answer
    arrived: float


async def admit(front: "Front", endpoint: Endpoint, body: Any, arrived: float) -> Job:
    """Checks a request and turns its prompt into ids. Raises ApiError."""
    tokenizer = front.usable_tokenizer()
    request = parse(endpoint, body)
    if request.model is not None:
        front.check_model(request.model)
    _check_stop_ids(request.params.stop_token_ids, front.client.settings.get("vocab_size"))
    if front.chat_problem and request.messages is not None:
        raise ApiError(400, f"chats cannot be served: {front.chat_problem}", param="messages", code="no_chat_template")
    if _text_length(request) <= INLINE_PROMPT_CHARACTERS:
        prompt_ids = _prompt_ids(tokenizer, request)
    else:
        async with front.tokenizing:  # one at a time: the others keep their core
            prompt_ids = await asyncio.to_thread(_prompt_ids, tokenizer, request)
    context, given = front.max_context_tokens, request.params.max_tokens
    if len(prompt_ids) >= context:
        raise ApiError(
            400,
            f"the prompt has {len(prompt_ids)} tokens; the served context, answer included, is {context} tokens",
            param="messages" if endpoint == "chat" else "prompt",
            code="context_length_exceeded",
        )
    if request.max_tokens_given and len(prompt_ids) + given > context:
        raise ApiError(
            400,
            f"the prompt has {len(prompt_ids)} tokens and max_tokens is {given}: together {len(prompt_ids) + given}; "
            f"the served context is {context} tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    params = request.params
    if not request.max_tokens_given:
        params = replace(params, max_tokens=context - len(prompt_ids))
    if endpoint == "chat" and not params.ignore_eos:  # the template's end of an answer ends it, as it does in training
        params = replace(params, stop_token_ids=tuple({*params.stop_token_ids, *tokenizer.stop_token_ids}))
    params = params.with_seed()
    return Job(
        endpoint=endpoint,
        request=replace(request, params=params),
        prompt_ids=prompt_ids,
        generation=Generation(tokenizer, len(prompt_ids), request.stop, params.logprobs is not None),
        answer=Answer(
            endpoint,
            front.model_name,
            tokenizer,
            str(front.client.settings.get("fingerprint", "")),
            prompt_ids if request.return_token_ids else None,
        ),
        arrived=arrived,
    )


def _check_stop_ids(ids: tuple[int, ...], vocab_size: int | None) -> None:
    unknown = [i for i in ids if vocab_size is not None and i >= vocab_size]
    if unknown and vocab_size is not None:
        message = f"stop_token_ids holds {unknown[0]}; the model's token ids are 0 to {vocab_size - 1}"
        raise ApiError(400, message, param="stop_token_ids")


def _text_length(request: GenerationRequest) -> int:
    """Roughly the length of what has to be tokenised, in characters."""
    if isinstance(request.prompt, list):
        return 0
    return len(request.prompt or "") + sum(len(str(m.get("content", ""))) for m in request.messages or ())


def _prompt_ids(tokenizer: ChatTokenizer, request: GenerationRequest) -> list[int]:
    if isinstance(request.prompt, list):
        return request.prompt
    try:
        if request.messages is not None:
            return tokenizer.encode_chat(request.messages)
        prompt_ids = tokenizer.encode(request.prompt or "")
    except SlipstreamError as error:
        raise ApiError(400, f"{error.found}; expected {error.expected}", param="messages") from error
    if not prompt_ids:
        raise ApiError(400, "the prompt is empty", param="prompt")
    return prompt_ids

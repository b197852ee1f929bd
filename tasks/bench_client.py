"""A small closed-loop client of an OpenAI-compatible server: sends chats, notes when what arrived.

Token counts come from the server's usage, never from chunks: with speculation a chunk holds one to K + 1 tokens.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from slipstream.engine.errors import SlipstreamError

REQUEST_TIMEOUT_SECONDS = 600.0
ERROR_TEXT_CHARS = 400


@dataclass(frozen=True)
class Prompt:
    """One chat to send. `messages` are OpenAI messages, the last one from the user."""

    id: str
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Chunk:
    """One streamed output. seconds: since the request was sent. tokens: completion tokens so far, None if not told."""

    seconds: float
    tokens: int | None


@dataclass(frozen=True)
class Answer:
    """One answered request, as the client saw it.

    Attributes:
        prompt_id: id of the prompt.
        text: the answer.
        token_ids: its tokens, empty when the server does not tell them.
        prompt_tokens, output_tokens: from the server's usage.
        finish_reason: "stop", "length", ...
        chunks: the outputs in order of arrival.
        seconds: from sending the request to its end.
    """

    prompt_id: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    chunks: tuple[Chunk, ...]
    seconds: float

    @property
    def ttft_ms(self) -> float:
        """Time to first token: sending -> first output, in milliseconds."""
        return 1000 * self.chunks[0].seconds

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first output. Its own tokens are counted where the server tells them, else taken as one."""
        return self.output_tokens - (self.chunks[0].tokens or 1)

    @property
    def decode_seconds(self) -> float:
        """First output -> last output."""
        return self.chunks[-1].seconds - self.chunks[0].seconds

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first output, in milliseconds; None when there was only one output."""
        return 1000 * self.decode_seconds / self.decode_tokens if self.decode_tokens > 0 else None

    @property
    def itl_ms(self) -> list[float]:
        """Gaps between outputs (inter-token latency by its usual name), in milliseconds."""
        return [1000 * (b.seconds - a.seconds) for a, b in zip(self.chunks, self.chunks[1:], strict=False)]


def ask_all(
    url: str,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    concurrency: int = 1,
    seed: int = 0,
    temperature: float = 0.0,
    options: dict[str, Any] | None = None,
) -> list[Answer]:
    """Sends every prompt, `concurrency` at a time, each as soon as one before it ends (closed loop).

    Args:
        url: root of the server, without /v1.
        max_tokens: longest answer, in tokens.
        seed: the request's seed.
        options: further fields of the request body.

    Returns: answers in the order of `prompts`.
    Raises SlipstreamError when the server refuses a request, breaks off an answer, or is gone.
    """
    body = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        **(options or {}),
    }
    return asyncio.run(_closed_loop(url, prompts, body, concurrency))


async def _closed_loop(url: str, prompts: Sequence[Prompt], body: dict[str, Any], concurrency: int) -> list[Answer]:
    answers: list[Answer | None] = [None] * len(prompts)
    queue = iter(enumerate(prompts))

    async def worker(client: httpx.AsyncClient) -> None:
        for index, prompt in queue:  # one iterator for all workers: each takes the next prompt
            answers[index] = await _ask(client, url, prompt, body)

    timeout = httpx.Timeout(REQUEST_TIMEOUT_SECONDS)
    async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(prompts))):
                    group.create_task(worker(client))
        except* SlipstreamError as group_error:
            raise group_error.exceptions[0] from None
    return [answer for answer in answers if answer is not None]


async def _ask(client: httpx.AsyncClient, url: str, prompt: Prompt, body: dict[str, Any]) -> Answer:
    started = time.perf_counter()
    text: list[str] = []
    token_ids: list[int] = []
    chunks: list[Chunk] = []
    finish_reason, usage = "", None
    request = {**body, "messages": list(prompt.messages)}
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=request) as response:
            if response.status_code != 200:
                raise _refused(url, prompt, response.status_code, (await response.aread()).decode(errors="replace"))
            async for event in _events(response):
                seconds = time.perf_counter() - started
                if "error" in event:
                    raise _broken(url, prompt, event["error"].get("message", str(event["error"])))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    delta = choice["delta"].get("content") or ""
                    ids = choice.get("token_ids") or []
                    if delta or ids:  # an event with a role or a finish reason alone is no output
                        text.append(delta)
                        token_ids.extend(ids)
                        told = (event.get("usage") or {}).get("completion_tokens")
                        chunks.append(Chunk(seconds, told))
                    finish_reason = choice.get("finish_reason") or finish_reason
    except httpx.HTTPError as error:
        raise _broken(url, prompt, f"{type(error).__name__}: {error}") from error
    if usage is None or not finish_reason or not chunks:
        raise _broken(url, prompt, "the stream ended without a finish reason, a usage and an output")
    return Answer(
        prompt_id=prompt.id,
        text="".join(text),
        token_ids=tuple(token_ids),
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        finish_reason=finish_reason,
        chunks=tuple(chunks),
        seconds=time.perf_counter() - started,
    )


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            yield json.loads(data)


def _refused(url: str, prompt: Prompt, status: int, text: str) -> SlipstreamError:
    return SlipstreamError(
        f"the server at {url} refused prompt {prompt.id} with status {status}: {text[:ERROR_TEXT_CHARS]}",
        expected="an answer",
        do="read the message; shorten the benchmark's prompts or raise server.max_context_tokens where it says so",
    )


def _broken(url: str, prompt: Prompt, why: str) -> SlipstreamError:
    return SlipstreamError(
        f"the server at {url} did not finish its answer to prompt {prompt.id}: {why}",
        expected="a complete answer",
        do="look at the end of the server's log; what was measured so far is kept, run the same command again to go on",
    )

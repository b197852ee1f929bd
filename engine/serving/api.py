"""The HTTP front: routes, checks of requests, streaming. No tensor and no model is touched here."""

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.serving.admission import Endpoint, Job, admit
from slipstream.engine.serving.answers import DONE, event
from slipstream.engine.serving.client import EngineClient, EngineGone, RequestRefused
from slipstream.engine.serving.generation import Delta
from slipstream.engine.serving.metrics import Metrics
from slipstream.engine.serving.openai_types import ApiError
from slipstream.engine.serving.protocol import Tokens, Traced

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_BODY_BYTES = 32 << 20
HUNG_UP = 499  # as nginx says it


@dataclass
class Front:
    """Everything that the routes share.

    Args:
        client: the engine.
        model_name: name under which the target is served.
        max_context_tokens: longest prompt + answer.
        diagnostics: whether /slipstream/trace exists.
        tokenizer: None until it is loaded.
        chat_problem: why the chat template cannot be used, found when it was loaded; "" when it can.
        draining: no new requests: the server is about to end.
        leave_file: while it is there, /health tells whoever sends requests to send no more; those that come are
            answered. None: nobody can ask for that.
        in_flight: requests from their arrival to the last byte of their answer.
    """

    client: EngineClient
    model_name: str
    max_context_tokens: int
    diagnostics: bool = False
    tokenizer: ChatTokenizer | None = None
    chat_problem: str = ""
    draining: bool = False
    leave_file: Path | None = None
    in_flight: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    started: float = field(default_factory=time.time)
    tokenizing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def not_ready(self) -> str:
        """Why requests cannot be served now; "" when they can."""
        if self.client.gone.is_set():
            return self.client.death
        if self.draining:
            return "the server is shutting down"
        if self.tokenizer is None or not self.client.ready.is_set():
            return f"the server is not ready: {self.phase()}"
        return ""

    def left(self) -> bool:
        """Whether whoever balances load shall send no more requests, though they would be answered."""
        return self.leave_file is not None and self.leave_file.exists()

    def phase(self) -> str:
        """What is going on, for people who wait."""
        if self.client.gone.is_set():
            return "failed"
        if self.draining:
            return "draining"
        if self.client.ready.is_set() and self.tokenizer is None:
            return "loading the tokenizer"
        return "left" if self.client.ready.is_set() and self.left() else self.client.phase

    def model(self) -> dict[str, Any]:
        """The served model, as OpenAI's clients list it."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": int(self.started),
            "owned_by": "slipstream",
            "max_model_len": self.max_context_tokens,
        }

    def check_model(self, name: str) -> None:
        """Raises ApiError (404) for a model that is not served."""
        if name != self.model_name:
            message = f"model {name!r} is not served here; {self.model_name!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")

    def usable_tokenizer(self) -> ChatTokenizer:
        """The tokenizer of a server that is ready. Raises ApiError (503) of one that is not."""
        reason = self.not_ready()
        if reason or self.tokenizer is None:
            raise ApiError(503, reason, code="not_ready")
        return self.tokenizer


def create_app(front: Front) -> FastAPI:
    """The application with all routes."""
    app = FastAPI(title="Slipstream", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(EngineGone, _engine_gone)
    app.add_exception_handler(ClientDisconnect, _hung_up)
    app.add_exception_handler(Exception, _unforeseen)
    app.add_middleware(_CountInFlight, front=front)

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        return await _answer(front, "chat", http)

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await _answer(front, "completion", http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [front.model()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        front.check_model(name)
        return front.model()

    @app.get("/health")
    async def health() -> JSONResponse:
        reason = front.not_ready() or ("it was told to leave; what still comes is answered" if front.left() else "")
        body = {
            "status": "unavailable" if reason else "ready",
            "phase": front.phase(),
            "seconds": round(time.time() - front.started, 3),
            "in_flight": front.in_flight,
        }
        return JSONResponse({**body, "reason": reason} if reason else body, 503 if reason else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        stats = await front.client.stats() if front.client.ready.is_set() else {}
        return Response(front.metrics.text(stats), media_type=CONTENT_TYPE_LATEST)

    @app.get("/slipstream/settings")
    async def settings() -> dict[str, Any]:
        front.usable_tokenizer()
        own = {"model": front.model_name, "pid": os.getpid(), "chat_problem": front.chat_problem}
        return {**front.client.settings, **own, "stats": await front.client.stats()}

    if front.diagnostics:

        @app.post("/slipstream/trace")
        async def trace(http: Request) -> Response:
            return await _trace(front, http)

    return app


class _CountInFlight:
    """Counts requests around all that happens to them: one whose body still comes, or whose answer still goes, too."""

    def __init__(self, app: "ASGIApp", front: Front) -> None:
        self._app, self._front = app, front

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        asks = int(scope["type"] == "http" and scope["method"] == "POST")
        self._front.in_flight += asks
        try:
            await self._app(scope, receive, send)
        finally:
            self._front.in_flight -= asks


# ---- errors


async def _api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status)


async def _http_error(http: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code)


async def _engine_gone(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse(ApiError(503, str(error), code="engine_gone").body(), 503)


async def _hung_up(_: Request, __: Exception) -> Response:
    return Response(status_code=HUNG_UP)  # nobody is there to read it


async def _unforeseen(_: Request, error: Exception) -> JSONResponse:
    """A defect of ours. Starlette raises it again after the answer, and uvicorn logs the traceback."""
    message = f"internal error ({type(error).__name__}); the server's log has the traceback"
    return JSONResponse(ApiError(500, message, code="internal_error").body(), 500)


# ---- one request


async def _answer(front: Front, endpoint: Endpoint, http: Request) -> Response:
    arrived = time.perf_counter()
    job = await admit(front, endpoint, await _json(http), arrived)
    if job.request.stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(_events(front, job), media_type="text/event-stream", headers=headers)
    deltas = await _unless_disconnected(http, _collect(front, job))
    if deltas is None:
        return Response(status_code=HUNG_UP)  # nobody is there to read it
    return JSONResponse(job.answer.whole(deltas, job.generation))


async def _json(http: Request) -> Any:
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the request body is longer than {MAX_BODY_BYTES:,} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from error


async def _deltas(front: Front, job: Job) -> AsyncGenerator[Delta]:
    """Runs a job on the engine; one item a round. Leaving early aborts it."""
    metrics = front.metrics
    metrics.prompt_tokens.inc(len(job.prompt_ids))
    last, reason = 0.0, "aborted"
    try:
        async with aclosing(front.client.generate(job.answer.id, job.prompt_ids, job.request.params)) as rounds:
            async for tokens in rounds:
                assert isinstance(tokens, Tokens)
                now = time.perf_counter()
                if last:
                    metrics.chunk_gap.observe(now - last)
                else:
                    metrics.first_token.observe(now - job.arrived)
                last = now
                delta = job.generation.push(tokens)
                yield delta
                if delta.finish_reason is not None:
                    reason = delta.finish_reason
                    metrics.request_seconds.observe(now - job.arrived)
                    break
    except RequestRefused as error:
        reason = "refused"
        raise ApiError(400, str(error)) from error
    except EngineGone:
        reason = "engine_gone"
        raise
    finally:
        metrics.generated_tokens.inc(job.generation.completion_tokens)
        metrics.requests.labels(job.endpoint, reason).inc()


async def _collect(front: Front, job: Job) -> list[Delta]:
    async with aclosing(_deltas(front, job)) as deltas:
        return [delta async for delta in deltas]


async def _events(front: Front, job: Job) -> AsyncIterator[bytes]:
    """The server-sent events of a job. An error that comes too late for a status code is an event of its own."""
    request, generation = job.request, job.generation
    try:
        async with aclosing(_deltas(front, job)) as deltas:
            async for delta in deltas:
                says_something = delta.text or delta.finish_reason or delta.logprobs or request.return_token_ids
                if says_something:
                    usage = generation.usage() if request.continuous_usage else None
                    yield event(job.answer.chunk(delta, usage))
    except EngineGone as error:
        yield event(ApiError(503, str(error), code="engine_gone").body())
        return
    except ApiError as error:
        yield event(error.body())
        return
    if request.include_usage:
        yield event(job.answer.usage_chunk(generation.usage()))
    yield DONE


async def _unless_disconnected(http: Request, work: Any) -> Any:
    """The result of `work`; None, and `work` cancelled, when the client hangs up first."""
    task = asyncio.ensure_future(work)
    hung_up = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({task, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        hung_up.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _trace(front: Front, http: Request) -> Response:
    """Runs a request with everything recorded; the answer is a safetensors file (see trace_file.pack_trace)."""
    body = await _json(http)
    endpoint: Endpoint = "chat" if isinstance(body, dict) and "messages" in body else "completion"
    job = await admit(front, endpoint, body, time.perf_counter())
    if job.request.stream or job.request.stop:
        raise ApiError(400, "a trace is one file: stream and stop are not supported here", param="stream")

    async def traced() -> bytes | None:
        rounds = front.client.generate(job.answer.id, job.prompt_ids, job.request.params, trace=True)
        async with aclosing(rounds):
            async for item in rounds:
                if isinstance(item, Traced):
                    return item.data
        return None

    try:
        data = await _unless_disconnected(http, traced())
    except RequestRefused as error:
        raise ApiError(400, str(error)) from error
    return Response(data or b"", media_type="application/octet-stream", status_code=200 if data else HUNG_UP)

"""Made-up measurements: pairs with chosen speeds, and servers that answer by a script."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from slipstream.engine.acceptance import AcceptanceCounts
from slipstream.tasks.bench_client import Answer, Chunk
from slipstream.tasks.bench_pairs import Measured, Pair
from slipstream.tasks.counters import Counters


def make_answer(prompt_id: str, tokens: list[int], step_ms: float, ttft_ms: float = 20.0) -> Answer:
    """An answer of one first token and then one chunk every `step_ms` with `tokens[i]` tokens."""
    chunks, total = [Chunk(ttft_ms / 1000, 1)], 1
    for i, count in enumerate(tokens, start=1):
        total += count
        chunks.append(Chunk((ttft_ms + i * step_ms) / 1000, total))
    return Answer(prompt_id, "x" * total, tuple(range(total)), 7, total, "length", tuple(chunks), chunks[-1].seconds)


def make_pair(
    index: int,
    *,
    num_steps: int = 3,
    accepted: tuple[int, ...] = (1, 2, 0, 3, 1, 2),
    plain_ms: float = 10.0,
    round_ms: float = 20.0,
    draft_ms: float = 4.0,
    verify_ms: float = 12.0,
    repeat: int = 0,
) -> Pair:
    """One prompt on both servers: rounds that accepted `accepted` drafts, and equally many plain steps as tokens."""
    lengths = [a + 1 for a in accepted]
    counts = AcceptanceCounts(num_steps)
    for number, a in enumerate(accepted):
        counts.add(a, ends_request=number == len(accepted) - 1)
    tokens, rounds = sum(lengths), len(lengths)
    plain = AcceptanceCounts(0)
    for number in range(tokens):
        plain.add(0, ends_request=number == tokens - 1)
    seconds = {"prefill": 0.01, "draft": 0.0, "verify": plain_ms * tokens / 1000, "rest": 0.0}
    spec_seconds = {
        "prefill": 0.01,
        "draft": draft_ms * rounds / 1000,
        "verify": verify_ms * rounds / 1000,
        "rest": 0.0,
    }
    name = f"p{index}"
    return Pair(
        index,
        repeat,
        "baseline",
        _measured(make_answer(name, [1] * tokens, plain_ms), Counters(seconds, tokens, {0: plain})),
        _measured(make_answer(name, lengths, round_ms), Counters(spec_seconds, rounds, {num_steps: counts})),
    )


def _measured(answer: Answer, counters: Counters) -> Measured:
    return Measured((answer,), counters, answer.seconds)


@contextmanager
def scripted_server(answer: Callable[[dict[str, Any], BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """An HTTP server whose POSTs are answered by `answer(body, handler)`. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer(body, self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def send_events(handler: BaseHTTPRequestHandler, events: list[Any], gap_seconds: float = 0.0) -> None:
    """A stream of server-sent events; strings as they are, everything else as JSON."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.end_headers()
    for event in events:
        data = event if isinstance(event, str) else json.dumps(event)
        handler.wfile.write(f"data: {data}\n\n".encode())
        handler.wfile.flush()
        time.sleep(gap_seconds)


def chunk(text: str, ids: list[int], total: int | None, finish: str | None = None) -> dict[str, Any]:
    """One streamed event; `total` = completion tokens so far, None when the server does not tell."""
    event: dict[str, Any] = {"choices": [{"delta": {"content": text}, "token_ids": ids, "finish_reason": finish}]}
    if total is not None:
        event["usage"] = {"prompt_tokens": 5, "completion_tokens": total}
    return event

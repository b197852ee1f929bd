"""Messages between the HTTP front and the engine process, and the socket that carries them.

Both are processes of one server, joined by an unnamed socket pair that no third process can open; messages are pickled
dataclasses behind a length. The engine's end never blocks on a slow reader: what does not fit into the socket waits in
memory, and goes out between rounds.
"""

import pickle
import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.sequence import Request

LENGTH = struct.Struct("!Q")
READ_BYTES = 1 << 18


# ---- front -> engine


@dataclass(frozen=True)
class Submit:
    """A request. prompt_ids: token ids of the prompt. trace: record states and drafts (diagnostics)."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    trace: bool = False


@dataclass(frozen=True)
class Abort:
    """The client left, or a stop string ended the text: free the request's blocks."""

    request_id: str


@dataclass(frozen=True)
class GetStats:
    """Asks for `Stats` with the same ticket."""

    ticket: int


@dataclass(frozen=True)
class Stop:
    """Leave after what is running."""


# ---- engine -> front


@dataclass(frozen=True)
class Phase:
    """What the engine is doing before it is ready."""

    text: str


@dataclass(frozen=True)
class Ready:
    """Loaded and warm. settings: effective values, as JSON (see engine_build.effective_settings)."""

    settings: dict[str, Any]


@dataclass(frozen=True)
class Tokens:
    """Tokens of one request from one round.

    logprobs: one entry a token when asked for: (log-probability of the token, [(token id, log-probability), ...] of the
    most likely ones, best first).
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None


@dataclass(frozen=True)
class Round:
    """Everything that one engine step gave, in one message."""

    outputs: list[Tokens]


@dataclass(frozen=True)
class Traced:
    """The trace of a finished request as the bytes of a safetensors file."""

    request_id: str
    data: bytes


@dataclass(frozen=True)
class Refused:
    """The engine did not take a request: why, for the client."""

    request_id: str
    reason: str


@dataclass(frozen=True)
class Stats:
    """Counters since start, as JSON (see engine_build.engine_stats)."""

    ticket: int
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """The engine ends with an error: what to tell people."""

    reason: str


# ---- between rank 0 and another rank (which also know Abort, Stop and Failed)


@dataclass(frozen=True)
class Here:
    """A rank has started, and waits for `Connect`."""


@dataclass(frozen=True)
class Connect:
    """All ranks have started: join the group."""


@dataclass(frozen=True)
class Step:
    """Take these in, in order, then run a step."""

    commands: "list[Request | Abort]"


def encode(message: object) -> bytes:
    """A message as it travels: length, then pickle."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


class Channel:
    """The engine's end of the socket, or one end of that between two ranks.

    Args:
        connection: one socket of the pair; this object owns it from now on.
        peer: who is at the other end, for errors.
    """

    def __init__(self, connection: socket.socket, peer: str = "the HTTP front") -> None:
        connection.setblocking(False)
        self._socket, self._peer = connection, peer
        self._incoming, self._outgoing = bytearray(), bytearray()

    def send(self, *messages: object) -> None:
        """Hands messages over without ever waiting for the reader. Raises BrokenPipeError when the peer is gone."""
        for message in messages:
            self._outgoing += encode(message)
        self._write()

    def receive(self, wait: bool) -> list[Any]:
        """Messages that have come; with `wait`, at least one. Raises BrokenPipeError when the peer is gone."""
        while True:
            if self._outgoing:
                self._write()
            writers = [self._socket] if self._outgoing else []
            readable, _, _ = select.select([self._socket], writers, [], None if wait else 0)
            if readable:
                self._read()
            messages = list(self._messages())
            if messages or not wait:
                return messages

    def receive_within(self, seconds: float) -> Any:
        """One message, where only one can come; None when `seconds` are over. Raises BrokenPipeError."""
        readable, _, _ = select.select([self._socket], [], [], max(0.0, seconds))
        return self.receive(wait=True)[0] if readable else None

    def flush(self, seconds: float) -> None:
        """Waits until all is handed over, at most `seconds`; for the last words before the process ends."""
        while self._outgoing:
            _, writable, _ = select.select([], [self._socket], [], seconds)
            if not writable:
                return
            self._write()

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError as error:
            raise BrokenPipeError(f"{self._peer} closed the socket") from error
        if not data:
            raise BrokenPipeError(f"{self._peer} closed the socket")
        self._incoming += data

    def _write(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise BrokenPipeError(f"{self._peer} closed the socket") from error

    def _messages(self) -> Iterator[Any]:
        while len(self._incoming) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._incoming)[0]
            if len(self._incoming) < end:
                return
            message = pickle.loads(self._incoming[LENGTH.size : end])
            del self._incoming[:end]
            yield message

"""A TCP connection within a limit, which a signal can end at any moment."""

import queue
import socket
import threading
import time
from typing import Any


def connect_tcp(address: str, port: int, seconds: float) -> socket.socket:
    """Connects to the first of a name's addresses that answers.

    Args:
        address: name or number.
        port: of TCP.
        seconds: limit of all of it. An address that answers nothing leaves its share of the time to the next one.

    Raises OSError: socket.gaierror for a name that is not known, TimeoutError, or what the last address said.
    """
    deadline = time.monotonic() + seconds
    found = _resolve(address, port, seconds)
    last: OSError = OSError(f"{address} has no address")
    for number, (family, kind, protocol, _, where) in enumerate(found):
        share = max(0.05, (deadline - time.monotonic()) / (len(found) - number))
        connection = None
        try:
            connection = socket.socket(family, kind, protocol)
            connection.settimeout(share)
            connection.connect(where)
            return connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            if not isinstance(error, OSError):
                raise
            last = error
    raise last


def _resolve(address: str, port: int, seconds: float) -> list[tuple[Any, ...]]:
    """The addresses of a name. Asked in a thread: a silent name server holds the C library, and signals with it."""
    answers: queue.SimpleQueue[list[tuple[Any, ...]] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(list(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)))
        except OSError as error:
            answers.put(error)
        except UnicodeError as error:  # a label that is too long
            answers.put(OSError(f"{address} is no name of a host: {error}"))

    threading.Thread(target=ask, daemon=True, name=f"look up {address}").start()
    try:
        found = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no name server told the address of {address} within {seconds:g} s") from None
    if isinstance(found, OSError):
        raise found
    return found

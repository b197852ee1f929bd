"""Ends of a run that come from outside: Ctrl-C, SIGTERM, a lost terminal. All unwind the stack, so `finally` runs."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def unwinding_signals() -> Iterator[None]:
    """SIGTERM raises SystemExit(143), SIGHUP counts as SIGTERM, SIGINT raises KeyboardInterrupt.

    Prefect leaves SIGHUP alone, so that a closed terminal would kill the run without any cleanup. It takes SIGTERM over
    while a flow runs and hands it on to this handler afterwards. A shell starts background jobs with SIGINT ignored.
    Use it in the main thread.
    """
    handlers = {
        signal.SIGTERM: _exit,
        signal.SIGHUP: _hand_on,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _hand_on(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)

"""What a stage tells the world while it runs. Terminals, JSON lines and tests are three listeners of one protocol."""

import json
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

PROGRESS_LINES_PER_SECOND = 2.0


class Reporter(Protocol):
    """Listener of a stage. `fields` of progress are figures to show beside the bar, such as loss=2.31."""

    def stage_started(self, stage: str, *, resumed: bool) -> None: ...

    def progress(self, stage: str, done: float, total: float, fields: Mapping[str, Any]) -> None: ...

    def say(self, stage: str, text: str, *, markup: bool) -> None: ...

    def warn(self, stage: str, text: str) -> None: ...

    def stage_finished(self, stage: str, *, status: str, seconds: float, figures: Mapping[str, Any]) -> None: ...

    def stage_failed(self, stage: str, error: BaseException) -> None: ...


class NullReporter:
    """Says nothing."""

    def stage_started(self, stage: str, *, resumed: bool) -> None: ...

    def progress(self, stage: str, done: float, total: float, fields: Mapping[str, Any]) -> None: ...

    def say(self, stage: str, text: str, *, markup: bool) -> None: ...

    def warn(self, stage: str, text: str) -> None: ...

    def stage_finished(self, stage: str, *, status: str, seconds: float, figures: Mapping[str, Any]) -> None: ...

    def stage_failed(self, stage: str, error: BaseException) -> None: ...


class JsonLinesReporter:
    """One JSON object a line: {"event", "stage", ...}. Progress is limited to two lines a second; the last one passes.

    Args: stream: where the lines go, flushed after each.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_progress = 0.0

    def stage_started(self, stage: str, *, resumed: bool) -> None:
        self._write("started", stage, resumed=resumed)

    def progress(self, stage: str, done: float, total: float, fields: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if done < total and now - self._last_progress < 1 / PROGRESS_LINES_PER_SECOND:
            return
        self._last_progress = now
        self._write("progress", stage, done=done, total=total, **fields)

    def say(self, stage: str, text: str, *, markup: bool) -> None:
        self._write("say", stage, text=text, markup=markup)

    def warn(self, stage: str, text: str) -> None:
        self._write("warn", stage, text=text)

    def stage_finished(self, stage: str, *, status: str, seconds: float, figures: Mapping[str, Any]) -> None:
        self._write("finished", stage, status=status, seconds=round(seconds, 3), figures=dict(figures))

    def stage_failed(self, stage: str, error: BaseException) -> None:
        self._write("failed", stage, error=str(error), kind=type(error).__name__, fault=getattr(error, "fault", ""))

    def _write(self, event: str, stage: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "stage": stage, **fields}, ensure_ascii=False, default=str)
        print(line, file=self._stream, flush=True)

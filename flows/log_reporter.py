"""Progress of the stages in a flow run's log, for runs that nobody watches in a terminal."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from slipstream.engine.errors import SlipstreamError

LOG_EVERY_SECONDS = 15.0


class LogReporter:
    """Tells a logger. The logger is fetched in the flow: Prefect's has no run to belong to in another thread.

    Args: logger: of the flow run.
    """

    def __init__(self, logger: "logging.Logger | logging.LoggerAdapter[logging.Logger]") -> None:
        self._logger, self._logged = logger, time.monotonic()

    def stage_started(self, stage: str, *, resumed: bool) -> None:
        self._logged = time.monotonic()
        self._logger.info("%s %s", stage, "goes on where an earlier run stopped" if resumed else "began")

    def progress(self, stage: str, done: float, total: float, fields: Mapping[str, Any]) -> None:
        if time.monotonic() - self._logged < LOG_EVERY_SECONDS:
            return
        self._logged = time.monotonic()
        figures = "  ".join(f"{name} {value}" for name, value in fields.items())
        self._logger.info("%s %g/%g %s", stage, done, total, figures)

    def say(self, stage: str, text: str, *, markup: bool) -> None:
        if not markup:  # coloured samples are for a terminal; the report has them
            self._logger.info("%s: %s", stage, text)

    def warn(self, stage: str, text: str) -> None:
        self._logger.warning("%s: %s", stage, text)

    def stage_finished(self, stage: str, *, status: str, seconds: float, figures: Mapping[str, Any]) -> None:
        if status == "skipped":
            self._logger.info("%s: unchanged, skipped", stage)
        else:
            self._logger.info("%s: done in %.1f s", stage, seconds)

    def stage_failed(self, stage: str, error: BaseException) -> None:
        words = str(error) if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {error}"
        self._logger.error("%s failed: %s", stage, words)

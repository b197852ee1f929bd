"""Errors about values of a model directory's config.json."""

from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError


def is_int(value: Any) -> bool:
    """An integer, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def unsupported(path: Path, key: str, value: Any, known: Any) -> SlipstreamError:
    """For a value that the layers have no form for."""
    return SlipstreamError(
        f"{path} says {key} = {value!r}",
        expected=f"{key} = {known!r}: this engine's layers have no other form yet",
        do="use a target without it",
    )


def wrong(path: Path, key: str, value: Any, expected: str) -> SlipstreamError:
    """For a value that cannot be."""
    return SlipstreamError(
        f"{path} says {key} = {value!r}", expected=expected, do="correct the file, or copy the model directory again"
    )

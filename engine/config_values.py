"""Checks of, and errors about, values of a model directory's config.json."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError

_ROPE_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)
# What else angles are made of (layers/rotary.py), or model_config.py reads; `finetuned` says how weights came about.
_ROPE_KEYS = (
    *_ROPE_NUMBERS,
    "type",
    "rope_type",
    "rope_theta",
    "original_max_position_embeddings",
    "truncate",
    "partial_rotary_factor",
    "finetuned",
)


def is_int(value: Any) -> bool:
    """An integer, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_rope_values(path: Path, key: str, rope: Any) -> None:
    """Types of the scaling of a rotary embedding, of a target or a draft; an absent value and null mean the same.

    Args:
        path: of config.json, for errors.
        key: `rope_scaling` or `rope_parameters`.
        rope: its value.

    Raises SlipstreamError for one that no angle can be made of, and for a key that is set and not known.
    """
    if not isinstance(rope, dict | None):
        raise wrong(path, key, rope, "an object or null")
    found: Mapping[str, Any] = {name: value for name, value in (rope or {}).items() if value is not None}
    for name, value in found.items():
        if isinstance(value, dict):
            raise unsupported(path, f"a rope of its own for {name}", value, "one for all layers")
        if value and name not in _ROPE_KEYS:
            raise unknown(path, f"{key}.{name}", value)
    if not isinstance(found.get("truncate", True), bool):
        raise wrong(path, f"{key}.truncate", found["truncate"], "true or false")
    for name in ("type", "rope_type"):
        if not isinstance(found.get(name, ""), str):
            raise wrong(path, f"{key}.{name}", found[name], "a name")
    for name in _ROPE_NUMBERS:
        value = found.get(name, 0)
        if not ((is_int(value) or isinstance(value, float)) and 0 <= value < math.inf):
            raise wrong(path, f"{key}.{name}", value, "a number of 0 or more")
    name = "original_max_position_embeddings"
    if name in found and not (is_int(found[name]) and found[name] > 0):
        raise wrong(path, f"{key}.{name}", found[name], "an integer above 0")


def unknown(path: Path, key: str, value: Any) -> SlipstreamError:
    """For a key that is set and that nothing here reads."""
    return SlipstreamError(
        f"{path} says {key} = {value!r}",
        expected="no key that this engine does not know: it might change what the model answers",
        do="use a target without it, or an engine that knows it",
    )


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

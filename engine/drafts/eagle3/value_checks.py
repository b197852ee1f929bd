"""Types of the values of a draft's config.json: before a layer is made of one that cannot be."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from slipstream.engine.config_values import check_rope_values, is_int, wrong

_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
)
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings", "vocab_size")
_NUMBERS = ("rms_norm_eps", "rope_theta")


def check_values(path: Path, value: Mapping[str, Any], switches: Collection[str]) -> None:
    """Raises SlipstreamError for a value that no draft has; an absent key is left to the reader.

    Args:
        path: of config.json.
        value: what it holds.
        switches: keys that are true or false.
    """
    names = value.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise wrong(path, "architectures", names, "a list of names")
    for key in _COUNTS:
        found: Any = value.get(key)
        null = found is None and (key not in _NEEDED or key not in value)
        if not null and not (is_int(found) and found > 0):
            raise wrong(path, key, found, "an integer above 0")
    for key in _NUMBERS:
        found = value.get(key)
        if found is not None and not ((is_int(found) or isinstance(found, float)) and 0 < found < math.inf):
            raise wrong(path, key, found, "a number above 0")
    for key in switches:
        if not isinstance(value.get(key), bool | None):
            raise wrong(path, key, value[key], "true or false")
    if not isinstance(value.get("eagle_config"), dict | None):
        raise wrong(path, "eagle_config", value["eagle_config"], "an object or null")
    for key in ("rope_scaling", "rope_parameters"):
        check_rope_values(path, key, value.get(key))

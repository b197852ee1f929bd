"""Checks where one stage hands its work to the next: is it still the same target, and are these the same slots?

Every difference is named with both values, and by the fault of the incident that it is. `skip` switches checks off by
fault; only the tests of the faults use it.
"""

import hashlib
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import sha256_file
from slipstream.engine.model_config import read_model_json

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)


@dataclass(frozen=True)
class TargetIdentity:
    """What hidden states depend on besides the slots: sha256 digests, in hex.

    Args:
        target: of the config and the weight files.
        tokenizer: of the tokenizer's files, the chat template left out.
        chat_template: of the chat template's text.
    """

    target: str
    tokenizer: str
    chat_template: str

    @classmethod
    def from_dir(cls, directory: Path) -> "TargetIdentity":
        """Hashes a Hugging Face directory, all weights included. Raises SlipstreamError without weights or config."""
        weights = sorted(directory.glob("*.safetensors"))
        config = directory / "config.json"
        if not weights or not config.is_file():
            has_config = "a" if config.is_file() else "no"
            raise SlipstreamError(
                f"{directory} holds {len(weights)} safetensors files and {has_config} config.json",
                expected="a Hugging Face model directory",
                do="let the resolve stage make it again, or set target.source to a model directory",
            )
        options = read_model_json(directory / "tokenizer_config.json")
        template = options.pop("chat_template", "")
        template_file = directory / "chat_template.jinja"
        if template_file.is_file():
            template = template_file.read_text()
        tokenizer = {n: sha256_file(directory / n) for n in _TOKENIZER_FILES if (directory / n).is_file()}
        return cls(
            target=_digest({"config": sha256_file(config), "weights": {w.name: sha256_file(w) for w in weights}}),
            tokenizer=_digest({"files": tokenizer, "options": options}),
            chat_template=_digest(template),
        )

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Difference:
    """One field in which a thing made earlier differs from what is needed now; `fault` as in the incident, or ""."""

    field: str
    found: Any
    expected: Any
    fault: str = ""


def slot_differences(found: tuple[str, ...], expected: tuple[str, ...]) -> list[Difference]:
    """Slots agree by name and by order; their number alone proves nothing, since every choice of n is n x h wide.

    F2 when different states are named, F3 when the same states stand in another order.
    """
    if found == expected:
        return []
    if sorted(found) == sorted(expected):
        return [Difference("order of the slots", list(found), list(expected), "F3")]
    return [Difference("slots", list(found), list(expected), "F2")]


def identity_differences(found: TargetIdentity, now: TargetIdentity) -> list[Difference]:
    """Target, tokenizer and template are still the same files (F17)."""
    words = {"target": "target weights or config", "tokenizer": "tokenizer", "chat_template": "chat template"}
    pairs = {words[name]: (old, getattr(now, name)) for name, old in found.to_dict().items()}
    return [Difference(word, old[:12], new[:12], "F17") for word, (old, new) in pairs.items() if old != new]


def refuse(
    differences: list[Difference], *, found_in: str, expected_in: str, do: str, skip: Collection[str] = ()
) -> None:
    """Raises one SlipstreamError that names every difference with both values, under the fault of the first one.

    Args:
        differences: none = nothing happens.
        found_in, expected_in: what held the two values, for the error.
        do: the remedy.
        skip: faults whose checks are off.
    """
    left = [d for d in differences if d.fault not in skip]
    if left:
        raise SlipstreamError(
            f"{found_in} differs from {expected_in}: " + "; ".join(f"{d.field} {d.found}" for d in left),
            expected="; ".join(f"{d.field} {d.expected}" for d in left) + f", as {expected_in} says",
            do=do,
            fault=left[0].fault,
        )

"""Prompt sets: JSON lines of chats, and which of them are held out."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.facts import prompts_path

Split = Literal["train", "holdout"]


@dataclass(frozen=True)
class Prompt:
    """One chat to be answered. turns: what the user says, in order; the model answers after each."""

    id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(source: str) -> list[Prompt]:
    """Reads `data.prompts`: a path, or `builtin` for the set that ships with Slipstream.

    Raises SlipstreamError, naming the line, for anything that is not {"id", "category", "turns": [text, ...]}, for an
    id that occurs twice, for an empty file, and, naming the byte, for one that is not UTF-8.
    """
    path = prompts_path(source)
    if not path.is_file():
        raise SlipstreamError(f"{path} does not exist", expected="a file of prompts", do="correct data.prompts")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SlipstreamError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}",
            expected="a file of prompts in UTF-8",
            do="convert it (for instance `iconv -t UTF-8`) or correct that byte",
        ) from error
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(text.split("\n"), start=1):  # JSON may hold the other line separators
        if not line.strip():
            continue
        prompt = _parse(line, f"{path}:{number}")
        if prompt.id in prompts:
            raise SlipstreamError(f"{path}:{number}: the id {prompt.id!r} occurs twice", do="give each prompt its own")
        prompts[prompt.id] = prompt
    if not prompts:
        raise SlipstreamError(f"{path} holds no prompts", expected="one JSON object a line", do="fill it")
    return list(prompts.values())


def _parse(line: str, where: str) -> Prompt:
    problem = ""
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        value, problem = {}, f"not JSON: {error}"
    if not problem and not isinstance(value, dict):
        problem = "not an object"
    elif not problem:
        turns = value.get("turns")
        if not all(isinstance(value.get(key), str) and value[key] for key in ("id", "category")):
            problem = "id and category must be texts"
        elif not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
            problem = "turns must be a list of one or more texts"
    if problem:
        raise SlipstreamError(
            f"{where} is not a prompt: {problem}",
            expected='{"id": "...", "category": "...", "turns": ["what the user says", ...]}',
            do="correct that line",
        )
    return Prompt(value["id"], value["category"], tuple(value["turns"]))


def held_out_count(prompts: int, holdout_fraction: float) -> int:
    """How many of so many prompts are held out: at least one, and at least one is left to train on."""
    return min(max(round(prompts * holdout_fraction), 1), prompts - 1)


def assign_splits(prompts: Sequence[Prompt], holdout_fraction: float, seed: int) -> dict[str, Split]:
    """Prompt id -> "train" or "holdout".

    The held-out ones are those with the smallest hash of (seed, id): the same on every machine, whatever the order of
    the file, and in the exact number (at least one, and at least one is left to train on).
    """
    if len(prompts) < 2:
        raise SlipstreamError(
            f"{len(prompts)} prompt cannot be split",
            expected="two or more",
            do="add prompts to the file of data.prompts",
        )
    count = held_out_count(len(prompts), holdout_fraction)
    by_hash = sorted((hashlib.sha256(f"{seed}/{p.id}".encode()).hexdigest(), p.id) for p in prompts)
    held_out = {prompt_id for _, prompt_id in by_hash[:count]}
    return {p.id: "holdout" if p.id in held_out else "train" for p in prompts}

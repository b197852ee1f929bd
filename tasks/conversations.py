"""Conversations on disk: one JSON object a line, appended as they are finished, readable after a kill."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import drop_torn_line
from slipstream.tasks.prompts import Split

CONVERSATIONS = "conversations.jsonl"  # in the directory of stage regenerate


@dataclass(frozen=True)
class ConversationRecord:
    """A prompt and the target's own answers to it.

    Args:
        id: the prompt's id; with more than one sample `id~n`; `id#turn` when a template cannot hold all turns in one.
        category: of the prompt.
        split: "train" or "holdout".
        token_ids: T ids, the end token of each answer included.
        loss_mask: T values 0 or 1, 1 on the target's own tokens.
        prompt_tokens: ids before the first supervised token.
        finish_reason: of the last answer: "stop", or "length" when it was cut off.
    """

    id: str
    category: str
    split: Split
    token_ids: list[int]
    loss_mask: list[int]
    prompt_tokens: int
    finish_reason: str

    @property
    def mask(self) -> torch.Tensor:
        """[T] bool."""
        return torch.tensor(self.loss_mask, dtype=torch.bool)

    def line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":")) + "\n"


def read_conversations(path: Path) -> list[ConversationRecord]:
    """All conversations of a finished file. Raises SlipstreamError, naming the line, when one cannot be read."""
    records = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            records.append(_record(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise SlipstreamError(
                f"{path}:{number} is not a conversation: {error}",
                expected="a line written by the stage regenerate",
                do="delete the stage's folder and run it again",
            ) from error
    return records


def resume_conversations(path: Path) -> dict[str, ConversationRecord]:
    """What an interrupted run finished, by id. A last line that was torn by the kill is cut off the file."""
    if not path.exists():
        return {}
    drop_torn_line(path)
    return {record.id: record for record in read_conversations(path)}


def append(file: TextIO, record: ConversationRecord) -> None:
    """Adds a line and hands it to the system at once, so that a kill loses at most the line being written."""
    file.write(record.line())
    file.flush()


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from file


def _record(value: dict[str, Any]) -> ConversationRecord:
    record = ConversationRecord(**value)
    if len(record.token_ids) != len(record.loss_mask):
        raise ValueError(f"{len(record.token_ids)} tokens, {len(record.loss_mask)} mask values")
    return record

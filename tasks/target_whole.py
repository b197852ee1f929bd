"""Whether a target's files can be served, as far as that can be told without loading a tensor: for the plan."""

import json
from pathlib import Path

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.model_config import read_model_json
from slipstream.engine.tiktoken_ranks import RANKS, read_ranks

_LENGTH_BYTES = 8  # a safetensors file begins with the length of its JSON header, little endian
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound


def check_whole(directory: Path) -> None:
    """Weight files as long as their headers say, a tokenizer that can be read, a chat template. SlipstreamError."""
    for path in _weight_files(directory):
        _check_length(path)
    read_model_json(directory / "tokenizer.json")
    if (directory / RANKS).is_file():
        read_ranks(directory / RANKS)
    options = read_model_json(directory / "tokenizer_config.json")
    if not options.get("chat_template") and not (directory / "chat_template.jinja").is_file():
        raise SlipstreamError(
            f"{directory} has no chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            do="use a chat model as target, or add its template to the directory",
            fault="F10",
        )


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [directory / "model.safetensors"]
    return [directory / name for name in sorted(set(read_model_json(index)["weight_map"].values()))]


def _check_length(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise ValueError("its header is cut short")
            header = json.loads(file.read(length))
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"cannot be read: {error}") from error
    due = _LENGTH_BYTES + length + max(ends, default=0)
    if size != due:
        raise _damaged(path, f"has {size:,} bytes, its header says {due:,}")


def _damaged(path: Path, what: str) -> SlipstreamError:
    return SlipstreamError(
        f"{path} {what}",
        expected="a whole safetensors file; a truncated copy looks like this",
        do="copy or download this file again",
    )

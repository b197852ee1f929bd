"""Files that survive a kill: hashes, writes that readers see whole or not at all, readers that name what is damaged."""

import hashlib
import json
import os
from pathlib import Path
from threading import get_ident
from typing import Any

from slipstream.engine.errors import SlipstreamError

READ_BYTES = 1 << 20


def sha256_file(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):  # not hashlib.file_digest: a far host's own Python may be 3.10
            digest.update(block)
    return digest.hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name, flushes it to the disk, then renames it: readers see the old or the new.

    Raises OSError when the disk is full; nothing half-written stays behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path, *, expected: str, do: str) -> Any:
    """Reads JSON. Raises FileNotFoundError when there is no file, and SlipstreamError when it is not JSON.

    Args: expected, do: for the error.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SlipstreamError(f"{path} is not readable as JSON: {error}", expected=expected, do=do) from error


def read_json_object(path: Path, *, expected: str, do: str) -> dict[str, Any]:
    """As `read_json`, where the file must hold an object."""
    value = read_json(path, expected=expected, do=do)
    if not isinstance(value, dict):
        raise SlipstreamError(f"{path} holds no JSON object", expected=expected, do=do)
    return value


def drop_torn_line(path: Path) -> None:
    """Takes the last line off a file of lines if a kill cut it short."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)

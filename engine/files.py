"""Files that survive a kill: hashes, and writes that readers see whole or not at all."""

import hashlib
import os
from pathlib import Path


def sha256_file(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name, flushes it to the disk, then renames it: readers see the old or the new.

    Raises OSError when the disk is full; nothing half-written stays behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

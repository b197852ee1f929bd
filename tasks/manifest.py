"""Fingerprints, file hashes and atomic writes: what makes a stage's directory trustworthy."""

import hashlib
import json
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json as read_json_file
from slipstream.engine.files import sha256_file, write_atomic

MANIFEST = "manifest.json"
HASHED_ON_VERIFY_BYTES = 1 << 20  # files up to this size are hashed again on every check, larger ones only measured
MANIFEST_KEYS = {"fingerprint": str, "identity": str, "config": dict, "inputs": dict, "files": dict, "figures": dict}
TOOLS = ("slipstream", "torch", "transformers")


@dataclass(frozen=True)
class Problem:
    """Why a finished directory cannot be used: one file and what is wrong with it."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text. Raises TypeError on what JSON cannot hold."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_files(paths: Iterable[Path]) -> dict[str, str]:
    """File name -> sha256, for a stage's `external` inputs."""
    return {path.name: sha256_file(path) for path in paths}


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically (indented, for people)."""
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Reads JSON of a stage's directory, as `engine.files.read_json`: what is damaged there is made anew."""
    do = f"delete the folder {path.parent} and run again: its stage is repeated"
    return read_json_file(path, expected="a file written by Slipstream", do=do)


class DamagedManifest(SlipstreamError):
    """The manifest of a finished stage cannot be used; `problem` says what is wrong with it."""

    def __init__(self, folder: Path, what: str) -> None:
        self.problem = Problem(MANIFEST, what)
        do = f"delete the folder {folder} and run again: its stage is repeated"
        super().__init__(f"{folder / MANIFEST} is damaged: {what}", expected="the manifest of a finished stage", do=do)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a stage's directory, with every key that the stages' framework reads.

    Raises FileNotFoundError when there is none, and DamagedManifest for one that was not written whole.
    """
    try:
        value = read_json(folder / MANIFEST)
    except SlipstreamError as error:
        raise DamagedManifest(folder, "not readable as JSON") from error
    if not isinstance(value, dict):
        raise DamagedManifest(folder, "not an object")
    for key, kind in MANIFEST_KEYS.items():
        if not isinstance(value.get(key), kind):
            raise DamagedManifest(folder, f"{key} is missing or not {'a text' if kind is str else 'an object'}")
    for name, entry in value["files"].items():
        if not (isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys()):
            raise DamagedManifest(folder, f"files.{name} has no bytes and sha256")
    return value


def index_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Every file below `folder` but the manifest: relative name -> {"sha256", "bytes"}; links are followed."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.relative_to(folder).as_posix() != MANIFEST)
    return {p.relative_to(folder).as_posix(): {"sha256": sha256_file(p), "bytes": p.stat().st_size} for p in paths}


def verify_files(folder: Path, files: Mapping[str, Mapping[str, Any]], *, every_hash: bool = False) -> Problem | None:
    """Compares a finished directory with its manifest's file list.

    Sizes are compared for all files, hashes for files up to HASHED_ON_VERIFY_BYTES (for all with `every_hash`).
    Returns the first problem, or None.
    """
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return Problem(name, "missing")
        size = path.stat().st_size
        if size != entry["bytes"]:
            return Problem(name, f"{size} bytes, {entry['bytes']} when it was written")
        if (every_hash or size <= HASHED_ON_VERIFY_BYTES) and sha256_file(path) != entry["sha256"]:
            return Problem(name, "its content changed since it was written")
    return None


def tool_versions() -> dict[str, str]:
    """Versions that take part in every fingerprint."""
    return {"python": platform.python_version(), **{name: _version(name) for name in TOOLS}}


def command_line() -> str:
    """How this process was started, for the manifest."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"

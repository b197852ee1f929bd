"""The last server that was launched and proven good: what it takes to bring it back after it was stopped.

    <workdir>/last-good/  record.json: its identity, command, port and settings;  draft/: its draft, by hard links

A new convert replaces the draft's directory; the links keep what this server served at no cost of disk.
"""

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.engine.files import read_json
from slipstream.tasks.facts import DRAFT
from slipstream.tasks.manifest import write_json
from slipstream.tasks.process import STATE_SUFFIX, ProcessIdentity, ProcessRecord, group_members, read_record

FOLDER = "last-good"
RECORD = "record.json"
# What makes a server brought back the same as before. Directories are not compared: the draft's is another one.
SAME = ("num_steps", "verify_width", "slots", "choose_steps", "dtype", "device", "tensor_parallel_size", "model")


@dataclass(frozen=True)
class LastGood:
    """A server that passed its launch: its process (alive or not), its command, its port (0: any), its settings."""

    identity: ProcessIdentity
    command: tuple[str, ...]
    port: int
    settings: dict[str, Any]

    @property
    def runs(self) -> bool:
        """Whether its group still lives."""
        return bool(group_members(self.identity))


def keep_last_good(workdir: Path, draft: Path | None, settings: dict[str, Any], name: str = "server") -> None:
    """Notes the running server of that name as the last good one, with its draft."""
    record = read_record(workdir / f"{name}{STATE_SUFFIX}")
    assert record is not None  # it was just started
    new, old, final = workdir / f"{FOLDER}.new", workdir / f"{FOLDER}.old", workdir / FOLDER
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    if draft is not None:
        shutil.copytree(draft, new / DRAFT, copy_function=_link)
    write_json(new / RECORD, _as_json(record, settings))
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)  # not removed first: that takes longer, and half of it would be no record
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def read_last_good(workdir: Path) -> LastGood | None:
    """The last good server; None where none was launched yet."""
    path = workdir / FOLDER / RECORD
    if not path.is_file():
        return None
    value = read_json(path, expected="what `slipstream stage launch` noted", do=f"delete {path.parent}")
    return LastGood(
        ProcessIdentity(**value["identity"]), tuple(value["command"]), int(value["port"]), value["settings"]
    )


def command_again(last: LastGood, workdir: Path) -> list[str]:
    """Its command, with the draft that was kept."""
    command = list(last.command)
    kept = workdir / FOLDER / DRAFT
    if kept.is_dir():
        command[command.index("--draft") + 1] = str(kept.absolute())
    return command


def what_makes_it(settings: dict[str, Any]) -> dict[str, Any]:
    """The part of a server's settings in which it and its successor by the same command must agree."""
    target = {key: value for key, value in settings["target"].items() if key != "directory"}
    draft = settings.get("draft") or {}
    return {**{key: settings.get(key) for key in SAME}, "target": target, "draft": draft.get("fingerprint")}


def _as_json(record: ProcessRecord, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "identity": asdict(record.identity),
        "command": list(record.command),
        "port": int(record.notes.get("port", 0)),
        "settings": settings,
    }


def _link(source: str, target: str) -> None:
    """A hard link where the file system has them, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)

"""What shall serve: the last server that was launched and proven good, and whether it is wanted.

    <workdir>/last-good/  record.json: identity, command, port, settings, `wanted`, `draft`;  draft-N/: by hard links

The record is the one mark by which a launch, flow `serve` and a restore know what to bring back. It is replaced in one
step, once a successor has passed health and smoke test: whoever dies before that leaves the old mark, after it the new
one. A clean end (stage cleanup) takes `wanted` back before it stops anything; making room for a successor does not.

A new convert replaces the draft's directory; the links keep what this server served at no cost of disk.
"""

import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json
from slipstream.tasks.facts import DRAFT
from slipstream.tasks.manifest import write_json
from slipstream.tasks.process import STATE_SUFFIX, ProcessIdentity, is_alive, read_record

FOLDER = "last-good"
RECORD = "record.json"
RUNBOOK = "roll-back.md"
# What makes a server brought back the same as before. Directories are not compared: the draft's is another one.
SAME = ("num_steps", "verify_width", "slots", "choose_steps", "dtype", "device", "tensor_parallel_size", "model")


@dataclass(frozen=True)
class LastGood:
    """A server that passed its launch.

    Args:
        identity: of its process, alive or not.
        command: how it was started.
        port: that it was asked to listen on; 0: any.
        settings: as it told them.
        draft: name of the kept draft's folder below FOLDER; None without one.
        wanted: it shall serve: nobody has ended it cleanly since.
    """

    identity: ProcessIdentity
    command: tuple[str, ...]
    port: int
    settings: dict[str, Any]
    draft: str | None
    wanted: bool

    @property
    def lives(self) -> bool:
        """Whether its front lives; whether it also answers is asked by `server.answers`."""
        return is_alive(self.identity)


def keep_last_good(workdir: Path, draft: Path | None, settings: dict[str, Any], name: str = "server") -> None:
    """Notes the running server of that name as the last good one, with its draft, and as what shall serve."""
    record = read_record(workdir / f"{name}{STATE_SUFFIX}")
    assert record is not None  # it was just started
    folder, kept = workdir / FOLDER, None
    folder.mkdir(exist_ok=True)
    if draft is not None:
        kept = draft.name if draft.parent == folder else _keep_draft(folder, draft)
    port = int(record.notes.get("port", 0))
    made = LastGood(record.identity, record.command, port, settings, kept, wanted=True)
    write_json(folder / RECORD, asdict(made))
    for other in folder.glob(f"{DRAFT}*"):
        if other.name != kept:
            shutil.rmtree(other, ignore_errors=True)


def read_last_good(workdir: Path) -> LastGood | None:
    """The last good server; None where none was launched yet. Raises SlipstreamError on a file that is not one."""
    path = workdir / FOLDER / RECORD
    if not path.is_file():
        return None
    expected = "what `slipstream stage launch` noted"
    do = f"look what serves; delete {path}: then none is brought back; run `slipstream stage launch CONFIG`"
    value = read_json(path, expected=expected, do=do)
    before = {
        "draft": DRAFT if (path.parent / DRAFT).is_dir() else None,
        "wanted": True,
    }  # of records of older releases
    try:
        identity, command = ProcessIdentity(**value["identity"]), tuple(value["command"])
        made = {**before, **value, "identity": identity, "command": command, "port": int(value["port"])}
        last = LastGood(**made)
        command_again(last, workdir)  # what a restore asks of it: found before anything is stopped
        what_makes_it(last.settings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{path} names no server: {error!r}"
        raise SlipstreamError(what, expected=expected, do=do, runbook=RUNBOOK) from error
    return last


def no_longer_wanted(workdir: Path) -> None:
    """A clean end begins: from here on nothing brings the last good server back."""
    try:
        last = read_last_good(workdir)
    except SlipstreamError:  # it can bring nobody back, and must not keep us from the end
        (workdir / FOLDER / RECORD).unlink()
        return
    if last is not None and last.wanted:
        write_json(workdir / FOLDER / RECORD, asdict(replace(last, wanted=False)))


def kept_draft(last: LastGood, workdir: Path) -> Path | None:
    """Where its draft lies now."""
    return None if last.draft is None else workdir / FOLDER / last.draft


def command_again(last: LastGood, workdir: Path) -> list[str]:
    """Its command, with the draft that was kept."""
    command, draft = list(last.command), kept_draft(last, workdir)
    if draft is not None:
        command[command.index("--draft") + 1] = str(draft.absolute())
    return command


def what_makes_it(settings: dict[str, Any]) -> dict[str, Any]:
    """The part of a server's settings in which it and its successor by the same command must agree."""
    target = {key: value for key, value in settings["target"].items() if key != "directory"}
    draft = settings.get("draft") or {}
    return {**{key: settings.get(key) for key in SAME}, "target": target, "draft": draft.get("fingerprint")}


def _keep_draft(folder: Path, draft: Path) -> str:
    """A copy by links under a name that no record uses yet. Returns the name."""
    used = {path.name for path in folder.iterdir()}
    number = next(number for number in range(1, len(used) + 2) if f"{DRAFT}-{number}" not in used)
    shutil.copytree(draft, folder / f"{DRAFT}-{number}", copy_function=_link)
    return f"{DRAFT}-{number}"


def _link(source: str, target: str) -> None:
    """A hard link where the file system has them, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)

"""What shall serve: the last server that was launched and proven good, until a clean end.

    <workdir>/last-good/  record-N.json: identity, command, port, settings, `draft`;  draft-M/: by hard links

The record of the highest number is the one mark by which a launch, flow `serve` and a restore know what to bring back.
It appears in one step, once a successor has passed health and smoke test: whoever dies before that leaves the old mark,
after it the new one. A clean end (stage cleanup) removes it before it stops anything; making room for a successor does
not. The record before it is kept, with its draft, for a person to fall back on; nothing uses it by itself.

A new convert replaces the draft's directory; the links keep what these servers served.
"""

import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json
from slipstream.tasks.facts import DRAFT
from slipstream.tasks.manifest import write_json
from slipstream.tasks.process import STATE_SUFFIX, ProcessIdentity, is_alive, read_record

FOLDER = "last-good"
RUNBOOK = "roll-back.md"
_RECORD = re.compile(r"record(?:-(\d+))?\.json")  # without a number: an older release's
_DRAFT = re.compile(rf"{DRAFT}-(\d+)")
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
    """

    identity: ProcessIdentity
    command: tuple[str, ...]
    port: int
    settings: dict[str, Any]
    draft: str | None

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
    earlier, number = _records(workdir), 1 + max(map(_number, folder.iterdir()), default=0)
    if draft is not None and draft.parent == folder:
        kept = draft.name
    elif draft is not None:
        kept = f"{DRAFT}-{number}"  # never a name that a record had
        shutil.copytree(draft, folder / kept, copy_function=link_or_copy)
    port = int(record.notes.get("port", 0))
    made = LastGood(record.identity, record.command, port, settings, kept)
    write_json(folder / f"record-{number}.json", asdict(made))
    before = _newest_readable(earlier, workdir)
    for path in earlier.values():
        if before is None or path != before[0]:
            path.unlink(missing_ok=True)
    used = {kept, None if before is None else before[1].draft}
    for other in folder.glob(f"{DRAFT}*"):
        if other.name not in used:
            shutil.rmtree(other, ignore_errors=True)


def read_last_good(workdir: Path) -> LastGood | None:
    """The last good server; None where none was launched yet, or a clean end was its end.

    Raises SlipstreamError on a record that is damaged. It names the one before it, which only a person can choose.
    """
    records = _records(workdir)
    if not records:
        return None
    path = records.pop(max(records))
    try:
        return _read(path, workdir)
    except SlipstreamError as error:
        do = f"look what serves; delete {path}: then none is brought back; run `slipstream stage launch CONFIG`"
        before = _newest_readable(records, workdir)
        if before is not None:
            made = before[1].settings
            what = f"num_steps {made.get('num_steps')}, draft {before[1].draft}, `{' '.join(before[1].command)}`"
            do = (
                f"launch what is there now: `slipstream stage launch CONFIG`. Or take the good server before that one, "
                f"which {before[0].name} holds whole ({what}): delete {path} and give the command again"
            )
        expected = "what `slipstream stage launch` noted"
        raise SlipstreamError(error.found, expected=expected, do=do, runbook=RUNBOOK) from error


def forget_last_good(workdir: Path) -> list[SlipstreamError]:
    """A clean end begins: from here on nothing brings the last good server back. Needs no room on the disk.

    Returns what cannot be removed, as errors: it must not keep us from the end.
    """
    records = _records(workdir)
    try:
        for number in sorted(records):  # the newest last: until it is gone it is what shall serve
            records[number].unlink(missing_ok=True)
    except OSError as error:
        expected, do = "a record that a clean end removes", f"delete {workdir / FOLDER}"
        return [SlipstreamError(f"{error}: a restore would bring that server back", expected=expected, do=do)]
    shutil.rmtree(workdir / FOLDER, ignore_errors=True)
    return []


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


def link_or_copy(source: str, target: str) -> None:
    """A hard link where the file system has them, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _records(workdir: Path) -> dict[int, Path]:
    """Number -> record."""
    return {_number(path): path for path in (workdir / FOLDER).glob("record*.json") if _RECORD.fullmatch(path.name)}


def _number(path: Path) -> int:
    """Of a record or a draft; 0 for what has none."""
    match = _RECORD.fullmatch(path.name) or _DRAFT.fullmatch(path.name)
    return int(match[1] or 0) if match is not None else 0


def _read(path: Path, workdir: Path) -> LastGood | None:
    """One record; None for one of an older release whose server was ended cleanly. Raises SlipstreamError."""
    value = read_json(path, expected="", do="")
    before = {"draft": DRAFT if (path.parent / DRAFT).is_dir() else None}  # of records of older releases
    try:
        wanted = value.pop("wanted", True)  # of those, too
        identity, command = ProcessIdentity(**value["identity"]), tuple(value["command"])
        made = {**before, **value, "identity": identity, "command": command, "port": int(value["port"])}
        last = LastGood(**made)
        command_again(last, workdir)  # what a restore asks of it: found before anything is stopped
        what_makes_it(last.settings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SlipstreamError(f"{path} names no server: {error!r}") from error
    return last if wanted else None


def _newest_readable(records: dict[int, Path], workdir: Path) -> tuple[Path, LastGood] | None:
    """The newest of the records that is whole, with a draft that is still there."""
    for number in sorted(records, reverse=True):
        try:
            last = _read(records[number], workdir)
        except (SlipstreamError, OSError):
            continue
        draft = None if last is None else kept_draft(last, workdir)
        if last is not None and (draft is None or draft.is_dir()):
            return records[number], last
    return None

"""A draft's directory as somebody left it: what its config.json tells an engine, and which slots it was trained on.

No tensor is loaded. Directories of our convert stage and those that other trainers leave (`.../output/4`, the number of
a checkpoint as name) are read alike.
"""

import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from slipstream.engine.capture import slot_id, slot_name
from slipstream.engine.drafts.eagle3.hf_config import CONFIG, RECORD
from slipstream.engine.drafts.eagle3.published import IDS_KEY, check_kind
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json_object
from slipstream.engine.handover import TargetIdentity
from slipstream.tasks.manifest import MANIFEST

_SLOT = re.compile(r"slot_\d{1,6}|\d{1,6}", re.ASCII)


@dataclass(frozen=True)
class DraftFacts:
    """A draft of an earlier run, or of somebody else.

    Args:
        path: its directory.
        slots: that it was trained on, by name, in order; None when no record tells.
        top_level_ids: layer ids at the top of config.json; None when absent.
        nested_ids: layer ids under `eagle_config`; None when absent.
        max_position: positions of its rope table; None when config.json does not say.
        identity: of the target that it was trained on, from slipstream.json.
        slots_from: the file that names `slots`.
        architecture: the first one in config.json; "" when there is none.
        target_hidden_size: width of one state, in elements; None when config.json does not say.
        target_num_layers, target_family: of the target that it was trained on, from slipstream.json.
        problem: why our own engine has no network for it; "" where it has.
        captures: false when config.json switches capture off (`eagle_config.use_aux_hidden_state`).
    """

    path: Path
    slots: tuple[str, ...] | None
    top_level_ids: tuple[int, ...] | None
    nested_ids: tuple[int, ...] | None
    max_position: int | None
    identity: TargetIdentity | None = None
    slots_from: Path | None = None
    architecture: str = ""
    target_hidden_size: int | None = None
    target_num_layers: int | None = None
    target_family: str | None = None
    problem: str = ""
    captures: bool = True


def read_draft(path: Path) -> DraftFacts | None:
    """The draft in a directory; None where there is no config.json.

    Raises SlipstreamError for a directory that cannot be looked into, for a config.json or a record that is no JSON
    object, and for a value in one of them that is of another kind: what an engine makes of that is not guessed.
    """
    if not _there(path / CONFIG):
        return None
    config = _object(path / CONFIG)
    records = [folder / RECORD for folder in _folders(path) if _there(folder / RECORD)]
    own = _object(records[0]) if records else {}
    # An engine that finds something else than an object here goes on without it, and without a word.
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, Mapping) else {}
    slots, slots_from = _trained_on(path)
    names = config.get("architectures")
    here, told = path / CONFIG, records[0] if records else path / RECORD
    return DraftFacts(
        path=path,
        slots=slots,
        top_level_ids=_ids(config, here) if isinstance(config.get(IDS_KEY), list) else None,  # vLLM: no list, no ids
        nested_ids=_ids(nested, here),
        max_position=_count(config, "max_position_embeddings", here),
        identity=_identity(own["identity"], told) if "identity" in own else None,
        slots_from=slots_from,
        architecture=str(names[0]) if isinstance(names, list) and names else "",
        target_hidden_size=_count(config, "target_hidden_size", here) or _count(config, "hidden_size", here),
        target_num_layers=_count(own, "target_num_layers", told),
        target_family=own.get("target_family"),
        problem=_problem(here, config),
        captures=bool(nested.get("use_aux_hidden_state", True)),
    )


def _problem(path: Path, config: Mapping[str, Any]) -> str:
    try:
        check_kind(path, config)
    except SlipstreamError as error:
        return error.found
    return ""


def _folders(path: Path) -> tuple[Path, Path]:
    """Where a record may lie: beside the draft, or above it, where one training keeps its checkpoints."""
    return (path, path.absolute().parent)


def _trained_on(path: Path) -> tuple[tuple[str, ...] | None, Path | None]:
    """(slots by name, the file that says so): slipstream.json or a stage's manifest, in the directory or above it."""
    for folder in _folders(path):
        record, manifest = folder / RECORD, folder / MANIFEST
        if _there(record):
            slots = _names(_object(record).get("slots"), record)
            if slots is not None:
                return slots, record
        if _there(manifest):
            value = _object(manifest)
            figures = value.get("figures")
            if value.get("stage") in ("train", "convert") and isinstance(figures, Mapping):
                slots = _names(figures.get("slots"), manifest)
                if slots is not None:
                    return slots, manifest
    return None, None


def _there(path: Path) -> bool:
    """Whether a file is there. Raises SlipstreamError where that cannot be told, as without permission."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise SlipstreamError(
            f"{path} cannot be read: {error.strerror}", expected="a draft directory", do="correct draft.path"
        ) from None


def _object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, expected="a draft directory", do=_do(path))
    except OSError as error:
        raise SlipstreamError(
            f"{path} cannot be read: {error.strerror}", expected="a draft directory", do=_do(path)
        ) from None


def _do(path: Path) -> str:
    return f"if a run made {path.parent}, delete it: its stage is repeated; else name another draft (draft.path)"


def _odd(path: Path, key: str, value: Any, expected: str) -> SlipstreamError:
    return SlipstreamError(
        f"{path}: {key} is {json.dumps(value)}", expected=expected, do=f"correct {path}; {_do(path)}"
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(values: Mapping[str, Any], key: str, path: Path) -> int | None:
    """A whole number above 0; None where it is absent or null."""
    value = values.get(key)
    if value is not None and not (_whole(value) and value > 0):
        raise _odd(path, key, value, "a whole number above 0")
    return value


def _ids(values: Mapping[str, Any], path: Path) -> tuple[int, ...] | None:
    """Layer ids as they stand there; None where they are absent or null."""
    value = values.get(IDS_KEY)
    if value is None:
        return None
    if not isinstance(value, list) or not all(map(_whole, value)):
        raise _odd(path, IDS_KEY, value, "a list of whole numbers, such as [2, 16, 29]")
    return tuple(value)


def _names(value: Any, path: Path) -> tuple[str, ...] | None:
    """Slots by name; a list of canonical ids is one of names, too."""
    if value is None:
        return None
    names = [slot_name(s) if _whole(s) else s for s in value] if isinstance(value, list) else []
    if not names or not all(isinstance(name, str) and _SLOT.fullmatch(name) for name in names):
        raise _odd(path, "slots", value, 'slots by name or by id, such as ["slot_0", "slot_3"] or [0, 3]')
    return tuple(slot_name(slot_id(name)) for name in names)


def _identity(value: Any, path: Path) -> TargetIdentity:
    names = [field.name for field in fields(TargetIdentity)]
    if not isinstance(value, dict) or sorted(value) != sorted(names) or not all(map(_is_text, value.values())):
        raise _odd(path, "identity", value, f"an object of the digests {', '.join(names)}")
    return TargetIdentity(**value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)

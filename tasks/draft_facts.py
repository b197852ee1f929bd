"""A draft's directory as somebody left it: what its config.json tells an engine, and which slots it was trained on.

No tensor is loaded. Directories of our convert stage and those that other trainers leave (`.../output/4`, the number of
a checkpoint as name) are read alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.engine.capture import slot_name
from slipstream.engine.drafts.eagle3.hf_config import CONFIG, IDS_KEY, RECORD
from slipstream.engine.files import read_json_object
from slipstream.engine.handover import TargetIdentity
from slipstream.tasks.manifest import MANIFEST


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
    captures: bool = True


def read_draft(path: Path) -> DraftFacts | None:
    """The draft in a directory; None where there is no config.json.

    Raises SlipstreamError for a config.json or a record that is no JSON object.
    """
    if not (path / CONFIG).is_file():
        return None
    config = _object(path / CONFIG)
    records = [folder / RECORD for folder in _folders(path) if (folder / RECORD).is_file()]
    own = _object(records[0]) if records else {}
    # An engine that finds something else than an object here goes on without it, and without a word.
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, Mapping) else {}
    slots, slots_from = _trained_on(path)
    names = config.get("architectures")
    return DraftFacts(
        path=path,
        slots=slots,
        top_level_ids=_ids(config.get(IDS_KEY)),
        nested_ids=_ids(nested.get(IDS_KEY)),
        max_position=config.get("max_position_embeddings"),
        identity=TargetIdentity(**own["identity"]) if "identity" in own else None,
        slots_from=slots_from,
        architecture=str(names[0]) if isinstance(names, list) and names else "",
        target_hidden_size=config.get("target_hidden_size") or config.get("hidden_size"),
        target_num_layers=own.get("target_num_layers"),
        target_family=own.get("target_family"),
        captures=nested.get("use_aux_hidden_state", True) is not False,
    )


def _folders(path: Path) -> tuple[Path, Path]:
    """Where a record may lie: beside the draft, or above it, where one training keeps its checkpoints."""
    return (path, path.absolute().parent)


def _trained_on(path: Path) -> tuple[tuple[str, ...] | None, Path | None]:
    """(slots by name, the file that says so): slipstream.json or a stage's manifest, in the directory or above it."""
    for folder in _folders(path):
        record, manifest = folder / RECORD, folder / MANIFEST
        if record.is_file():
            slots = _names(_object(record).get("slots"))
            if slots is not None:
                return slots, record
        if manifest.is_file():
            value = _object(manifest)
            figures = value.get("figures")
            if value.get("stage") in ("train", "convert") and isinstance(figures, Mapping):
                slots = _names(figures.get("slots"))
                if slots is not None:
                    return slots, manifest
    return None, None


def _object(path: Path) -> dict[str, Any]:
    do = f"if a run made {path.parent}, delete it: its stage is repeated; else name another draft (draft.path)"
    return read_json_object(path, expected="a draft directory", do=do)


def _ids(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) else None


def _names(value: Any) -> tuple[str, ...] | None:
    """Slots by name; a list of canonical ids is one of names, too."""
    return tuple(slot_name(s) if isinstance(s, int) else str(s) for s in value) if isinstance(value, list) else None

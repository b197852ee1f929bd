"""What a roll does on a replica's host beside stages: takes over what the first host made, begins, ends.

python -P -m slipstream.tasks.replica CONFIG begin|end
python -P -m slipstream.tasks.replica CONFIG take FROM STAGE...

<workdir>/incoming/STAGE/  what has arrived of a stage: files, each whole; its manifest comes last
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.configs.load import load
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.last_good import link_or_copy
from slipstream.tasks.lock import workdir_lock
from slipstream.tasks.manifest import MANIFEST, read_manifest, verify_files, write_json
from slipstream.tasks.roll_mark import begin_roll, end_roll
from slipstream.tasks.stage import replace_dir

INCOMING = "incoming"
TAKEN_FROM = "taken_from"  # key of a manifest: Slipstream's directory on the host that made it


def take(workdir: Path, stage: str, made_in: str, here: str) -> bool:
    """Puts a stage that has arrived in its place, whole or not at all. Returns whether anything changed.

    Args:
        workdir: of the run on this host.
        stage: its name.
        made_in: Slipstream's directory on the host that made it, which names files of its own.
        here: Slipstream's directory on this one.

    Its manifest is the maker's, but for what is of this host: paths, and which of the stages that it was made from lie
    here. The target is this host's own, compared before (`hosts.hand_over`). Raises SlipstreamError for a file that is
    not as the manifest says.
    """
    incoming, final = workdir / INCOMING / stage, workdir / stage
    manifest = read_manifest(incoming)
    here_too = [name for name in manifest["inputs"] if _has(workdir, name)]
    made = {
        **manifest,
        "config": _moved(manifest["config"], made_in, here),
        "inputs": {name: read_manifest(workdir / name)["identity"] for name in here_too},
        TAKEN_FROM: made_in,
    }
    if _has(workdir, stage) and read_manifest(final) == made and verify_files(final, made["files"]) is None:
        shutil.rmtree(incoming)
        return False
    part = workdir / f"{stage}.partial"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    for name in made["files"]:
        source = next((path for path in (incoming / name, final / name) if path.is_file()), None)
        if source is not None:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(str(source), str(part / name))
    problem = verify_files(part, made["files"], every_hash=True)
    if problem is not None:
        shutil.rmtree(incoming)
        raise SlipstreamError(
            f"stage {stage} did not arrive as it was made: {problem}",
            expected="the files that its manifest names",
            do="give the same command again: what is missing is sent anew",
            runbook="roll-replicas.md",
        )
    write_json(part / MANIFEST, made)
    replace_dir(part, final)
    shutil.rmtree(incoming)
    return True


def _has(workdir: Path, stage: str) -> bool:
    return (workdir / stage / MANIFEST).is_file()


def _moved(value: Any, old: str, new: str) -> Any:
    """Values of a manifest with paths below `old` as they are below `new`."""
    if isinstance(value, Mapping):
        return {key: _moved(entry, old, new) for key, entry in value.items()}
    return f"{new}{value.removeprefix(old)}" if isinstance(value, str) and value.startswith(f"{old}/") else value


def main(arguments: Sequence[str] | None = None) -> None:
    """See the head of this file. Prints the stages that changed, one a line."""
    config, what, *rest = sys.argv[1:] if arguments is None else arguments
    workdir = load(config).deployment.host.workdir
    with workdir_lock(workdir):
        if what == "take":
            made_in, *stages = rest
            here = str(workdir.parent.parent)  # DIRECTORY/runs/NAME
            for stage in stages:
                if take(workdir, stage, made_in, here):
                    print(stage)
            (workdir / INCOMING).rmdir()
        else:
            {"begin": begin_roll, "end": end_roll}[what](workdir)


if __name__ == "__main__":
    try:
        main()
    except SlipstreamError as error:
        sys.exit(str(error))

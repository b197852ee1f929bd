"""What a look at a stage's finished directory tells: its key, whether it is there and whole, and what it holds.

Runs where the directory is: `python -P -m slipstream.tasks.stage_look CONFIG NAME...` prints it as JSON.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.tasks import manifest as mf
from slipstream.tasks.registry import get_stage
from slipstream.tasks.stage import Stage, fingerprint, stage_status

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment


@dataclass(frozen=True)
class StageLook:
    """A stage as it lies on its host.

    Args:
        name: of the stage.
        done: its directory is there, whole, and of this fingerprint.
        why: why it is not.
        fingerprint: what a run of it would get; "" while a stage that it reads is not done.
        identity: of the finished directory, content included; "" where it is not done.
        figures: of its manifest.
    """

    name: str
    done: bool
    why: str
    fingerprint: str
    identity: str
    figures: dict[str, Any]


def look_at(stage: Stage, deployment: "Deployment", workdir: Path) -> StageLook:
    """Looks at a stage in `workdir` on this machine. Changes nothing."""
    status = stage_status(stage, deployment, workdir)
    if status.state == "done":
        recorded = mf.read_manifest(workdir / stage.name)
        return StageLook(
            stage.name, True, "", recorded["fingerprint"], recorded["identity"], recorded.get("figures") or {}
        )
    try:
        key = fingerprint(stage, deployment, workdir)
    except (FileNotFoundError, mf.DamagedManifest):
        key = ""
    return StageLook(stage.name, False, status.why, key, "", {})


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the looks at the named stages as one JSON list."""
    from slipstream.configs.load import load

    config, *names = sys.argv[1:] if arguments is None else arguments
    deployment = load(config).deployment
    looks = [look_at(get_stage(name), deployment, deployment.host.workdir) for name in names]
    print(json.dumps([asdict(look) for look in looks]))


if __name__ == "__main__":
    main()

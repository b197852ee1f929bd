"""What serving needs, from the host that made it to another one: the draft, the K, what parity measured.

Files travel through here (rsync or SFTP), each compared by its SHA-256, and only those that neither host nor this
machine has yet. The target does not travel: stage resolve finds it on the other host, and it must be the same.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import sha256_file
from slipstream.tasks.hosts.far_look import far_looks
from slipstream.tasks.hosts.far_stage import RUNS, environment_python, run_name, send_deployment
from slipstream.tasks.hosts.host import Host
from slipstream.tasks.manifest import MANIFEST, write_json
from slipstream.tasks.replica import INCOMING

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment
    from slipstream.tasks.stage_look import StageLook

HANDED_OVER = "handed-over"  # below the working directory here: what was fetched from the first host
NEEDED = ("convert", "tune")  # by stage launch, beside resolve
USED = ("parity",)  # where it is done: A_1 of the smoke test is compared with it
SECONDS = 900.0  # to hash what has arrived, on a slow disk
Say = Callable[[str], None]


def made_here(host: Host, deployment: "Deployment", workdir: Path) -> "dict[str, StageLook]":
    """The stages that launch reads, as they lie on the host that made them, and parity where it is done.

    Raises SlipstreamError (F17) for one that is not done.
    """
    looks = {look.name: look for look in far_looks(host, ("resolve", *NEEDED, *USED), deployment, workdir)}
    for look in looks.values():
        if not look.done and look.name not in USED:
            raise SlipstreamError(
                f"stage {look.name} is not done on {host.name}: {look.why}",
                expected="a finished draft of this deployment; what runs was left alone",
                do="run the lifecycle first: `slipstream run CONFIG`, or its deployment",
                runbook="run-failed.md",
                fault="F17",
            )
    return {name: look for name, look in looks.items() if look.done}


def refuse_other_target(name: str, there: dict[str, Any], made: "StageLook") -> None:
    """Raises SlipstreamError where the target that a host has resolved is not the one that the draft was made for.

    Args:
        name: of the host, for people.
        there: figures of its stage resolve.
        made: stage resolve of the host that made the draft.
    """
    ours, theirs = made.figures.get("identity"), there.get("identity")
    if not ours or ours != theirs:
        parts = [part for part, value in (ours or {}).items() if (theirs or {}).get(part) != value] or ["identity"]
        raise SlipstreamError(
            f"the target on {name} is another one: {', '.join(parts)} differ from what the draft was made for",
            expected="the same target on every host, by its SHA-256",
            do=f"put the same files under target.source on {name}; nothing was stopped or started",
            runbook="roll-replicas.md",
        )


def hand_over(
    first: Host, other: Host, stages: Sequence[str], deployment: "Deployment", workdir: Path, say: Say
) -> list[str]:
    """Sees that finished stages of the first host lie on another one, each whole or not at all.

    Args:
        first, other: hosts.
        stages: their names.
        deployment: of the other host.
        workdir: of the run here.
        say: told what travels.

    Returns the stages that were not there yet. Raises SlipstreamError for what does not arrive as it was made.
    """
    run = f"{RUNS}/{run_name(workdir)}"
    for stage in stages:
        manifest = first.read_json(f"{run}/{stage}/{MANIFEST}")
        kept = workdir / HANDED_OVER / stage
        for name, entry in manifest["files"].items():
            targets = (f"{run}/{stage}/{name}", f"{run}/{INCOMING}/{stage}/{name}")
            if any((other.file_facts(target) or {}).get("sha256") == entry["sha256"] for target in targets):
                continue
            if not (kept / name).is_file() or sha256_file(kept / name) != entry["sha256"]:
                (kept / name).parent.mkdir(parents=True, exist_ok=True)
                say(f"{first.name} -> here: {first.get(f'{run}/{stage}/{name}', kept / name)}")
            say(f"here -> {other.name}: {other.put(kept / name, targets[1])}")
        kept.mkdir(parents=True, exist_ok=True)
        write_json(kept / MANIFEST, manifest)
        other.put(kept / MANIFEST, f"{run}/{INCOMING}/{stage}/{MANIFEST}")
    words = ("take", first.directory, *stages)
    return ask_replica(other, deployment, workdir, *words).splitlines()


def ask_replica(host: Host, deployment: "Deployment", workdir: Path, *words: str) -> str:
    """Runs `tasks.replica` on a host, and returns what it prints. Raises SlipstreamError with its own words."""
    config = send_deployment(host, deployment, host.directory, run_name(workdir))
    command = (environment_python(host), "-P", "-m", "slipstream.tasks.replica", config, *words)
    done = host.run(command, seconds=SECONDS)
    if done.exit_code != 0:
        raise SlipstreamError(
            f"{host.name}: {done.stderr.strip()[-1500:] or json.dumps(done.exit_code)}",
            expected="a host that takes part in the roll",
            do="give the same command again once that is mended",
            runbook="roll-replicas.md",
        )
    return done.stdout

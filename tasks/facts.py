"""What the checks and the plan look at: the deployment, what is known of its target, and what earlier runs left behind.

Gathering starts no process, loads no tensor and writes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.engine.capture import default_slots
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.model_config import ModelConfig, check_architecture
from slipstream.tasks.draft_facts import DraftFacts, read_draft
from slipstream.tasks.manifest import MANIFEST, DamagedManifest, read_json, read_manifest
from slipstream.tasks.target_sources import check_complete
from slipstream.tasks.target_whole import check_whole
from slipstream.tasks.wheel_target import IMPORT_VERSION

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

# Weights are hashed to see whether they are still those of the extraction; above this size it would take too long here.
HASHED_WEIGHTS_BYTES = 1 << 30
BUILTIN = "builtin:"  # of target.shapes: what ships with Slipstream
HOLDOUT = "builtin-holdout"  # of benchmark.prompts: the held-out part of data.prompts
# What stages leave, as others find it.
DRAFT = "draft"  # the draft's directory, in convert's
PARITY = "parity.json"  # the measured figures, in parity's


@dataclass(frozen=True)
class StoreFacts:
    """A hidden-state store of an earlier run. `slots` by name, in the order of its features."""

    path: Path
    slots: tuple[str, ...]
    identity: TargetIdentity


@dataclass(frozen=True)
class Facts:
    """Everything that a check may look at.

    Args:
        deployment: the deployment.
        workdir: directory of the stages' outputs.
        origins: dotted key -> where its value came from; empty when nobody recorded it.
        target: shapes of the target, None while unknown.
        target_dir: its directory, None while it is not there.
        stated: shapes that target.shapes names; they are `target` while the target itself is not there.
        target_words: where the shapes come from, or why they are unknown.
        target_problem: why the target cannot be served; "" while nothing speaks against it.
        resolve_stale: why the resolved target is not of this deployment; "" when it is, or when nothing was resolved.
        store, draft: what earlier runs left, None where there is nothing.
        given_draft: what draft.path holds; None where it holds no draft, or none is named.
        remade: stages that the coming run repeats; what they left is not used as it lies there. Empty at launch.
    """

    deployment: "Deployment"
    workdir: Path
    origins: Mapping[str, str] = field(default_factory=dict)
    target: ModelConfig | None = None
    target_dir: Path | None = None
    stated: ModelConfig | None = None
    target_words: str = "unknown until resolve"
    target_problem: str = ""
    resolve_stale: str = ""
    store: StoreFacts | None = None
    draft: DraftFacts | None = None
    given_draft: DraftFacts | None = None
    remade: frozenset[str] = frozenset()

    @property
    def stored_slots(self) -> tuple[int, ...] | None:
        """The slots that the store keeps; None for `auto` while the target's depth is unknown."""
        slots = self.deployment.capture.slots
        if slots != "auto":
            return slots
        return None if self.target is None else default_slots(self.target.num_layers)

    @property
    def slots(self) -> tuple[int, ...] | None:
        """The slots that the draft reads, in its order: what training picks by name, and what serving captures."""
        return self.deployment.draft.slots or self.stored_slots

    @property
    def slots_key(self) -> str:
        """The setting that `slots` came from."""
        return "capture.slots" if self.deployment.draft.slots is None else "draft.slots"

    @property
    def draft_positions(self) -> int:
        """Positions of the draft's rope table, in tokens."""
        return self.deployment.draft.max_context_tokens or self.deployment.server.max_context_tokens

    @cached_property
    def identity(self) -> TargetIdentity | None:
        """Digests of the target as it lies there; None when it is not there or too large to be hashed here."""
        if self.target_dir is None:
            return None
        weights = list(self.target_dir.glob("*.safetensors"))
        if not weights or sum(w.stat().st_size for w in weights) > HASHED_WEIGHTS_BYTES:
            return None
        return TargetIdentity.from_dir(self.target_dir)

    def say(self, key: str) -> str:
        """`speculation.num_steps = 1 (demo.yaml:12)`: a value as every message names it."""
        value: Any = self.deployment
        for part in key.split("."):
            value = getattr(value, part)
        shown = "null" if value is None else list(value) if isinstance(value, tuple) else value
        origin = self.origins.get(key, "")
        return f"{key} = {shown} ({origin})" if origin else f"{key} = {shown}"


def gather(
    deployment: "Deployment",
    workdir: Path | None = None,
    origins: Mapping[str, Any] | None = None,
    remade: frozenset[str] = frozenset(),
) -> Facts:
    """Reads what there is. `origins` maps a dotted key to anything whose text says where the value came from.

    Raises SlipstreamError for a manifest or a draft's config.json that cannot be read.
    """
    workdir = deployment.host.workdir if workdir is None else workdir
    target_dir, words, stale = _find_target(deployment, workdir)
    target, problem = None, ""
    if target_dir is not None:
        try:
            if deployment.target.kind == "local":
                check_complete(target_dir)
            found = ModelConfig.from_dir(target_dir)
            check_architecture(found, target_dir)
            if deployment.target.kind == "local" or target_dir.absolute().parent == (workdir / "resolve").absolute():
                check_whole(target_dir)
            target = found
        except SlipstreamError as error:
            problem, words = error.found, "unknown: this is not a target that we can serve"
    elif deployment.target.kind == "local":
        problem = words.removeprefix("unknown: ")
    stated = _stated(deployment.target.shapes)
    if target_dir is None and stated is not None:
        target, words = stated, f"read from {deployment.target.shapes} (target.shapes): the target is not here"
        problem = ""
    return Facts(
        stated=stated,
        deployment=deployment,
        workdir=workdir,
        origins={key: str(origin) for key, origin in (origins or {}).items()},
        target=target,
        target_dir=target_dir,
        target_words=words,
        target_problem=problem,
        resolve_stale=stale,
        store=_read_store(workdir / "extract" / "store"),
        draft=read_draft(workdir / "convert" / DRAFT),
        given_draft=None if deployment.draft.path is None else read_draft(deployment.draft.path),
        remade=remade,
    )


def _stated(shapes: str | None) -> ModelConfig | None:
    """The shapes that a deployment names beside its target. Raises SlipstreamError where there are none."""
    if shapes is None:
        return None
    directory = Path(shapes).expanduser()
    if shapes.startswith(BUILTIN):
        directory = Path(str(files("slipstream.configs") / "shapes" / shapes.removeprefix(BUILTIN)))
    if not (directory / "config.json").is_file():
        raise SlipstreamError(
            f"target.shapes = {shapes}: {directory} holds no config.json",
            expected="a directory with the target's config.json, builtin:kimi-k2.5 or builtin:deepseek-v3",
            do="correct target.shapes, or leave it out",
        )
    config = ModelConfig.from_dir(directory)
    check_architecture(config, directory)
    return config


def _find_target(deployment: "Deployment", workdir: Path) -> tuple[Path | None, str, str]:
    """(directory, words, why a resolved target is another one)."""
    target = deployment.target
    manifest = workdir / "resolve" / MANIFEST
    stale = ""
    try:
        recorded = read_manifest(manifest.parent)
    except (FileNotFoundError, NotADirectoryError, DamagedManifest):
        recorded = None  # a damaged one says nothing here: resolve is made again
    if recorded is not None:
        stale = _other_target(recorded.get("config", {}), deployment)
        named = manifest.parent / str(recorded.get("figures", {}).get("model_dir", "none"))
        # The working directory may have been moved as a whole since: look beside the manifest, too.
        for directory in (named, manifest.parent / "model"):
            if not stale and (directory / "config.json").is_file():
                return directory, f"read from {directory / 'config.json'}", ""
    if target.kind == "pypi":
        cached = _cached(deployment)
        if cached is not None:
            return cached, f"read from {cached / 'config.json'}, made by an earlier run", stale
    if target.kind == "local":
        directory = Path(target.source).expanduser()
        if (directory / "config.json").is_file():
            return directory, f"read from {directory / 'config.json'}", stale
        return None, f"unknown: {directory} holds no config.json", stale
    return None, "unknown until resolve has run", stale


def _cached(deployment: "Deployment") -> Path | None:
    """The directory that resolve made from the same wheel for another working directory."""
    name = f"{deployment.target.expected_sha256}-{deployment.target.dtype}-v{IMPORT_VERSION}"
    path = deployment.host.cache_dir / "targets" / name
    return path if (path / "config.json").is_file() else None


def _other_target(recorded: Mapping[str, Any], deployment: "Deployment") -> str:
    """How the settings of the target differ from those that it was resolved with; "" when they do not."""
    now = {"target": deployment.target.model_dump(mode="json")}
    for path, old in recorded.items():
        value: Any = now
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if not path.startswith("target") or value == old:
            continue
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            names = [n for n in value if value[n] != old.get(n)]
            return "; ".join(f"target.{n} was {old.get(n)}, is {value[n]}" for n in names)
        return f"{path} was {old}, is {value}"
    return ""


def _read_store(path: Path) -> StoreFacts | None:
    if not (path / MANIFEST).is_file():
        return None
    value = read_json(path / MANIFEST)
    try:
        return StoreFacts(path, tuple(value["slots"]), TargetIdentity(**value["identity"]))
    except (KeyError, TypeError) as error:
        raise SlipstreamError(
            f"{path / MANIFEST} is not the manifest of a hidden-state store: {error!r}",
            expected="keys slots and identity",
            do=f"delete {path.parent}: its stage is repeated",
        ) from error


def resolved_target(workdir: Path) -> Path:
    """The directory that resolve made: told relative to its own, so that a copied or moved workdir holds its own."""
    stage = workdir / "resolve"
    return (stage / str(read_manifest(stage)["figures"]["model_dir"])).absolute()


def prompts_path(name: str) -> Path:
    """The file of a prompts setting: `builtin` is the set that ships with Slipstream, all else a path."""
    if name == "builtin":
        return Path(str(files("slipstream.configs") / "prompts.jsonl"))
    return Path(name).expanduser()

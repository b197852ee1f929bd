"""A stage: typed inputs in, one directory with a manifest out.

    <workdir>/<stage>.partial/   while it runs; kept for resuming while the fingerprint is unchanged
    <workdir>/<stage>/           finished: files + manifest.json, appears by rename

A stage's fingerprint is the hash of its name, version, part of the configuration, the identities of the stages that it
reads, the hashes of files it reads from elsewhere, and tool versions. Unchanged and with intact files = skipped.
An identity (`manifest["identity"]`) is fingerprint + content of the output, so that a stage that is repeated and
comes out otherwise repeats what reads it. Stages with `cached=False` (they act on the world) run every time and have
the fingerprint alone as identity.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import manifest as mf
from slipstream.tasks.lock import workdir_lock
from slipstream.tasks.os_errors import explain_os_errors, takes_nothing
from slipstream.tasks.reporting import NullReporter, Reporter

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

# Fields of sections that say where and by how many a stage's work is done; what comes out is the same within rounding,
# and work that was begun goes on when they change.
NOT_OF_THE_OUTPUT = {"training": ("processes", "hosts", "rendezvous_address", "rendezvous_port")}
PARTIAL = "partial.json"  # in the partial directory: the fingerprint that its contents belong to


class StageContext:
    """What a running stage sees of the world.

    Attributes:
        config: the whole deployment; a stage may read only the sections that it declares.
        out: the directory to write to. Files from an interrupted run with the same fingerprint are still there.
        workdir: the parent of all stage directories.
        resumed: whether `out` holds files of an interrupted run.
        stage: the stage's name.
        reporter: who listens.
    """

    def __init__(
        self,
        stage: "Stage",
        config: "Deployment",
        workdir: Path,
        out: Path,
        reporter: Reporter,
        *,
        resumed: bool = False,
    ) -> None:
        self.config, self.workdir, self.out, self.resumed = config, workdir, out, resumed
        self.stage, self._needs, self.reporter = stage.name, stage.needs, reporter

    def input(self, stage: str) -> Path:
        """The finished directory of a stage named in `needs`. KeyError for any other: the fingerprint would miss it."""
        if stage not in self._needs:
            raise KeyError(f"stage {self.stage} reads {stage}, but does not declare it in needs={self._needs}")
        return self.workdir / stage

    def manifest(self, stage: str) -> dict[str, Any]:
        """The manifest of a stage named in `needs` (`manifest(...)["figures"]` holds what its run returned)."""
        return mf.read_manifest(self.input(stage))

    def progress(self, done: float, total: float, **fields: Any) -> None:
        """Reports `done` of `total` (any unit), with figures to show beside the bar."""
        self.reporter.progress(self.stage, done, total, fields)

    def say(self, text: str, *, markup: bool = False) -> None:
        """A line (or several) for the person watching; `markup` = text carries rich markup."""
        self.reporter.say(self.stage, text, markup=markup)

    def warn(self, text: str) -> None:
        """A line that should be noticed."""
        self.reporter.warn(self.stage, text)


def _nothing_outside(_: "Deployment") -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Stage:
    """One step of the lifecycle.

    Args:
        name: directory name and command-line name.
        version: raised by hand when the stage's code changes what it writes.
        needs: stages whose directories it reads.
        config_sections: paths into the deployment that decide its output: sections ("capture") or fields
            ("target.source").
        run: does the work; returns the figures for the manifest (JSON values).
        cached: False = acts on the world, never skipped.
        external: content hashes (name -> sha256) of files it reads from outside the workdir.
        needs_room: False = does its work on a disk that takes nothing, too, and fails only then, since it cannot be
            noted. Such a stage writes no files.
    """

    name: str
    version: int
    needs: tuple[str, ...]
    config_sections: tuple[str, ...]
    run: Callable[[StageContext], dict[str, Any]]
    cached: bool = True
    external: Callable[["Deployment"], dict[str, str]] = field(default=_nothing_outside)
    needs_room: bool = True


@dataclass(frozen=True)
class StageResult:
    """How a stage ended. `seconds` is this run's time; 0 when it was skipped."""

    name: str
    status: Literal["done", "skipped"]
    seconds: float
    figures: dict[str, Any]
    dir: Path


@dataclass(frozen=True)
class StageStatus:
    """What a run would do with a stage: `done` = would be skipped, `needed` = would run, and why."""

    name: str
    state: Literal["done", "needed"]
    why: str
    resumable: bool = False


def run_stage(
    stage: Stage, deployment: "Deployment", workdir: Path, reporter: Reporter | None = None, *, force: bool = False
) -> StageResult:
    """Runs one stage, or skips it when it is already done (`force` repeats it).

    Raises SlipstreamError when another run holds the workdir, when a stage it reads is missing or stale, when the disk
    is full, and whatever the stage itself raises. After any failure the partial directory is kept.
    """
    reporter = reporter or NullReporter()
    with explain_os_errors(stage.name, workdir), workdir_lock(workdir, needs_room=stage.needs_room):
        try:
            return _run_locked(stage, deployment, workdir, reporter, force=force)
        except BaseException as error:
            reporter.stage_failed(stage.name, error)
            raise


def stage_status(stage: Stage, deployment: "Deployment", workdir: Path) -> StageStatus:
    """Says whether `stage` would run and why, from what lies in `workdir`. Changes nothing."""
    for name in stage.needs:
        why = stale_input(name, deployment, workdir)
        if why:
            return StageStatus(stage.name, "needed", why)
    key = _key(stage, deployment, workdir)
    resumable = _partial_fingerprint(_partial_dir(stage.name, workdir)) == mf.digest(key)
    why = "acts on the world: never skipped" if not stage.cached else _why_needed(key, workdir / stage.name)
    return StageStatus(stage.name, "needed" if why else "done", why or "unchanged", resumable)


def pipeline_status(stages: Sequence[Stage], deployment: "Deployment", workdir: Path) -> list[StageStatus]:
    """The status of every stage in order, knowing that a stage that runs may change what the later ones read."""
    result: list[StageStatus] = []
    runs: set[str] = set()
    for stage in stages:
        upstream = [name for name in stage.needs if name in runs]
        if upstream:
            status = StageStatus(stage.name, "needed", f"{', '.join(upstream)} runs first")
        else:
            status = stage_status(stage, deployment, workdir)
        if upstream or (status.state == "needed" and stage.cached):  # acting on the world again changes no output
            runs.add(stage.name)
        result.append(status)
    return result


def fingerprint(stage: Stage, deployment: "Deployment", workdir: Path) -> str:
    """The stage's fingerprint under `deployment`; what it reads must be finished in `workdir`."""
    return mf.digest(_key(stage, deployment, workdir))


def stale_input(name: str, deployment: "Deployment", workdir: Path) -> str:
    """Why the finished stage `name` is not of `deployment`, by its manifest and those before it ("" = it is)."""
    folder = workdir / name
    if not (folder / mf.MANIFEST).is_file():
        return f"{name} has not run"
    try:
        recorded = mf.read_manifest(folder)
    except mf.DamagedManifest as error:
        return f"{name} is damaged: {error.problem}"
    changed = _difference(recorded["config"], _config_subset(deployment, tuple(recorded["config"])))
    if changed:
        return f"{name} was made with other settings: {changed}"
    problem = mf.verify_files(folder, recorded["files"])
    if problem:
        return f"{name} is damaged: {problem}"
    for upstream, identity in recorded["inputs"].items():
        why = stale_input(upstream, deployment, workdir)
        if why:
            return why
        if mf.read_manifest(workdir / upstream)["identity"] != identity:
            return f"{name} was made from an older {upstream}"
    return ""


def _run_locked(
    stage: Stage, deployment: "Deployment", workdir: Path, reporter: Reporter, *, force: bool
) -> StageResult:
    for name in stage.needs:
        why = stale_input(name, deployment, workdir)
        if why:
            raise SlipstreamError(
                f"stage {stage.name} cannot start: {why}",
                expected=f"a finished {name} that belongs to this deployment in {workdir}",
                do=f"run `slipstream stage {name} CONFIG` first, or `slipstream run CONFIG` for all stages",
                fault="F17",
            )
    key = _key(stage, deployment, workdir)
    final, partial = workdir / stage.name, _partial_dir(stage.name, workdir)
    if stage.cached and not force:
        _finish_rename(key, partial, final)
        if not _why_needed(key, final):
            figures = mf.read_manifest(final)["figures"]
            reporter.stage_finished(stage.name, status="skipped", seconds=0.0, figures=figures)
            return StageResult(stage.name, "skipped", 0.0, figures, final)

    noting = _Noting(stage, workdir)
    resumed = stage.cached and not force and _partial_fingerprint(partial) == mf.digest(key)
    with noting:
        if not resumed:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            mf.write_json(partial / PARTIAL, {"fingerprint": mf.digest(key)})
        (partial / mf.MANIFEST).unlink(missing_ok=True)
    reporter.stage_started(stage.name, resumed=resumed)
    started, clock = time.time(), time.monotonic()
    figures = stage.run(StageContext(stage, deployment, workdir, partial, reporter, resumed=resumed))
    seconds = time.monotonic() - clock

    with noting:
        partial.mkdir(parents=True, exist_ok=True)
        (partial / PARTIAL).unlink(missing_ok=True)
        files = mf.index_files(partial)
        content = mf.digest([mf.digest(key), files]) if stage.cached else mf.digest(key)
        mf.write_json(
            partial / mf.MANIFEST,
            {
                "stage": stage.name,
                "stage_version": stage.version,
                "fingerprint": mf.digest(key),
                "identity": content,
                **{part: key[part] for part in ("inputs", "external", "config", "versions")},
                "command": mf.command_line(),
                "figures": figures,
                "files": files,
                "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
                "seconds": round(seconds, 3),
            },
        )
        replace_dir(partial, final)
    noting.end()
    reporter.stage_finished(stage.name, status="done", seconds=seconds, figures=figures)
    return StageResult(stage.name, "done", seconds, figures, final)


class _Noting:
    """What a stage writes of itself. Where it does its work all the same, what the disk refuses is kept for its end."""

    def __init__(self, stage: Stage, workdir: Path) -> None:
        self._stage, self._workdir = stage, workdir
        self._refused: OSError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._refused = error if isinstance(error, OSError) and takes_nothing(error) else None  # the last time counts
        return self._refused is not None and not self._stage.needs_room

    def end(self) -> None:
        """Raises SlipstreamError where the work is done and could not be noted."""
        if self._refused is not None:
            raise SlipstreamError(
                f"stage {self._stage.name} did its work, and its manifest could not be written to {self._workdir}: "
                f"{self._refused}",
                expected="a disk with room for a few kilobytes",
                do="make room there; nothing else is left to do",
                runbook="disk-full.md",
            ) from self._refused


def _key(stage: Stage, deployment: "Deployment", workdir: Path) -> dict[str, Any]:
    """Everything a fingerprint is made of, kept readable so that a change can be named."""
    return {
        "name": stage.name,
        "stage_version": stage.version,
        "config": _config_subset(deployment, stage.config_sections),
        "inputs": {name: mf.read_manifest(workdir / name)["identity"] for name in stage.needs},
        "external": stage.external(deployment),
        "versions": mf.tool_versions(),
    }


def _why_needed(key: Mapping[str, Any], final: Path) -> str:
    """Why a finished directory is not the output for `key`; "" when it is."""
    if not (final / mf.MANIFEST).is_file():
        return "has not run"
    try:
        recorded = mf.read_manifest(final)
    except mf.DamagedManifest as error:
        return f"damaged: {error.problem}"
    if recorded["fingerprint"] != mf.digest(dict(key)):
        for part in ("config", "inputs", "external", "versions", "stage_version"):
            changed = _difference({part: recorded.get(part)}, {part: key[part]})
            if changed:
                return f"changed: {changed}"
        return "its fingerprint changed"
    problem = mf.verify_files(final, recorded["files"])
    return f"damaged: {problem}" if problem else ""


def _difference(old: Any, new: Any, path: str = "") -> str:
    """The first difference of two JSON values, as `a.b: old -> new`; "" when there is none."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(k for k in new if k not in old)]:
            found = _difference(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
            if found:
                return found
        return ""
    return "" if old == new else f"{path}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _config_subset(deployment: "Deployment", paths: tuple[str, ...]) -> dict[str, Any]:
    """Path ("capture", "target.source") -> value as JSON. Raises KeyError for a path that the schema does not have."""
    values = deployment.model_dump(mode="json")
    result = {}
    for path in paths:
        value: Any = values
        for part in path.split("."):
            value = value[part]
        without = NOT_OF_THE_OUTPUT.get(path, ())
        result[path] = {key: value[key] for key in value if key not in without} if without else value
    return result


def _partial_dir(name: str, workdir: Path) -> Path:
    return workdir / f"{name}.partial"


def _partial_fingerprint(partial: Path) -> str:
    try:
        recorded = mf.read_json(partial / PARTIAL)
    except (FileNotFoundError, SlipstreamError):
        return ""
    return str(recorded.get("fingerprint", "")) if isinstance(recorded, dict) else ""


def _finish_rename(key: Mapping[str, Any], partial: Path, final: Path) -> None:
    """A run that was killed between its manifest and its rename has finished: only the rename is missing."""
    if (partial / mf.MANIFEST).is_file() and not _why_needed(key, partial):
        replace_dir(partial, final)


def replace_dir(new: Path, final: Path) -> None:
    """Puts a whole directory in the place of another."""
    old = final.with_name(f"{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)

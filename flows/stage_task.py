"""A stage as a Prefect task: shown by its name, and taken from Prefect's cache where its output is still there.

One cache key for all stages: the stage's own fingerprint (name, version, settings, content of what it reads, tools) on
its host and in its working directory. A hit says that some run made this output once. Whether it still lies there,
whole and the same, is verified afterwards where it lies; if not, the stage runs and the cache is refreshed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.utilities.annotations import NotSet

from slipstream.engine.errors import SlipstreamError
from slipstream.flows.events import stage_ended
from slipstream.tasks.manifest import MANIFEST, digest, read_manifest
from slipstream.tasks.registry import all_stages
from slipstream.tasks.reporting import Reporter
from slipstream.tasks.stage import Stage, StageResult
from slipstream.tasks.stage_look import StageLook
from slipstream.tasks.stage_runner import StageRunner, stage_folder

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.configs.schema import Deployment


class StageTasks:
    """Runs stages of one deployment as tasks of the present flow run.

    Args:
        run: where they run.
        deployment: theirs.
        workdir: theirs.
        reporter: told of a stage that was taken from the cache; `run` tells the others.
        refresh: repeat what is done, as `run` was told to.
    """

    def __init__(
        self, run: StageRunner, deployment: "Deployment", workdir: "Path", reporter: Reporter, *, refresh: bool = False
    ) -> None:
        self._run, self._deployment, self._workdir, self._reporter = run, deployment, workdir, reporter
        self._refresh = refresh
        self._looks: dict[str, StageLook] = {}

    def __call__(self, stage: Stage) -> StageResult:
        """Runs a stage, or takes it from the cache."""
        results: list[StageResult] = []  # not the task's own result, which Prefect would store
        key = self._cache_key(stage)

        def body() -> dict[str, Any]:
            found = None if key is None or self._refresh else self._as_it_lies(stage)
            if found is None:
                self._looks.clear()  # whatever it does, what was seen before is not sure any more
                found = self._run(stage)
            results.append(found)
            return {"stage": stage.name, "identity": read_manifest(found.dir)["identity"]}

        # A new task for each stage, without parameters: Prefect would walk through and store them.
        made = task(
            name=stage.name,
            task_run_name=stage.name,
            cache_key_fn=None if key is None else lambda context, parameters: key,
            cache_policy=NO_CACHE if key is None else NotSet,
            persist_result=key is not None,
            result_serializer="json",  # not pickled: it is read by people and by other versions
            refresh_cache=self._refresh,
        )(body)
        recorded = made()
        hit = not results
        if hit:
            found = self._as_it_lies(stage, identity=recorded["identity"])
            if found is None:
                made.with_options(refresh_cache=True)()
            else:
                results.append(found)
        stage_ended(stage, results[-1], self._workdir)
        return results[-1]

    def looks(self) -> list[StageLook]:
        """What lies on the host of every stage that may be taken from there."""
        return list(self._look_from(next(known for known in all_stages() if known.cached)).values())

    def require(self, names: Sequence[str], what: str) -> None:
        """Raises SlipstreamError (F17) when one of the stages is not done, before `what` stops or starts anything."""
        for look in self._run.look(names):
            if not look.done:
                raise SlipstreamError(
                    f"{what} cannot start: stage {look.name} is not done: {look.why}",
                    expected=f"finished stages {', '.join(names)} of this deployment; what runs now was left alone",
                    do="run the lifecycle first: `slipstream run CONFIG`, or its deployment",
                    runbook="run-failed.md",
                    fault="F17",
                )

    def _cache_key(self, stage: Stage) -> str | None:
        """None for a stage that acts on the world, and while its inputs are not known: then it runs."""
        if not stage.cached:
            return None
        look = self._look_from(stage)[stage.name]
        if not look.fingerprint:
            return None
        host = self._deployment.host
        where = [str(host.ssh_address), host.directory] if host.kind == "ssh" else ["local"]
        return f"slipstream-{stage.name}-{digest([*where, str(self._workdir.absolute()), look.fingerprint])}"

    def _look_from(self, stage: Stage) -> dict[str, StageLook]:
        """What lies there of it and of the stages after it. One look serves them all until one of them runs."""
        if stage.name not in self._looks:
            order = [known.name for known in all_stages() if known.cached]
            names = order[order.index(stage.name) :]
            self._looks = {look.name: look for look in self._run.look(names)}
        return self._looks

    def _as_it_lies(self, stage: Stage, identity: str | None = None) -> StageResult | None:
        """The result of a finished stage; None when its output is not there, whole and (with `identity`) the same."""
        look = self._look_from(stage)[stage.name]
        folder = stage_folder(self._deployment, self._workdir, stage.name)
        if not look.done or look.identity != (identity or look.identity) or not _is_of(folder, look.identity):
            return None
        self._reporter.stage_finished(stage.name, status="skipped", seconds=0.0, figures=look.figures)
        return StageResult(stage.name, "skipped", 0.0, look.figures, folder)


def _is_of(folder: "Path", identity: str) -> bool:
    """Whether what people look at is on this machine, too."""
    return (folder / MANIFEST).is_file() and read_manifest(folder)["identity"] == identity

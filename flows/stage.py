"""Flow `stage`: any one stage of a deployment, by its name. What it reads must be done; what is done is skipped."""

from enum import StrEnum
from typing import Any

from prefect import flow

from slipstream.flows import hooks
from slipstream.flows.artifacts import publish_figures, publish_report
from slipstream.flows.by_hand import SERVING_STAGES
from slipstream.flows.deployed import deployed
from slipstream.flows.fan_out import WHOLE, fan_out
from slipstream.flows.replace_server import replace_server
from slipstream.tasks.checks import refuse_other_engine
from slipstream.tasks.registry import get_stage


class StageName(StrEnum):
    """The stages, for the list in Prefect's form."""

    RESOLVE = "resolve"
    REGENERATE = "regenerate"
    EXTRACT = "extract"
    TRAIN = "train"
    CONVERT = "convert"
    PARITY = "parity"
    CLEANUP = "cleanup"
    TUNE = "tune"
    LAUNCH = "launch"
    BENCHMARK = "benchmark"
    REPORT = "report"
    RESTORE = "restore"


@flow(
    name="stage",
    description=__doc__,
    persist_result=False,
    on_failure=[hooks.bring_back],
    on_cancellation=[hooks.bring_back],
    on_crashed=[hooks.bring_back],
)
def stage(name: StageName, config: str, overrides: list[str] | None = None, force: bool = False) -> dict[str, Any]:
    """Runs one stage of a deployment.

    Args:
        name: The stage.
        config: Path of the deployment's YAML file, from the directory of the project.
        overrides: Values that outrank the file, each as section.field=value, such as training.epochs=2.
        force: Repeat the stage even if it is done.

    Returns: its status and its seconds.
    """
    with deployed(config, overrides or (), force=force) as here:
        if name in SERVING_STAGES:
            refuse_other_engine(here.deployment, f"stage {name}")
        if name in WHOLE:
            fan_out(here, config, list(overrides or ()))
        result = replace_server(here) if name == StageName.LAUNCH else here.tasks(get_stage(str(name)))
        publish_figures(result)
        if result.name == "report":
            publish_report(result)
    return {"status": result.status, "seconds": result.seconds}

"""Flow `cleanup`: stop what runs of a deployment started and left, prove that it is gone, leave all else alone."""

from typing import Any

from prefect import flow

from slipstream.flows.artifacts import publish_figures
from slipstream.flows.deployed import deployed
from slipstream.tasks.hosts.replicas import stop_others
from slipstream.tasks.registry import get_stage


@flow(name="cleanup", description=__doc__, persist_result=False)
def cleanup(config: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """Stops what a deployment's runs left on its hosts, by the records there.

    Args:
        config: Path of the deployment's YAML file, from the directory of the project.
        overrides: Values that outrank the file, each as section.field=value.

    Returns: the figures of the stage: what was stopped.
    """
    with deployed(config, overrides or ()) as here:
        result = here.tasks(get_stage("cleanup"))
        publish_figures(result)
        stop_others(here.deployment, here.workdir, here.reporter)
    return result.figures

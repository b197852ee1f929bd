"""Flow `lifecycle`: from a package to a benchmarked speculative server and back to a clean machine.

One flow with a Prefect task for each stage, and over several hosts for each share of the prompts. Whatever happens,
servers that the run started are stopped, but for `server.after: keep` after a run that ended well, and on a far host
that cannot be reached.
"""

from typing import Any

from prefect import flow

from slipstream.engine.errors import SlipstreamError
from slipstream.flows.artifacts import publish_plan, publish_report
from slipstream.flows.deployed import deployed
from slipstream.flows.fan_out import WHOLE, fan_out
from slipstream.flows.hooks import stop_what_ran
from slipstream.flows.plan import make_plan
from slipstream.tasks import gates
from slipstream.tasks.checks import refuse, refuse_other_engine
from slipstream.tasks.hosts.host import HostUnreachable
from slipstream.tasks.registry import all_stages, get_stage


@flow(
    name="lifecycle",
    description=__doc__,
    persist_result=False,
    on_failure=[stop_what_ran],
    on_cancellation=[stop_what_ran],
    on_crashed=[stop_what_ran],
)
def lifecycle(config: str, overrides: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Runs all stages of a deployment.

    Args:
        config: Path of the deployment's YAML file, from the directory of the project.
        overrides: Values that outrank the file, each as section.field=value, such as training.epochs=2.

    Returns: stage -> {"status": "done" | "skipped", "seconds"}.
    Raises what a stage raises; SlipstreamError when a gate fails, after the report is written.
    """
    with deployed(config, overrides or ()) as here:
        refuse_other_engine(here.deployment, "the lifecycle")
        try:
            here.run(get_stage("cleanup"))  # servers of an earlier run that was killed
            plan = make_plan(config, overrides or ())
            publish_plan(plan, () if plan.errors else here.tasks.looks())
            refuse(plan.findings)
            results = []
            for stage in all_stages():
                if stage.name == WHOLE[0]:
                    fan_out(here, config, list(overrides or ()))
                results.append(here.tasks(stage))
            publish_report(results[-1])
            gates.require(results[-1].figures["gates"])
        except HostUnreachable:
            raise  # nothing can be stopped there now: what runs goes on, and the next run finds it
        except BaseException:
            # Outside of Prefect: it has to work when the flow is being torn down.
            try:
                here.run(get_stage("cleanup"))
            except SlipstreamError as error:  # no reason to end for another reason than the first
                here.reporter.warn("cleanup", f"{error.found}: `slipstream clean` stops what still runs")
            raise
        if here.deployment.server.after != "keep":
            here.run(get_stage("cleanup"))
    return {result.name: {"status": result.status, "seconds": result.seconds} for result in results}

"""Flow `serve`: replace the running server by one of what the lifecycle made: launch, benchmark.

Launch means: make room, start, health, proof of the settings, parity smoke. Until it has succeeded the way back is
open: whatever ends the run before, the last good server is brought back, by the transaction or by a hook in the worker.
The new server goes on running when the flow is done, also when the benchmark fails; flow `cleanup` ends it.
"""

from typing import Any

from prefect import flow

from slipstream.flows import hooks
from slipstream.flows.artifacts import publish_figures, publish_plan, publish_server
from slipstream.flows.deployed import deployed
from slipstream.flows.plan import make_plan
from slipstream.flows.replace_server import replace_server
from slipstream.tasks.checks import refuse, refuse_other_engine
from slipstream.tasks.registry import get_stage


@flow(
    name="serve",
    description=__doc__,
    persist_result=False,
    on_failure=[hooks.bring_back],
    on_cancellation=[hooks.bring_back],
    on_crashed=[hooks.bring_back],
)
def serve(config: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """Launches the server of a deployment in place of the one that runs, and measures it.

    Args:
        config: Path of the deployment's YAML file, from the directory of the project.
        overrides: Values that outrank the file, each as section.field=value, such as server.port=8000.

    Returns: base_url, model and pid of the server.
    Raises SlipstreamError when the stages before it are not done (nothing is stopped then), and what a stage raises.
    """
    with deployed(config, overrides or ()) as here:
        refuse_other_engine(here.deployment, "flow serve")
        launch, benchmark = get_stage("launch"), get_stage("benchmark")
        needed = [name for name in dict.fromkeys((*launch.needs, *benchmark.needs)) if name != launch.name]
        here.tasks.require(needed, "flow serve")
        plan = make_plan(config, overrides or ())
        publish_plan(plan, () if plan.errors else here.tasks.looks())
        refuse([finding for finding in plan.findings if finding.fault != "F15"])  # what runs is about to be replaced
        launched = replace_server(here)
        publish_server(launched)
        publish_figures(here.tasks(benchmark))
    return {key: launched.figures.get(key) for key in ("base_url", "model", "pid")}

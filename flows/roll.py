"""Flow `roll`: replace the servers on all hosts of a deployment, one by one, without losing a request.

The draft that the first host made is brought to the others. Then each server in turn leaves (/health says 503, requests
are still answered), comes to its end, and is replaced as by flow `serve`. Where one does not come up, all hosts go back
to what served before, also when the flow is killed: by a hook in the worker, by the next roll, or by stage restore.
"""

from collections.abc import Callable
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from slipstream.engine.errors import SlipstreamError
from slipstream.flows import hooks
from slipstream.flows.deployed import deployed
from slipstream.flows.events import tell
from slipstream.flows.plan import make_plan
from slipstream.tasks.checks import refuse, refuse_other_engine
from slipstream.tasks.hosts.replicas import bring_draft, open_replicas, reach, read_roll
from slipstream.tasks.hosts.replicas import roll as roll_replicas
from slipstream.tasks.registry import get_stage


@flow(
    name="roll",
    description=__doc__,
    persist_result=False,
    on_failure=[hooks.bring_back],
    on_cancellation=[hooks.bring_back],
    on_crashed=[hooks.bring_back],
)
def roll(config: str, overrides: list[str] | None = None) -> list[dict[str, Any]]:
    """Replaces the servers of a deployment with several hosts one by one.

    Args:
        config: Path of the deployment's YAML file, from the directory of the project.
        overrides: Values that outrank the file, each as section.field=value, such as roll.leave_seconds=30.

    Returns: for each host its base_url, model, pid and A_1 of the smoke test.
    Raises HostUnreachable for a host that does not answer, and SlipstreamError for a draft that is not done or another
    target on a host: nothing is touched then. What a stage raises: all hosts are back as before then.
    """
    with deployed(config, overrides or ()) as here:
        refuse_other_engine(here.deployment, "flow roll")
        refuse([finding for finding in make_plan(config, overrides or ()).findings if finding.fault != "F15"])
        with open_replicas(here.deployment, here.workdir, here.reporter) as replicas:
            reach(replicas)
            _as_task("bring the draft", lambda: bring_draft(replicas, here.workdir))
            try:
                rows = roll_replicas(replicas, here.workdir, _as_task)
            except BaseException:  # outside of Prefect: it has to work when the flow is being torn down
                if read_roll(here.workdir) is not None:
                    try:
                        here.run(get_stage("restore"))
                    except SlipstreamError as error:  # no reason to end for another reason than the first
                        here.reporter.warn("roll", str(error))
                    tell("roll.taken_back", here.workdir)
                raise
        create_table_artifact(key="slipstream-replicas", table=rows, description="Every server that was replaced.")
        tell("roll.done", here.workdir, hosts=len(rows))
    return rows


def _as_task(name: str, work: Callable[[], None]) -> None:
    """A part of the roll, shown by its name."""
    made = task(name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)(work)
    made()

"""A look at stages on the deployment's far host: one short command there for all of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts.far_stage import environment_python, run_name, send_deployment
from slipstream.tasks.hosts.host import Host
from slipstream.tasks.stage_look import StageLook

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

MODULE = "slipstream.tasks.stage_look"


def far_looks(host: Host, names: Sequence[str], deployment: "Deployment", workdir: Path) -> list[StageLook]:
    """What `stage_look.look_at` tells of each stage there. Raises SlipstreamError where the host cannot say it."""
    config = send_deployment(host, deployment, host.directory, run_name(workdir))
    done = host.run((environment_python(host), "-P", "-m", MODULE, config, *names))
    if done.exit_code != 0 or done.truncated:
        raise SlipstreamError(
            f"the stages on {host.name} cannot be looked at: {done.stderr.strip()[-500:] or done.exit_code}",
            expected="their manifests, as JSON",
            do="run `slipstream host provision CONFIG` again: the host's Slipstream may be older than this one",
            runbook="run-failed.md",
        )
    return [StageLook(**look) for look in json.loads(done.stdout.strip().splitlines()[-1])]

"""The one list of checks that `slipstream plan`, `slipstream run` and the launch stage share."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.checks_deployment import DEPLOYMENT
from slipstream.tasks.checks_left_over import LEFT_OVER
from slipstream.tasks.checks_machine import MACHINE
from slipstream.tasks.checks_other_engine import OTHER_ENGINE
from slipstream.tasks.contradictions import Check, Contradictions, Finding, refuse, run_checks
from slipstream.tasks.facts import Facts, gather
from slipstream.tasks.other_engines.nccl import F16, NCCL_TUNED
from slipstream.tasks.other_engines.sglang_effects import LAUNCH_LINE
from slipstream.tasks.rank_memory import RANK_MEMORY

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

__all__ = [
    "CHECKS",
    "Check",
    "Contradictions",
    "Facts",
    "Finding",
    "find",
    "gather",
    "refuse",
    "refuse_far_host",
    "refuse_other_engine",
]

# First what the deployment alone contradicts, then what earlier runs left, then the machine.
CHECKS: tuple[Check, ...] = (
    *DEPLOYMENT,
    *RANK_MEMORY,
    *LAUNCH_LINE,
    F16,
    NCCL_TUNED,
    *LEFT_OVER,
    *OTHER_ENGINE,
    *MACHINE,
)


def find(facts: Facts, skip: Collection[str] = ()) -> list[Finding]:
    """Every contradiction and warning; `skip` names checks to leave out (for tests)."""
    return run_checks(CHECKS, facts, skip)


def refuse_other_engine(deployment: "Deployment", what: str) -> None:
    """Raises SlipstreamError where `what` would need the server of an engine that Slipstream does not start."""
    engine = deployment.server.engine
    if engine != "slipstream":
        raise SlipstreamError(
            f"server.engine = {engine}: {what} would start its server",
            expected="server.engine: slipstream, whose server Slipstream starts, checks and stops",
            do=f"`slipstream plan` checks a launch of {engine}: start it yourself; or leave server.engine out",
            runbook="wrong-flags.md",
        )


def refuse_far_host(deployment: "Deployment", what: str) -> None:
    """Raises SlipstreamError where `what` would run on a far host, which knows only the stages installed there."""
    host = deployment.host
    if host.kind != "local":
        raise SlipstreamError(
            f"host.kind = {host.kind}: {what} does not go to {host.address}",
            expected="a stage as it is installed there",
            do="leave out what changes it, such as --inject, or give the same command on the host itself",
        )

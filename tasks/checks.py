"""The one list of checks that `slipstream plan`, `slipstream run` and the launch stage share."""

from collections.abc import Collection

from slipstream.tasks.checks_deployment import DEPLOYMENT
from slipstream.tasks.checks_left_over import LEFT_OVER
from slipstream.tasks.checks_machine import MACHINE
from slipstream.tasks.checks_other_engine import OTHER_ENGINE
from slipstream.tasks.contradictions import Check, Contradictions, Finding, refuse, run_checks
from slipstream.tasks.facts import Facts, gather

__all__ = ["CHECKS", "Check", "Contradictions", "Facts", "Finding", "find", "gather", "refuse"]

# First what the deployment alone contradicts, then what earlier runs left, then the machine.
CHECKS: tuple[Check, ...] = (*DEPLOYMENT, *LEFT_OVER, *OTHER_ENGINE, *MACHINE)


def find(facts: Facts, skip: Collection[str] = ()) -> list[Finding]:
    """Every contradiction and warning; `skip` names checks to leave out (for tests)."""
    return run_checks(CHECKS, facts, skip)

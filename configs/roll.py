"""The section that says how servers on several hosts are replaced one by one."""

from pydantic import Field

from slipstream.configs.base import CountOrZero, PositiveFloat, Section


class Roll(Section):
    """How a server is taken out before it is replaced. Whoever balances load must look at /health of each server."""

    leave_seconds: CountOrZero = Field(
        default=15,
        description="How long a server that is to be replaced says 503 on /health, and answers all the same, before "
        "it is believed that no more requests come: more than the time in which the load balancer notices (its "
        "interval x the failures that it wants to see).",
    )
    drain_seconds: PositiveFloat = Field(
        default=600.0,
        description="How long it may then go on answering what it has begun; a server that takes longer is left as "
        "it is, and the roll ends there.",
    )

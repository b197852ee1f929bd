"""Prefect's limit for a host: one flow at a time, the next one waits. Advice only; the lock on the host decides.

`slipstream up` creates it. A limit that does not exist would hold nobody back without a word, so that is said. Its
lease is short, so that a flow that was killed blocks the next one for a minute and not for five; and a lease that
cannot be renewed ends no run that is well.
"""

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

LEASE_SECONDS = 60.0


def limit_name(deployment: "Deployment") -> str:
    """The limit of a deployment's host."""
    host = deployment.host
    name = socket.gethostname() if host.address is None else host.address
    return "slipstream-host-" + re.sub(r"[^a-z0-9.-]", "-", name.lower())


def create_limit(deployment: "Deployment") -> bool:
    """Creates the limit of the host, unless it is there. Returns whether it was made."""
    name = limit_name(deployment)
    if _exists(name):
        return False
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
    return True


@contextmanager
def host_limit(deployment: "Deployment", say: Callable[[str], None]) -> Iterator[None]:
    """Holds the host's slot, and waits for it where another flow has it."""
    name = limit_name(deployment)
    if not _exists(name):
        say(
            f"Prefect has no concurrency limit {name} (`slipstream up` creates it): flows for this host do not wait "
            "for each other here; the lock on the host still keeps them apart"
        )
        yield
        return
    with concurrency(name, strict=False, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False):
        yield


def _exists(name: str) -> bool:
    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            return False
    return True

"""Prefect's limit for a host: made by set-up, said when missing, held by one flow at a time, with a short lease."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slipstream.configs.schema import Deployment

HOST = {"kind": "ssh", "address": "Gpu-7.example"}


@pytest.fixture
def deployment(with_prefect: str) -> Iterator[Deployment]:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    yield Deployment(host=HOST)  # type: ignore[arg-type]
    with get_client(sync_client=True) as client:
        try:
            client.delete_global_concurrency_limit_by_name("slipstream-host-gpu-7.example")
        except ObjectNotFound:
            return


def active(name: str) -> int:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return int(client.read_global_concurrency_limit_by_name(name).active_slots)


def test_a_limit_that_does_not_exist_holds_nobody_and_says_so(deployment: Deployment) -> None:
    from slipstream.flows.host_limit import host_limit

    said: list[str] = []
    with host_limit(deployment, said.append):
        pass
    assert "no concurrency limit slipstream-host-gpu-7.example (`slipstream up` creates it)" in said[0]


def test_one_flow_at_a_time(deployment: Deployment) -> None:
    from slipstream.flows.host_limit import create_limit, host_limit, limit_name

    name = limit_name(deployment)
    assert limit_name(Deployment()) == f"slipstream-host-{socket.gethostname().lower()}"
    assert create_limit(deployment)
    assert not create_limit(deployment)
    order: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with host_limit(deployment, order.append):
            inside.set()
            assert leave.wait(60)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    assert active(name) == 1
    threading.Timer(0.5, leave.set).start()
    with host_limit(deployment, order.append):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert active(name) == 0


def test_the_lease_is_short_and_its_loss_ends_no_run(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.flows import host_limit

    asked: dict[str, Any] = {}

    @contextmanager
    def concurrency(name: str, **options: Any) -> Iterator[None]:
        asked.update(options, name=name)
        yield

    host_limit.create_limit(deployment)
    monkeypatch.setattr(host_limit, "concurrency", concurrency)
    with host_limit.host_limit(deployment, print):
        pass
    assert asked["lease_duration"] <= 60  # default 300: so long a killed holder blocks the next one
    assert asked["raise_on_lease_renewal_failure"] is False

"""One Prefect server for all tests of a session, and the flows that talk to it."""

import os
from collections.abc import Iterator
from types import ModuleType

import pytest

from slipstream.flows.prefect_server import prefect_server


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which Prefect's commands find the session's server; ours is left as it was."""
    before = dict(os.environ)
    os.environ.pop("PREFECT_API_URL", None)
    with prefect_server(tmp_path_factory.mktemp("prefect")):
        import prefect  # noqa: F401  (reads its settings now)

        inside = dict(os.environ)
        os.environ.clear()
        os.environ.update(before)
        try:
            yield inside
        finally:
            os.environ["PREFECT_API_URL"] = inside["PREFECT_API_URL"]  # as the server's own end expects it
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def with_prefect(prefect_api: dict[str, str]) -> Iterator[str]:
    """This process talks to the session's server, even if another test imported prefect before. Yields its URL."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    url = prefect_api["PREFECT_API_URL"]
    with temporary_settings(updates={PREFECT_API_URL: url, PREFECT_HOME: prefect_api["PREFECT_HOME"]}):
        yield url


@pytest.fixture
def flow(with_prefect: str) -> ModuleType:
    """slipstream.flows.lifecycle, talking to the session's server."""
    from slipstream.flows import lifecycle

    return lifecycle

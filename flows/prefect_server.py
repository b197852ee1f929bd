"""Prefect's own server for the time of one run, with its database in the workdir.

Prefect can start such a server by itself, but as our child in our process group: Ctrl-C in a terminal kills it first,
and the flow then waits for minutes to tell it how it ended; after `kill -9` it stays and nobody knows it. Here it is
started like any detached process of ours, with a state file, so that the next run finds and stops it.

Nothing here imports prefect: the settings have to stand in the environment before that.
"""

import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.lock import workdir_lock
from slipstream.tasks.ports import free_port
from slipstream.tasks.process import Detached, forget, read_record, start_detached, stop_group, tail

HEALTHY_SECONDS = 120.0  # a new database takes 10 s on a busy machine, a loaded CI much longer
STOP_SECONDS = 10.0
ADDRESS = "127.0.0.1"
STARTS = 3  # another process may take the free port before the server does
SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",  # two channels report to Prefect by default; both stay off
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",  # a server that every command starts for itself hides a wrong address
    "PREFECT_SERVER_UI_ENABLED": "false",
    "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
}
QUIET = {"PREFECT_LOGGING_LEVEL": "CRITICAL"}  # errors are shown by us, in words, not as tracebacks of the flow engine


@contextmanager
def prefect_server(workdir: Path) -> Iterator[str]:
    """Makes a Prefect API available and yields its URL: that of PREFECT_API_URL where it is set, else our own server.

    Raises SlipstreamError when the server does not become healthy.
    """
    home = workdir / "prefect"
    for name, value in {**SETTINGS, **QUIET, "PREFECT_HOME": str(home.absolute())}.items():
        os.environ.setdefault(name, value)
    given = os.environ.get("PREFECT_API_URL")
    if given:
        yield given
        return
    stop_left_over(workdir)
    server, url = _start(home)
    # In the environment it outranks a .env or prefect.toml that happens to lie in the current directory.
    os.environ["PREFECT_API_URL"] = url
    try:
        yield url
    finally:
        del os.environ["PREFECT_API_URL"]
        stop_group(server.identity, drain_seconds=STOP_SECONDS)
        forget(server.state_file)


def stop_left_over(workdir: Path) -> bool:
    """Stops the Prefect server of a run that was killed. Returns whether there was one.

    Raises SlipstreamError when another run holds the workdir: then it is no left-over; and when its record is damaged,
    or cannot be removed.
    """
    state_file = workdir / "prefect" / "server.state.json"
    with workdir_lock(workdir, needs_room=False):
        record = read_record(state_file)
        if record is None:
            return False
        report = stop_group(record.identity, drain_seconds=STOP_SECONDS)
        try:
            forget(state_file)
        except OSError as error:
            raise SlipstreamError(
                f"the Prefect server of a killed run is gone, and its record stays: {error}",
                expected="a record that can be removed",
                do=f"correct what the system refuses, then delete {state_file}",
            ) from error
    return bool(report.ended or report.killed)


def _start(home: Path) -> tuple[Detached, str]:
    for attempt in range(STARTS):
        try:
            return start(home, free_port())
        except SlipstreamError:
            if attempt == STARTS - 1:
                raise
    raise AssertionError("unreachable")


def start(home: Path, port: int, *, ui: bool = False) -> tuple[Detached, str]:
    """Starts Prefect's server at a port of this machine and waits until it is healthy. Returns it and its API's URL.

    Raises SlipstreamError, and leaves nothing running, when it does not become healthy.
    """
    log, url = home / "server.log", f"http://{ADDRESS}:{port}/api"
    server = start_detached(
        [sys.executable, "-P", "-m", "prefect", "server", "start", "--host", ADDRESS, "--port", str(port)],
        log=log,
        state_file=home / "server.state.json",
        # The page asks this address; by itself it would ask Prefect's own port, wherever the server is.
        env={"PREFECT_SERVER_UI_ENABLED": "true", "PREFECT_SERVER_UI_API_URL": url} if ui else None,
        notes={"api": url},
    )
    try:
        if becomes_healthy(lambda: server.exit_code() is None, url):
            return server, url
    except BaseException:
        stop_group(server.identity, drain_seconds=STOP_SECONDS)
        forget(server.state_file)
        raise
    stop_group(server.identity, drain_seconds=STOP_SECONDS)
    forget(server.state_file)
    raise SlipstreamError(
        f"Prefect's server did not start; its last lines: {tail(log) or 'none'}",
        expected=f"an answer to {url}/health within {HEALTHY_SECONDS:.0f} s",
        do=f"read {log}; delete {home} if its database is damaged; or set PREFECT_API_URL to a server of your own",
    )


def answers(api: str) -> bool:
    """Whether a healthy Prefect server is at this URL."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{api}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def becomes_healthy(lives: Callable[[], bool], url: str) -> bool:
    """Waits for the health check; False when the process ended or the time is up."""
    deadline = time.monotonic() + HEALTHY_SECONDS
    while lives() and time.monotonic() < deadline:
        if answers(url):
            return True
        time.sleep(0.1)
    return False

"""Which flow run holds a working directory, on disk: what survives a run that could not say how it ended.

A run by a worker is told to Prefect's server by the worker. One of a script that was killed, or lost its terminal
before our handlers were there, stays `Running` for ever; so does one that was cancelled by hand (`Cancelling`), since
nobody passes it on. The next run of the working directory and `slipstream abandon` find such a run here.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json
from slipstream.flows.prefect_server import answers
from slipstream.tasks.manifest import write_json
from slipstream.tasks.process import ProcessIdentity, is_alive

FILE = "flow-run.json"
UNTOLD = "flow-run-"  # and its id: a dead run whose server could not be told, when the next one came
# The stage that deals with what a run left: a server that one replaced comes back.
AFTER = {"lifecycle": "cleanup", "cleanup": "cleanup", "serve": "restore", "stage": "restore", "roll": "restore"}
UNWOUND: set[str] = set()  # flow runs of this process whose `finally` has run: their hooks have nothing to clean up


@dataclass(frozen=True)
class RunRecord:
    """A flow run: its id, its flow, the server it is told to, its process, since when."""

    flow_run_id: str
    flow: str
    api: str
    identity: ProcessIdentity
    since: str


@contextmanager
def run_record(workdir: Path, flow_run_id: str, flow: str, api: str) -> Iterator[None]:
    """Notes the run while it goes on. A record of a dead one is settled first: told to the server as crashed."""
    old = read_run(workdir)
    if (
        old is not None
        and not is_alive(old.identity)
        and abandon(old, why="the next run found its process dead") is None
    ):
        (workdir / FILE).rename(workdir / f"{UNTOLD}{old.flow_run_id}.json")  # for `slipstream abandon`
    identity = ProcessIdentity.of(os.getpid())
    assert identity is not None
    record = RunRecord(flow_run_id, flow, api, identity, time.strftime("%Y-%m-%d %H:%M:%S"))
    write_json(workdir / FILE, asdict(record))
    try:
        yield
    finally:
        UNWOUND.add(flow_run_id)
        (workdir / FILE).unlink(missing_ok=True)


def read_run(workdir: Path) -> RunRecord | None:
    """The run that noted itself last and did not take its note back; None where there is none."""
    return _read(workdir / FILE)


def untold_runs(workdir: Path) -> dict[Path, RunRecord]:
    """Dead runs before it that their servers have not been told of."""
    found = {path: _read(path) for path in sorted(workdir.glob(f"{UNTOLD}*.json"))}
    return {path: record for path, record in found.items() if record is not None}


def _read(path: Path) -> RunRecord | None:
    if not path.is_file():
        return None
    value = read_json(path, expected="the record of a flow run", do=f"delete {path}")
    try:
        return RunRecord(**{**value, "identity": ProcessIdentity(**value["identity"])})
    except (KeyError, TypeError) as error:
        raise SlipstreamError(
            f"{path} is not the record of a flow run: {error!r}", expected="its id and process", do=f"delete {path}"
        ) from error


def abandon(record: RunRecord, why: str) -> str | None:
    """Tells a dead run's own server that it has crashed, if that knows the run and still believes in it.

    Returns the state that the run had, a name of Prefect's; "" for a run that its server does not know; None where its
    server does not answer and the present one does not know it: then nobody was told, and the record has to stay.
    Raises SlipstreamError when its process lives.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.states import Crashed

    if is_alive(record.identity):
        raise SlipstreamError(
            f"the {record.flow} run here lives: process {record.identity.pid}, since {record.since}",
            expected="a run whose process is dead",
            do=f"to end it: `kill {record.identity.pid}`, which also cleans up",
            runbook="run-failed.md",
        )
    own = answers(record.api)
    with (
        temporary_settings(updates={PREFECT_API_URL: record.api} if own else {}),
        get_client(sync_client=True) as client,
    ):
        try:
            found = client.read_flow_run(record.flow_run_id)  # type: ignore[arg-type]
        except ObjectNotFound:
            return "" if own else None
        if found.state is not None and not found.state.is_final():
            message = f"process {record.identity.pid} is gone without a word: {why}"
            client.set_flow_run_state(found.id, Crashed(message=message), force=True)
        return str(found.state_name)

"""`slipstream up`, `slipstream abandon` and `slipstream roll`: commands that need Prefect."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.engine.errors import SlipstreamError
from slipstream.flows.arguments import Config, Overrides

if TYPE_CHECKING:
    from slipstream.flows.run_record import RunRecord

DEFAULT_PORT = 4200  # Prefect's own
HOME = Path("runs/prefect")


def require_prefect(command: str) -> None:
    """Looks for Prefect without importing it: it reads its settings then, and they are not set yet."""
    try:
        found = find_spec("prefect") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise SlipstreamError(
            f"`slipstream {command}` needs the package prefect, which is not installed",
            expected="Slipstream with its flows",
            do="pip install 'slipstream[flows]'; `slipstream stage NAME` runs single stages without it",
        )


def up(
    port: Annotated[
        int, typer.Option("--port", min=0, max=65_535, help="Port of the server; 0: any free one.")
    ] = DEFAULT_PORT,
    home: Annotated[Path, typer.Option("--home", help="Folder of database, results, logs and state files.")] = HOME,
    stop: Annotated[bool, typer.Option("--stop", help="End both: the worker with its runs, then the server.")] = False,
) -> None:
    """Start a Prefect server and a worker for this directory, and register the deployments of its prefect.yaml.

    What runs already is left as it is. With PREFECT_API_URL set: only the worker, for that server.
    """
    require_prefect("up")
    from slipstream.flows import up as starting
    from slipstream.flows.signals import unwinding_signals
    from slipstream.tasks.cleanup import refuse_left

    if stop:
        with unwinding_signals():
            ended = starting.stop(home)
        for line in ended.said:
            print(line)
        refuse_left(ended.left)
        return
    with unwinding_signals():  # what was being started is ended again; what runs already is found by the next call
        made = starting.up(Path.cwd(), home, port)
    for line in made.said:
        print(line)
    print(f"page:    {made.page}")
    print(f"use it:  export PREFECT_API_URL={made.api}")
    print("run:     prefect deployment run lifecycle/NAME --watch")
    print(f"stop:    slipstream up --stop{'' if home == HOME else f' --home {home}'}")


def roll(config: Config, overrides: Overrides = None) -> None:
    """Replace the servers on all hosts of a deployment (host.more) one by one, with drain and a way back.

    A load balancer must look at /health of each. The finished draft is brought to the other hosts first.
    """
    require_prefect("roll")
    from slipstream.flows.run import run_roll

    run_roll(config, overrides or ())


def abandon(config: Config, overrides: Overrides = None) -> None:
    """End a run whose process is dead: stop what it left, and tell Prefect's server that it crashed.

    After flows `serve`, `stage` and `roll` the servers that ran before come back.
    """
    require_prefect("abandon")
    from slipstream.configs.load import load
    from slipstream.flows import run_record
    from slipstream.flows.by_hand import run_stages
    from slipstream.flows.prefect_server import prefect_server, stop_left_over
    from slipstream.tasks.process import is_alive

    workdir = load(config, overrides or ()).deployment.host.workdir
    record = run_record.read_run(workdir)
    dead = run_record.untold_runs(workdir) | ({} if record is None else {workdir / run_record.FILE: record})
    if not dead:
        print(f"no run noted itself in {workdir}: nothing to abandon")
        return
    if record is not None and not is_alive(record.identity):
        run_stages((run_record.AFTER.get(record.flow, "cleanup"),), config, overrides, None, as_json=False, force=True)
    try:
        with prefect_server(workdir):
            for path, one in dead.items():
                _abandon(path, one)
    finally:
        stop_left_over(workdir)


def _abandon(path: Path, record: "RunRecord") -> None:
    """Tells the run's server. Raises SlipstreamError, and keeps the record, where that does not answer."""
    from slipstream.flows import run_record

    state = run_record.abandon(record, why="abandoned by hand")
    if state is None:
        raise SlipstreamError(
            f"the Prefect server of {record.flow} run {record.flow_run_id}, {record.api}, does not answer",
            expected="that server, to which the run still goes on; what the run left here was stopped",
            do=f"give the same command again when it answers; if there is no such server any more, delete {path}",
            runbook="prefect-server.md",
        )
    path.unlink(missing_ok=True)
    told = f"it was {state}" if state else "its Prefect server does not know it"
    print(f"abandoned {record.flow} run {record.flow_run_id} of process {record.identity.pid}: {told}")

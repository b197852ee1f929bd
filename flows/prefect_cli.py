"""`slipstream up` and `slipstream abandon`: commands about Prefect."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from slipstream.engine.errors import SlipstreamError
from slipstream.flows.arguments import Config, Overrides

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

    if stop:
        for line in starting.stop(home):
            print(line)
        return
    made = starting.up(Path.cwd(), home, port)
    for line in made.said:
        print(line)
    print(f"page:    {made.page}")
    print(f"use it:  export PREFECT_API_URL={made.api}")
    print("run:     prefect deployment run lifecycle/NAME --watch")
    print(f"stop:    slipstream up --stop{'' if home == HOME else f' --home {home}'}")


def abandon(config: Config, overrides: Overrides = None) -> None:
    """End a run whose process is dead: stop what it left, and tell Prefect's server that it crashed."""
    require_prefect("abandon")
    from slipstream.configs.load import load
    from slipstream.flows import run_record
    from slipstream.flows.by_hand import run_stages
    from slipstream.flows.prefect_server import answers, prefect_server, stop_left_over
    from slipstream.tasks.process import is_alive

    workdir = load(config, overrides or ()).deployment.host.workdir
    record = run_record.read_run(workdir)
    if record is None:
        print(f"no run noted itself in {workdir}: nothing to abandon")
        return
    if not is_alive(record.identity):
        run_stages(("cleanup",), config, overrides, None, as_json=False, force=True)
    if answers(record.api):  # a shared server, or the run's own, which outlived it
        os.environ["PREFECT_API_URL"] = record.api
    with prefect_server(workdir):
        state = run_record.abandon(record, why="abandoned by hand")
    stop_left_over(workdir)
    (workdir / run_record.FILE).unlink(missing_ok=True)
    told = f"it was {state}" if state else "this Prefect server does not know it"
    print(f"abandoned {record.flow} run {record.flow_run_id} of process {record.identity.pid}: {told}")

"""Stand-ins on a replica's host for what takes long: installed as `sitecustomize` of the Python there.

Stage launch does what the real one does (which needs torch), over tests/tasks/stub_server.py. Files in the folder
`control` beside say what its smoke test does on this host: `fail-NAME` fails it, `hang-NAME` makes it wait until the
file is gone. Stage resolve tells the identity that `target-NAME` holds.
"""

import dataclasses
import socket
import sys
import time
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parent
CONTROL = SITE.parent / "control"
HOST = socket.gethostname()


def resolve(context: Any) -> dict[str, Any]:
    file = CONTROL / f"target-{HOST}"
    identity = {"target": file.read_text() if file.exists() else "t", "tokenizer": "k"}
    return {"model_dir": context.config.target.source, "identity": identity}


def launch(context: Any) -> dict[str, Any]:
    from slipstream.tasks.cleanup import clean
    from slipstream.tasks.drain import join, leave_file
    from slipstream.tasks.last_good import keep_last_good
    from slipstream.tasks.server import start_command, stop_server

    config, workdir, draft = context.config, context.workdir, (context.input("convert") / "draft").absolute()
    context.input("tune")
    clean(workdir, config)
    ready, leave = workdir.absolute() / "server.ready.json", leave_file(workdir).absolute()
    words = ["--draft", str(draft), "--state-file", str(ready), "--leave-file", str(leave)]
    words += ["--host", config.server.host, "--port", str(config.server.port)]
    command = [sys.executable, str(SITE / "stub_server.py"), *words]
    server = start_command(config, workdir, command, config.server.port, lambda _: None, left=True)
    while (CONTROL / f"hang-{HOST}").exists():
        time.sleep(0.05)
    if (CONTROL / f"fail-{HOST}").exists():
        time.sleep(0.5)  # long enough for a balancer that would take a server that is not proven
        stop_server(config, workdir)
        raise RuntimeError("A_1 of the server is 0.1")
    keep_last_good(workdir, draft, server.settings)
    join(workdir)
    return {"base_url": server.url, "model": server.model, "pid": server.identity.pid}


def install() -> None:
    """Replaces the two stages."""
    from slipstream.tasks import registry

    runs = {"resolve": resolve, "launch": launch}
    made = tuple(
        dataclasses.replace(stage, run=runs[stage.name]) if stage.name in runs else stage for stage in registry.STAGES
    )
    registry.STAGES, registry._BY_NAME = made, {stage.name: stage for stage in made}


install()

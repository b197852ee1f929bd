"""Stand-ins for all stages, in every process of a deployed run; installed as `sitecustomize` of a test's project.

What they do is said by files in the project's folder `control`, so that a test reaches them in a worker's flow process
and on a far host: `hang-STAGE` makes a stage wait until the file is gone, `fail-STAGE` makes it fail, `ran` lists what
ran, in order. Stage launch starts a server that only stands there (tests/tasks/stub_server.py), with the draft `draft`,
and does what the real one does around it; parity starts a detached process; cleanup and restore are the real ones.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parent
FOLDER = SITE.parent / "control"
PIXEL = "data:image/png;base64,iVBORw0KGgo="
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def install() -> None:
    """Replaces the registry's stages."""
    from slipstream.tasks import registry
    from slipstream.tasks.stage import Stage

    def stand_in(stage: Stage) -> Stage:
        needs = (
            () if stage.name in ("launch", "benchmark") else stage.needs
        )  # so that serve may begin with nothing done
        return Stage(stage.name, 1, needs, stage.config_sections, _body(stage), cached=stage.cached)

    table = tuple(stand_in(stage) for stage in registry.STAGES)
    registry.STAGES, registry.RESTORE = table, stand_in(registry.RESTORE)
    registry._BY_NAME = {stage.name: stage for stage in table}


def _body(stage: Any) -> Any:
    def run(context: Any) -> dict[str, Any]:
        with (FOLDER / "ran").open("a") as file:
            file.write(f"{stage.name} {os.getpid()}\n")
        if stage.name == "parity":
            _start(context.workdir)
        server = _serve(context) if stage.name == "launch" else None
        while (FOLDER / f"hang-{stage.name}").exists():
            time.sleep(0.05)
        if (FOLDER / f"fail-{stage.name}").exists():
            raise RuntimeError(f"{stage.name} was told to fail")
        if stage.name in ("cleanup", "restore"):
            return stage.run(context)
        if server is not None:
            return _proven(context, server)
        if stage.name in ("regenerate", "extract") and context.config.data.share[1] > 1:
            _share(stage.name, context.out)
        return _report(context) if stage.name == "report" else {"answer": 42}

    return run


def _share(stage: str, out: Path) -> None:
    """What a share's fetch takes: no conversation, and a store of no shard."""
    from slipstream.tasks.conversations import CONVERSATIONS
    from slipstream.tasks.shares import STORE, STORE_MANIFEST

    if stage == "regenerate":
        (out / CONVERSATIONS).write_text("")
    else:
        (out / STORE).mkdir()
        (out / STORE / STORE_MANIFEST).write_text('{"shards": []}')


def _start(workdir: Path) -> None:
    from slipstream.tasks.process import start_detached

    state_file = workdir / "server.state.json"
    if not state_file.exists():
        start_detached(SLEEP, log=workdir / "server.log", state_file=state_file)


def _serve(context: Any) -> Any:
    from slipstream.tasks.cleanup import clean
    from slipstream.tasks.server import start_command

    clean(context.workdir, context.config)
    words = ["--draft", str(FOLDER / "draft"), "--state-file", str((context.workdir / "server.ready.json").absolute())]
    command = [sys.executable, str(SITE / "stub_server.py"), *words]
    return start_command(context.config, context.workdir, command, 0, lambda _: None)


def _proven(context: Any, server: Any) -> dict[str, Any]:
    from slipstream.tasks.last_good import keep_last_good

    keep_last_good(context.workdir, FOLDER / "draft", server.settings)
    return {"base_url": server.url, "model": server.model, "pid": server.identity.pid}


def _report(context: Any) -> dict[str, Any]:
    (context.out / "report.html").write_text(f'<html><img alt="speed" src="{PIXEL}"></html>')
    row = {"figure": "speed", "no speculation": "1", "speculation": "1.2x"}
    gate = {"name": "speed", "status": "pass", "found": "1.2x", "expected": "1x", "why": "", "fault": "F18"}
    return {"verdict": "fast", "table": [row], "markdown": "**fast**", "gates": [gate], "num_steps": 3}


install()

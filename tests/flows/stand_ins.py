"""Stand-ins for all stages, in every process of a deployed run; installed as `sitecustomize` of a test's project.

What they do is said by files in the folder STAND_INS, so that a test reaches them in a worker's flow process:
`hang-STAGE` makes a stage wait until the file is gone, `fail-STAGE` makes it fail, `ran` lists what ran, in order.
Stage launch starts a detached process as a server would be; cleanup and restore are the real ones.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["STAND_INS"])
PIXEL = "data:image/png;base64,iVBORw0KGgo="
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def install() -> None:
    """Replaces the registry's stages."""
    from slipstream.tasks import registry
    from slipstream.tasks.stage import Stage

    def stand_in(stage: Stage) -> Stage:
        return Stage(stage.name, 1, stage.needs, stage.config_sections, _body(stage), cached=stage.cached)

    table = tuple(stand_in(stage) for stage in registry.STAGES)
    registry.STAGES, registry.RESTORE = table, stand_in(registry.RESTORE)
    registry._BY_NAME = {stage.name: stage for stage in table}


def _body(stage: Any) -> Any:
    def run(context: Any) -> dict[str, Any]:
        with (FOLDER / "ran").open("a") as file:
            file.write(f"{stage.name} {os.getpid()}\n")
        if stage.name in ("launch", "parity"):
            _start(context.workdir)
        while (FOLDER / f"hang-{stage.name}").exists():
            time.sleep(0.05)
        if (FOLDER / f"fail-{stage.name}").exists():
            raise RuntimeError(f"{stage.name} was told to fail")
        if stage.name in ("cleanup", "restore"):
            return stage.run(context)
        return {"report": _report, "launch": _launched}.get(stage.name, lambda _: {"answer": 42})(context)

    return run


def _start(workdir: Path) -> None:
    from slipstream.tasks.process import start_detached

    state_file = workdir / "server.state.json"
    if not state_file.exists():
        start_detached(SLEEP, log=workdir / "server.log", state_file=state_file)


def _launched(_: Any) -> dict[str, Any]:
    return {"base_url": "http://127.0.0.1:1", "model": "stand-in", "pid": 1}


def _report(context: Any) -> dict[str, Any]:
    (context.out / "report.html").write_text(f'<html><img alt="speed" src="{PIXEL}"></html>')
    row = {"figure": "speed", "no speculation": "1", "speculation": "1.2x"}
    gate = {"name": "speed", "status": "pass", "found": "1.2x", "expected": "1x", "why": "", "fault": "F18"}
    return {"verdict": "fast", "table": [row], "markdown": "**fast**", "gates": [gate], "num_steps": 3}


install()

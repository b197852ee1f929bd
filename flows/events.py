"""Events of a deployment, for Prefect's automations: `slipstream.stage.done`, `slipstream.server.restored`, ..."""

from pathlib import Path
from typing import Any

from prefect.events import emit_event

from slipstream.tasks.stage import Stage, StageResult

SHORT = (int, float, bool, str)
MAX_TEXT = 200


def tell(event: str, workdir: Path, **payload: Any) -> None:
    """Emits `slipstream.EVENT` about the deployment of a working directory."""
    resource = {
        "prefect.resource.id": f"slipstream.deployment.{workdir.name}",
        "prefect.resource.name": workdir.name,
    }
    emit_event(f"slipstream.{event}", resource=resource, payload=payload)


def stage_ended(stage: Stage, result: StageResult, workdir: Path) -> None:
    """A stage ended well: how, after how long, and its figures that are numbers or short words."""
    figures = {
        name: value
        for name, value in result.figures.items()
        if isinstance(value, SHORT) and len(str(value)) <= MAX_TEXT
    }
    tell(f"stage.{result.status}", workdir, stage=stage.name, seconds=result.seconds, figures=figures)

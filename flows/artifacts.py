"""What a flow run leaves in Prefect for people: plan, figures, report, plots, links. All lies in files as well."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prefect.artifacts import (
    create_image_artifact,
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)

from slipstream.tasks.stage import StageResult
from slipstream.tasks.stage_look import StageLook

if TYPE_CHECKING:
    from slipstream.flows.plan import Plan

# Plots of the page, as the report's template writes them; an image artifact takes an address, and this is one.
_PLOT = re.compile(r'<img alt="([^"]*)" src="(data:image/png;base64,[A-Za-z0-9+/=]+)"')
MAX_CELL = 300


def publish_plan(plan: "Plan", looks: Sequence[StageLook]) -> None:
    """The stages as they lie on the deployment's host, and every finding."""
    rows = [{"stage": look.name, "state": "done" if look.done else "needed", "why": look.why} for look in looks]
    lines = [f"**{finding.severity}** {finding}" for finding in plan.findings]
    create_table_artifact(
        key="slipstream-plan", table=rows, description="\n\n".join(lines) or "No contradiction, nothing to note."
    )


def publish_report(report: StageResult) -> None:
    """The report: table, summary, plots, link to the page."""
    page = report.dir / "report.html"
    create_table_artifact(key="slipstream-table", table=report.figures["table"], description=report.figures["verdict"])
    create_markdown_artifact(key="slipstream-report", markdown=report.figures["markdown"])
    create_link_artifact(key="slipstream-page", link=page.absolute().as_uri(), link_text="report.html")
    for number, (caption, address) in enumerate(_PLOT.findall(page.read_text(encoding="utf-8")), start=1):
        create_image_artifact(key=f"slipstream-plot-{number}", image_url=address, description=caption)


def publish_figures(result: StageResult) -> None:
    """The figures of one stage, as its manifest has them."""
    rows = [{"figure": name, "value": _cell(value)} for name, value in result.figures.items()]
    how = "unchanged, skipped" if result.status == "skipped" else f"done in {result.seconds:.1f} s"
    create_table_artifact(key=f"slipstream-{result.name}", table=rows, description=f"Stage {result.name}: {how}")


def publish_server(launched: StageResult) -> None:
    """Where the launched server answers, and what it is."""
    url = str(launched.figures["base_url"])
    create_link_artifact(key="slipstream-server", link=url, link_text=str(launched.figures.get("model", url)))


def _cell(value: Any) -> Any:
    if isinstance(value, int | float | bool) or value is None:
        return value
    text = _flat(value) if isinstance(value, Mapping) else str(value)
    return text if len(text) <= MAX_CELL else f"{text[:MAX_CELL]} ..."


def _flat(value: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {entry}" for name, entry in value.items())

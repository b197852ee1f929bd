"""Stage `report`: one self-contained page, the table for the terminal, and the gates.

The stage itself does not fail when a gate fails: the page is what tells why. Whoever runs the stages asks
`gates.require` afterwards.
"""

import base64
import io
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from rich.console import Console

from slipstream.tasks import plots
from slipstream.tasks.bench_pairs import resume_pairs
from slipstream.tasks.benchmark import FIGURES, PAIRS
from slipstream.tasks.facts import PARITY
from slipstream.tasks.gates import judge
from slipstream.tasks.manifest import read_json
from slipstream.tasks.registry import get_stage
from slipstream.tasks.report_text import MARKS, markdown, table_rows, verdict
from slipstream.tasks.stage import StageContext

PAGE = "report.html"
FIGURE_CHARS = 300


def run(context: StageContext) -> dict[str, Any]:
    """Writes report.html.

    Figures: verdict, num_steps, table (rows as dicts), gates (see gates.Gate), markdown.
    """
    bench = read_json(context.input("benchmark") / FIGURES)
    parity_file = context.input("parity") / PARITY
    parity = read_json(parity_file) if parity_file.is_file() else None
    resolved = context.manifest("resolve")["figures"]
    gates = [gate.to_dict() for gate in judge(context.config.gates, resolved, parity, bench)]
    told, rows = verdict(bench, gates), table_rows(bench, parity)
    page = render(context, bench, told, rows, gates)
    (context.out / PAGE).write_text(page, encoding="utf-8")
    columns = ("figure", "no speculation", "speculation")
    return {
        "verdict": told,
        "num_steps": bench["num_steps"],
        "table": [dict(zip(columns, row, strict=True)) for row in rows],
        "gates": gates,
        "markdown": markdown(told, rows, gates),
    }


def render(
    context: StageContext, bench: Mapping[str, Any], told: str, rows: list[Any], gates: list[dict[str, str]]
) -> str:
    """The page. Everything is inside: no link leads out of it."""
    manifests = [context.manifest(name) for name in STAGE.needs]
    train = context.manifest("train")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string((files("slipstream.tasks") / "report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        title=f"{context.config.target.source}, EAGLE-3",
        verdict=told,
        failed=any(gate["status"] == "fail" for gate in gates),
        rows=rows,
        num_steps=bench["num_steps"],
        gates=gates,
        marks=MARKS,
        conditions=describe_conditions(bench),
        choice=bench["choice"],
        plots=page_plots(context, bench),
        comparison=bench["comparison"]["text"] if bench["comparison"] else "",
        sample=coloured_html(train["figures"].get("sample", "")),
        stages=[
            {
                "name": manifest["stage"],
                "fingerprint": manifest["fingerprint"],
                "started": manifest["started"],
                "seconds": manifest["seconds"],
                "figures": short_figures(manifest["figures"]),
            }
            for manifest in manifests
        ],
        machine=yaml.safe_dump({**bench["machine"], "versions": train["versions"]}, sort_keys=False),
        deployment=yaml.safe_dump(context.config.model_dump(mode="json"), sort_keys=False),
        settings=yaml.safe_dump(bench["settings"], sort_keys=False),
    )


def describe_conditions(bench: Mapping[str, Any]) -> str:
    """What was measured, in one line."""
    said, machine = bench["conditions"], bench["machine"]
    return (
        f"{bench['prompts']} held-out prompts, {said['pairs']} times each, at most {said['max_new_tokens']} new "
        f"tokens, {said['concurrency']} at a time, greedy; both servers loaded, one at a time working, taking turns; "
        f"{machine['cores']} cores of {machine['processor']}. Interval: bootstrap over prompts. "
        "Inter-token latency is the gap between chunks; with speculation a chunk holds several tokens, so it is not "
        "the time per output token."
    )


def page_plots(context: StageContext, bench: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(caption, PNG as base64), most telling first."""
    pairs = list(resume_pairs(context.input("benchmark") / PAIRS))
    made = [
        (
            "Cost of a round by K. A point above its bar wins: so much would its tokens cost without speculation",
            plots.cost_plot(bench["choice"]["options"], bench["round"]),
        ),
        ("Joint acceptance, predicted and served", plots.acceptance_plot(bench["replayed"], bench["acceptance"])),
        ("Speed of each pair", plots.speedup_plot(pairs, bench["speedup"])),
        ("Latencies: share of values at most that long", plots.latency_plot(pairs)),
    ]
    training = plots.training_plots(context.input("train") / "plots")
    made += [(f"Training: {name.replace('_', ' ')}", data) for name, data in training.items()]
    return [(caption, base64.b64encode(data).decode("ascii")) for caption, data in made]


def coloured_html(markup: str) -> str:
    """Rich markup as HTML with inline colours; "" for nothing."""
    if not markup:
        return ""
    console = Console(record=True, file=io.StringIO(), width=110, color_system="truecolor", force_terminal=True)
    console.print(markup, highlight=False)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def short_figures(figures: Mapping[str, Any]) -> str:
    """A stage's figures on a few lines; long texts (samples) are left out."""
    kept = {name: value for name, value in figures.items() if name not in ("sample", "markdown")}
    text = json.dumps(kept, ensure_ascii=False, default=str)
    return text if len(text) <= FIGURE_CHARS else f"{text[:FIGURE_CHARS]} ..."


STAGE = get_stage("report")

"""The report from made-up figures: rows, words, page, plots. The page of real servers is in test_measured_lifecycle."""

import dataclasses
import importlib.util
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.configs.schema import Deployment
from slipstream.engine.acceptance import AcceptanceCounts
from slipstream.tasks import bench_pairs, plots, report
from slipstream.tasks.bench_figures import figures
from slipstream.tasks.counters import PARTS, Counters
from slipstream.tasks.report_text import rich_report, table_rows, verdict
from slipstream.tasks.stage import Stage, run_stage

SPEC = importlib.util.spec_from_file_location("bench_fixtures", Path(__file__).parent / "bench_fixtures.py")
assert SPEC is not None
assert SPEC.loader is not None
made = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(made)

PAIRS = [made.make_pair(i, repeat=r) for i in range(3) for r in range(2)]
PARITY = {"slots": [{"share": 0.01}], "logits": {"share": 0.002}}
HOSTILE = "<script>alert('x')</script>"


def bench(**changes):
    return {
        **figures(PAIRS, 3, None),
        "served_num_steps": 3,
        "choice": {"why": "K = 3: pinned", "candidate": 3, "options": [], "num_steps": 3, "probes": []},
        "transformers": {"ratio": 1.1, "tokens_per_second": 90.0, "prompts": 3},
        "row_invariance": {"invariant": True, "promise": "exact"},
        "settings": {"baseline": {"num_steps": 0}, "speculation": {"num_steps": 3}},
        "machine": {"processor": "a processor", "cores": 2, "system": "Linux"},
        "conditions": {"pairs": 2, "max_new_tokens": 16, "concurrency": 1},
        **changes,
    }


@pytest.fixture
def reported(tmp_path):
    """The stage run on stand-ins for everything before it: (its result, the page)."""
    deployment = Deployment(target={"source": f"/models/{HOSTILE}"}, gates={"max_perplexity": 40.0})

    def stand_in(name):
        def run(context):
            if name == "benchmark":
                (context.out / "benchmark.json").write_text(json.dumps(bench()))
                lines = [json.dumps(bench_pairs._to_json(pair)) + "\n" for pair in PAIRS]
                (context.out / "pairs.jsonl").write_text("".join(lines))
            if name == "parity":
                (context.out / "parity.json").write_text(json.dumps(PARITY))
            if name == "train":
                (context.out / "plots").mkdir()
                (context.out / "plots" / "loss.png").write_bytes(plots.acceptance_plot(None, bench()["acceptance"]))
                return {"sample": "[dim]user: hi[/dim] [bold green]answer <b>[/bold green]"}
            return {"perplexity": 12.0} if name == "resolve" else {}

        return run

    for name in report.STAGE.needs:
        run_stage(Stage(name, 1, (), (), stand_in(name)), deployment, tmp_path)
    result = run_stage(report.STAGE, deployment, tmp_path)
    return result, (result.dir / report.PAGE).read_text()


def test_table_has_both_columns_and_the_figures_of_the_issue():
    rows = {name: (base, spec) for name, base, spec in table_rows(bench(), PARITY)}
    assert rows["tokens/s, one stream"] == ("100.0", "125.0")
    assert rows["accept length / ceiling"] == ("1 / 1", "2.40 / 4")
    assert rows["joint acceptance"][1] == "A_1 0.80 (24/30)  A_2 0.40 (12/30)  A_3 0.20 (6/30)"
    assert rows["ms a round"] == ("10.0", "20.0 (draft 4.0 + verify 12.0 + rest 4.0)")
    assert rows["break-even length"][1] == "2.00"
    assert rows["same answers"][1] == "3 of 3 prompts"
    assert rows["parity"][0] == "0.20% of tokens differ from transformers"
    assert rows["against transformers generate"][0].startswith("1.10x")


def test_where_k_is_chosen_the_rounds_of_each_are_told():
    plain = Counters(dict.fromkeys(PARTS, 0.0), 0, {0: AcceptanceCounts(0, [5], ended=1)})
    sides = [dataclasses.replace(p.speculation, counters=p.speculation.counters + plain) for p in PAIRS]
    pairs = [dataclasses.replace(p, speculation=side) for p, side in zip(PAIRS, sides, strict=True)]
    chosen = bench(**figures(pairs, 3, None))
    assert chosen["rounds_by_num_steps"] == [{"num_steps": 0, "rounds": 36}, {"num_steps": 3, "rounds": 36}]
    rows = table_rows(chosen, PARITY)
    (told,) = (row for row in rows if row[0].startswith("rounds by the K chosen"))
    assert told[2] == "K = 0: 36, K = 3: 36"
    words = verdict(chosen, [])
    assert "K of 0 to 3 chosen for each round is" in words
    assert f"{chosen['round']['accept_length']:.2f} tokens a round over every K" in words
    assert not any(row[0].startswith("rounds by") for row in table_rows(bench(), PARITY))
    assert "with K = 3 is" in verdict(bench(), [])


def test_table_without_parity_says_so():
    assert table_rows(bench(), None)[-1] == ("parity", "not measured", "not measured")


def test_page_puts_the_verdict_first_and_escapes_what_it_quotes(reported):
    result, page = reported
    body = page[page.index("<body>") :]
    assert body.index(result.figures["verdict"][:40]) < body.index("<table>")
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page


def test_page_is_self_contained(reported):
    _, page = reported
    assert "href=" not in page
    assert page.count("<img") == page.count('src="data:image/png;base64,') == 5


def test_sample_is_shown_in_colour_with_its_text_escaped(reported):
    _, page = reported
    assert "answer &lt;b&gt;" in page
    assert "color:" in page[page.index("A conversation as training saw it") :]


def test_terminal_report_renders_all_rows_and_gates(reported):
    result, _ = reported
    console = Console(file=io.StringIO(), width=140)
    console.print(rich_report(result.figures, Path("/somewhere/report.html")))
    text = console.file.getvalue()
    for words in ("no speculation", "speculation, K = 3", "125.0", "F18", "at least 1.00x", "/somewhere/report.html"):
        assert words in text


def test_markdown_holds_every_row(reported):
    result, _ = reported
    for row in result.figures["table"]:
        assert f"| {row['figure']} |" in result.figures["markdown"]


@pytest.mark.parametrize("replayed", [None, bench()["acceptance"]])
def test_plots_are_pictures(replayed):
    measured = bench()
    option = measured["round"]
    made_plots = [
        plots.acceptance_plot(replayed, measured["acceptance"]),
        plots.cost_plot([], option),
        plots.cost_plot([{**option, "num_steps": k} for k in range(4)], option),
        plots.latency_plot(PAIRS),
        plots.speedup_plot(PAIRS, measured["speedup"]),
    ]
    assert all(data.startswith(b"\x89PNG") for data in made_plots)

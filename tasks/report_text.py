"""The report in words and rows: one source for the page, the Prefect artifacts and the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

Row = tuple[str, str, str]  # name, no speculation, speculation
MARKS = {"pass": "✓", "fail": "✗", "off": "-", "note": "i"}
COLOURS = {"pass": "green", "fail": "red", "off": "dim", "note": "cyan"}


def verdict(bench: Mapping[str, Any], gates: Sequence[Mapping[str, str]]) -> str:
    """One sentence: what came out."""
    ratio, option = bench["speedup"], bench["round"]
    failed = [gate["name"] for gate in gates if gate["status"] == "fail"]
    interval = f"95 % interval {ratio['low']:.2f} to {ratio['high']:.2f}, {ratio['prompts']} prompts"
    lengths = f"accept length {_number(bench['acceptance']['accept_length'])} of {option['ceiling']}"
    if _chosen(bench):
        lengths = f"{option['accept_length']:.2f} tokens a round over every K that was chosen"
    lengths += f", break-even {_number(option['break_even'])}"
    speed = f"{ratio['ratio']:.2f}x as fast as no speculation ({interval}): {lengths}"
    if bench["served_num_steps"] == 0:
        sentence = f"{bench['choice']['why']}. Tried with K = {bench['num_steps']} it is {speed}"
    else:
        k = f"K of 0 to {bench['num_steps']} chosen for each round" if _chosen(bench) else f"K = {bench['num_steps']}"
        sentence = f"Speculation with {k} is {speed}"
        if bench["losing_term"] and ratio["high"] < 1:
            sentence += f". It loses by {bench['losing_term']['why']}"
    return f"FAILED ({', '.join(failed)}). {sentence}" if failed else sentence


def _chosen(bench: Mapping[str, Any]) -> bool:
    """Whether the speculative server chose K for each round."""
    return any(entry["num_steps"] != bench["num_steps"] for entry in bench.get("rounds_by_num_steps", ()))


def table_rows(bench: Mapping[str, Any], parity: Mapping[str, Any] | None) -> list[Row]:
    """The table no speculation / speculation."""
    base, spec, option, counts = bench["baseline"], bench["speculation"], bench["round"], bench["acceptance"]
    ratio = bench["speedup"]
    joint = "  ".join(f"A_{j['step']} {_number(j['rate'])} ({j['hits']}/{j['rounds']})" for j in counts["joint"])
    left_out = counts["rounds_left_out"]
    terms = " + ".join(f"{name} {option[f'{name}_ms']:.1f}" for name in ("draft", "verify", "rest"))
    rows = [
        ("tokens/s, one stream", f"{base['tokens_per_second']:.1f}", f"{spec['tokens_per_second']:.1f}"),
        (
            "tokens/s, whole server, prompts included",
            f"{base['system_tokens_per_second']:.1f}",
            f"{spec['system_tokens_per_second']:.1f}",
        ),
        ("speed", "1", f"{ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f}, {ratio['pairs']} pairs)"),
        ("accept length / ceiling", "1 / 1", f"{_number(counts['accept_length'])} / {counts['ceiling']}"),
        ("joint acceptance", "", joint or "no round counted"),
        (
            "rounds counted / left out",
            "",
            f"{counts['rounds']} / {left_out['ended']} ended a request, {left_out['clamped']} clamped",
        ),
        ("ms a round", f"{option['plain_step_ms']:.1f}", f"{option['round_ms']:.1f} ({terms})"),
        ("break-even length", "", f"{option['break_even']:.2f}"),
        ("time to first token, ms", _percentiles(base["ttft_ms"]), _percentiles(spec["ttft_ms"])),
        ("time per output token, ms", _percentiles(base["tpot_ms"]), _percentiles(spec["tpot_ms"])),
        ("inter-token latency (chunks), ms", _percentiles(base["itl_ms"]), _percentiles(spec["itl_ms"])),
        ("tokens a chunk", f"{base['tokens_per_chunk']:.2f}", f"{spec['tokens_per_chunk']:.2f}"),
        ("same answers", "", f"{bench['prompts'] - len(bench['differing_prompts'])} of {bench['prompts']} prompts"),
    ]
    if _chosen(bench):
        by_k = ", ".join(f"K = {entry['num_steps']}: {entry['rounds']}" for entry in bench["rounds_by_num_steps"])
        rows.insert(6, ("rounds by the K chosen (accept length and A_k: of the largest)", "", by_k))
    if bench["replayed"]:
        predicted = bench["replayed"]["accept_length"]
        rows.insert(4, ("replayed accept length", "", _number(predicted)))
    if bench["transformers"] and bench["transformers"]["ratio"] is not None:
        told = bench["transformers"]
        rows.append(
            ("against transformers generate", f"{told['ratio']:.2f}x ({told['tokens_per_second']:.1f} tok/s)", "")
        )
    rows.append(("parity", *_parity_cells(parity)))
    return rows


def _parity_cells(parity: Mapping[str, Any] | None) -> tuple[str, str]:
    """Target against transformers; draft and capture through the served path."""
    if parity is None:
        return "not measured", "not measured"
    logits, shares = parity.get("logits", {}), [slot["share"] for slot in parity.get("slots", ())]
    target = f"{logits['share']:.2%} of tokens differ from transformers" if "share" in logits else "not measured"
    draft = f"{len(shares)} slots, largest error {max(shares):.2g} of the next state's" if shares else "not measured"
    return target, draft


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percentiles(told: Mapping[str, Any]) -> str:
    if not told["count"]:
        return "-"
    return f"p50 {told['p50']:.1f}  p95 {told['p95']:.1f}  p99 {told['p99']:.1f}  ({told['count']})"


def markdown(told: str, rows: Sequence[Row], gates: Sequence[Mapping[str, str]]) -> str:
    """For the Prefect artifact."""

    def line(*cells: str) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    lines = [f"**{told}**", "", line("", "no speculation", "speculation"), line("---", "---", "---")]
    lines += [line(*row) for row in rows]
    lines += ["", line("gate", "result", "found", "expected", ""), line(*["---"] * 5)]
    lines += [line(f"{g['name']} {g['fault']}", g["status"], g["found"], g["expected"], g["why"]) for g in gates]
    return "\n".join(lines)


def rich_report(figures: Mapping[str, Any], page: Path) -> Group:
    """For the terminal, from the figures of stage report."""
    gates = figures["gates"]
    failed = any(gate["status"] == "fail" for gate in gates)
    table = Table(title="no speculation / speculation", title_justify="left", header_style="bold")
    for column in ("", "no speculation", f"speculation, K = {figures['num_steps']}"):
        table.add_column(column, overflow="fold")
    for row in figures["table"]:
        table.add_row(*(escape(cell) for cell in row.values()))
    judged = Table(title="gates", title_justify="left", header_style="bold")
    for column in ("", "gate", "found", "expected", ""):
        judged.add_column(column, overflow="fold")
    for gate in gates:
        colour, name = COLOURS[gate["status"]], f"{gate['name']} {gate['fault']}".strip()
        cells = (MARKS[gate["status"]], name, gate["found"], gate["expected"], gate["why"])
        judged.add_row(*(escape(cell) for cell in cells), style=colour)
    return Group(
        Text(figures["verdict"], style="bold red" if failed else "bold green"),
        table,
        judged,
        Text(f"report: {page}", style="dim"),
    )

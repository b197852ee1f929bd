"""The report's plots, as PNG bytes."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from slipstream.tasks.bench_pairs import Pair

DRAFT, VERIFY, REST, PLAIN = "#4c78a8", "#f58518", "#bab0ac", "#54a24b"
DPI = 110
Z = 2.0  # error bars: standard errors


def acceptance_plot(replayed: Mapping[str, Any] | None, served: Mapping[str, Any]) -> bytes:
    """A_k replayed from held-out data beside A_k served, with error bars."""
    figure, axes = _axes(6.0, 3.4)
    series = [("replayed", replayed, PLAIN), ("served", served, DRAFT)]
    for offset, (name, counts, colour) in zip((-0.2, 0.2), series, strict=True):
        joint = counts["joint"] if counts else []
        steps = [entry["step"] + offset for entry in joint]
        rates = [entry["rate"] or 0.0 for entry in joint]
        errors = [Z * (entry["standard_error"] or 0.0) for entry in joint]
        rounds = counts["rounds"] if counts else 0
        axes.bar(steps, rates, 0.38, yerr=errors, capsize=3, color=colour, label=f"{name} ({rounds} rounds)")
    axes.set(xlabel="k", ylabel="A_k: first k drafts accepted", ylim=(0, 1))
    axes.set_xticks([entry["step"] for entry in served["joint"]])
    axes.legend(frameon=False)
    return _png(figure)


def cost_plot(options: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]) -> bytes:
    """Milliseconds a round by K, split into its terms, and what acceptance earns at each K.

    A point above its bar wins: accept length x plain step is what the same tokens cost without speculation.
    """
    figure, axes = _axes(7.0, 3.8)
    shown = [(f"K = {o['num_steps']}", o) for o in options] or []
    shown.append((f"K = {measured['num_steps']}\nmeasured", measured))
    positions = range(len(shown))
    bottom = [0.0] * len(shown)
    for name, colour in (("verify", VERIFY), ("draft", DRAFT), ("rest", REST)):
        heights = [max(option[f"{name}_ms"], 0.0) for _, option in shown]
        axes.bar(positions, heights, 0.6, bottom=bottom, color=colour, label=name)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    worth = [option["accept_length"] * option["plain_step_ms"] for _, option in shown]
    axes.plot(positions, worth, "o", color="black", label="accept length x plain step")
    for position, (_, option), top in zip(positions, shown, bottom, strict=True):
        label = f"needs {option['break_even']:.2f}\nhas {option['accept_length']:.2f}"
        axes.annotate(
            label, (position, max(top, worth[position])), (0, 6), textcoords="offset points", ha="center", fontsize=7
        )
    axes.set_xticks(list(positions), [name for name, _ in shown])
    axes.set(ylabel="ms a round", ylim=(0, 1.3 * max([*bottom, *worth])))
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    return _png(figure)


def latency_plot(pairs: Sequence[Pair]) -> bytes:
    """Distributions of time to first token, time per output token and gaps between chunks, both servers."""
    figure, grid = plt.subplots(1, 3, figsize=(9.0, 3.0), dpi=DPI, layout="constrained")
    for axes, title in zip(grid, ("time to first token", "time per output token", "gap between chunks"), strict=True):
        for name, colour in (("baseline", PLAIN), ("speculation", DRAFT)):
            answers = [a for pair in pairs for a in (pair.baseline if name == "baseline" else pair.speculation).answers]
            values = {
                "time to first token": [a.ttft_ms for a in answers],
                "time per output token": [a.tpot_ms for a in answers if a.tpot_ms is not None],
                "gap between chunks": [gap for a in answers for gap in a.itl_ms],
            }[title]
            label = "no speculation" if name == "baseline" else "speculation"
            if values:
                axes.ecdf(values, color=colour, label=f"{label} ({len(values)})")
        axes.set(title=title, xlabel="ms", ylim=(0, 1))
        axes.title.set_fontsize(9)
        _plain(axes)
        axes.legend(frameon=False, fontsize=7, loc="lower right")
    return _png(figure)


def speedup_plot(pairs: Sequence[Pair], speedup: Mapping[str, Any]) -> bytes:
    """Every pair's ratio by prompt, with the whole interval as a band."""
    figure, axes = _axes(7.0, 3.0)
    names = sorted({pair.prompts for pair in pairs})
    for pair in pairs:
        if pair.baseline.decode_tokens and pair.speculation.decode_ms:
            base = pair.baseline.decode_ms / pair.baseline.decode_tokens * pair.speculation.decode_tokens
            axes.plot(names.index(pair.prompts), base / pair.speculation.decode_ms, "o", color=DRAFT, markersize=4)
    axes.axhspan(speedup["low"], speedup["high"], color=DRAFT, alpha=0.15, label="95 % interval of the whole")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), [name[:24] for name in names], rotation=40, ha="right", fontsize=7)
    axes.set(ylabel="speed against\nno speculation")
    axes.legend(frameon=False, fontsize=8)
    return _png(figure)


def training_plots(folder: Path) -> dict[str, bytes]:
    """The plots that stage train left: file name without ending -> bytes."""
    return {path.stem: path.read_bytes() for path in sorted(folder.glob("*.png"))}


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(width, height), dpi=DPI, layout="constrained")
    _plain(axes)
    return figure, axes


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue()

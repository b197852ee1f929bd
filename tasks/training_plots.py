"""Plots of what a trained draft would win."""

from collections.abc import Sequence
from pathlib import Path

from slipstream.engine.acceptance import AcceptanceCounts


def plot_replayed(replayed: Sequence[AcceptanceCounts], out: Path) -> list[Path]:
    """Draws `replayed_tau.png` (accept length over K, with its ceiling) and `run_lengths.png` (histogram, largest K).

    Args:
        replayed: counts for K = 0, 1, ..., from the same run lengths.
        out: directory, which exists.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [counts.num_steps for counts in replayed]
    figure, axes = plt.subplots(figsize=(8, 5))
    axes.plot(steps, [k + 1 for k in steps], linestyle=":", color="grey", label="ceiling K + 1")
    axes.plot(steps, [counts.accept_length for counts in replayed], marker="o", label="replayed tau(K), held out")
    axes.set_xlabel("K, drafts a round")
    axes.set_ylabel("accept length, tokens a round")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    tau = out / "replayed_tau.png"
    figure.savefig(tau, dpi=120, bbox_inches="tight")
    plt.close(figure)

    largest = replayed[-1]
    figure, axes = plt.subplots(figsize=(8, 5))
    axes.bar(range(largest.num_steps + 1), largest.histogram)
    axes.set_xlabel(f"accepted drafts a round, K = {largest.num_steps}")
    axes.set_ylabel("rounds")
    axes.grid(alpha=0.3, axis="y")
    lengths = out / "run_lengths.png"
    figure.savefig(lengths, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return [tau, lengths]

"""What a training run leaves to look at: JSON lines, TensorBoard files, plots."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

METRICS_NAME = "metrics.jsonl"


class MetricsLog:
    """One line a step, and the same figures as TensorBoard scalars.

    Args:
        directory: holds `metrics.jsonl` and `tensorboard/`.
        resume_step: steps already done; lines of later steps (made after the checkpoint, by a run that died) go.
    """

    def __init__(self, directory: Path, resume_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imported here: it takes seconds, and serving never needs it

        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / METRICS_NAME
        kept = [row for row in read_metrics(directory) if row["step"] <= resume_step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(partial, self.path)
        self._file = self.path.open("a")
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=resume_step + 1)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._board.close()

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Log the figures (numbers, or lists with one number a draft step) of one step."""
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()
        for name, value in figures.items():
            if isinstance(value, list):
                for index, item in enumerate(value):
                    self._board.add_scalar(f"{name}/{index + 1}", item, step)
            else:
                self._board.add_scalar(name, value, step)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Whole lines of `metrics.jsonl`; a last line that a kill cut short is left out."""
    path = directory / METRICS_NAME
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def plot_curves(directory: Path, out: Path) -> list[Path]:
    """Draw `loss.png` (loss of each draft step) and `joint_acceptance.png` (A_k, training and held-out) into `out`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_metrics(directory)
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, title, fields in (
        ("loss", "soft cross-entropy, nats", {"step_loss": "training"}),
        (
            "joint_acceptance",
            "joint acceptance A_k, teacher-forced",
            {"joint_acceptance": "training", "heldout_joint_acceptance": "held out"},
        ),
    ):
        figure, axes = plt.subplots(figsize=(8, 5))
        for field, label in fields.items():
            points = [(row["step"], row[field]) for row in rows if field in row]
            for index in range(max((len(values) for _, values in points), default=0)):
                curve = [(step, values[index]) for step, values in points if len(values) > index]
                steps, heights = zip(*curve, strict=True)
                style = "o--" if field.startswith("heldout") else "-"
                axes.plot(steps, heights, style, label=f"{label}, k = {index + 1}", color=f"C{index}")
        axes.set_xlabel("optimiser step")
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
        paths.append(out / f"{name}.png")
        figure.savefig(paths[-1], dpi=120, bbox_inches="tight")
        plt.close(figure)
    return paths

"""Progress of the stages in a terminal: bars where it is one, a line now and then where it is a log."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slipstream.engine.errors import SlipstreamError

LOG_EVERY_SECONDS = 10.0
FIGURES_SHOWN = 4


class RichReporter:
    """Shows stages on a console. Use it as a context manager: the bars live inside."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description:<11}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[figures]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bar: TaskID | None = None
        self._started = self._logged = time.monotonic()

    def __enter__(self) -> "RichReporter":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def stage_started(self, stage: str, *, resumed: bool) -> None:
        self._started = self._logged = time.monotonic()
        self._bar = self._bars.add_task(stage, total=None, count="", figures="")
        if resumed:
            self._print(f"[cyan]↻ {stage}[/cyan]: goes on where an earlier run stopped")
        elif not self._console.is_terminal:
            self._print(f"[cyan]▶ {stage}[/cyan]")

    def progress(self, stage: str, done: float, total: float, fields: Mapping[str, Any]) -> None:
        figures = "  ".join(f"{name} {_figure(value)}" for name, value in fields.items())
        count = f"{_figure(done)}/{_figure(total)}"
        if self._bar is not None:
            self._bars.update(self._bar, completed=done, total=total, count=count, figures=escape(figures))
        now = time.monotonic()
        if not self._console.is_terminal and now - self._logged >= LOG_EVERY_SECONDS:
            self._logged = now
            self._print(f"  [dim]{stage} {count} after {now - self._started:.0f} s  {escape(figures)}[/dim]")

    def say(self, stage: str, text: str, *, markup: bool) -> None:
        self._print(f"  [dim]{stage}:[/dim] {text if markup else escape(text)}")

    def warn(self, stage: str, text: str) -> None:
        self._print(f"  [yellow]! {stage}: {escape(text)}[/yellow]")

    def stage_finished(self, stage: str, *, status: str, seconds: float, figures: Mapping[str, Any]) -> None:
        self._drop_bar()
        if status == "skipped":
            self._print(f"[green]✓[/green] {stage:<11} [dim]unchanged, skipped[/dim]")
            return
        shown = "  ".join(f"{name} {_figure(value)}" for name, value in _scalars(figures)[:FIGURES_SHOWN])
        self._print(f"[green]✓[/green] {stage:<11} {seconds:6.1f} s  [dim]{escape(shown)}[/dim]")

    def stage_failed(self, stage: str, error: BaseException) -> None:
        self._drop_bar()
        words = str(error) if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {error}".rstrip(": ")
        self._print(f"[red]✗ {stage}[/red] {escape(words.splitlines()[0])}")

    def _drop_bar(self) -> None:
        if self._bar is not None:
            self._bars.remove_task(self._bar)
            self._bar = None

    def _print(self, text: str) -> None:
        self._bars.console.print(text, highlight=False, soft_wrap=not self._console.is_terminal)


def _scalars(figures: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Figures that fit on a line: numbers and short words, no nested values."""
    return [
        (name, value)
        for name, value in figures.items()
        if isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 24)
    ]


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.4g}"

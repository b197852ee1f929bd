"""What a person sees of a running stage."""

import io

from rich.console import Console

from slipstream.engine.errors import SlipstreamError
from slipstream.flows import progress
from slipstream.flows.progress import RichReporter


def shown(action, *, terminal=False, monkeypatch=None):
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
    with RichReporter(console) as reporter:
        action(reporter)
    return console.file.getvalue()


def test_a_log_gets_a_line_at_the_start_the_end_and_now_and_then(monkeypatch):
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0.0)

    def action(reporter):
        reporter.stage_started("train", resumed=False)
        reporter.progress("train", 50, 200, {"loss": 2.34567})
        reporter.stage_finished("train", status="done", seconds=12.34, figures={"loss": 2.3, "sample": "x" * 99})

    lines = shown(action).splitlines()
    assert lines[0] == "▶ train"
    assert lines[1].startswith("  train 50/200 after")
    assert "loss 2.346" in lines[1]
    assert lines[2].split() == ["✓", "train", "12.3", "s", "loss", "2.3"]  # long texts are left out


def test_a_quiet_log_is_not_flooded():
    def action(reporter):
        reporter.stage_started("train", resumed=False)
        for i in range(1000):
            reporter.progress("train", i, 1000, {})

    assert len(shown(action).splitlines()) == 1


def test_skipped_resumed_and_failed_stages_say_so():
    def action(reporter):
        reporter.stage_finished("resolve", status="skipped", seconds=0.0, figures={})
        reporter.stage_started("train", resumed=True)
        reporter.stage_failed("train", SlipstreamError("the loss is not a number", do="lower it"))
        reporter.stage_failed("convert", KeyError("d2t"))

    lines = shown(action).splitlines()
    assert lines[0] == "✓ resolve     unchanged, skipped"
    assert lines[1] == "↻ train: goes on where an earlier run stopped"
    assert lines[2] == "✗ train the loss is not a number"
    assert lines[3] == "✗ convert KeyError: 'd2t'"


def test_what_a_model_said_is_shown_as_it_is_unless_it_is_marked_up():
    def action(reporter):
        reporter.say("regenerate", "[bold]literally[/bold] [/nonsense]", markup=False)
        reporter.say("regenerate", "[bold]strong[/bold]", markup=True)
        reporter.warn("regenerate", "[red]careful")

    text = shown(action)
    assert "[bold]literally[/bold] [/nonsense]" in text
    assert "strong" in text
    assert "[bold]strong" not in text
    assert "[red]careful" in text


def test_a_terminal_gets_a_bar():
    def action(reporter):
        reporter.stage_started("train", resumed=False)
        reporter.progress("train", 50, 200, {"loss": 2.3})
        reporter._bars.refresh()

    text = shown(action, terminal=True)
    assert "50/200" in text
    assert "loss 2.3" in text

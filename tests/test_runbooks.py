"""Runbooks: every command of Slipstream in them is one that exists, and the harmless ones are run."""

import re
import shlex
from pathlib import Path

import click
import pytest
import typer.main

from slipstream.flows import cli

RUNBOOKS = sorted((Path(__file__).parent.parent / "runbooks").glob("*.md"))
PARTS = ("**Trigger.**", "**Impact.**", "**Preconditions.**", "## Look", "## Act", "## Verify")


def commands(path: Path) -> list[list[str]]:
    """The words of every `slipstream ...` line in the code blocks of a runbook."""
    blocks = re.findall(r"```sh\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("slipstream ")]
    return [shlex.split(line)[1:] for line in lines]


ALL = [(path.name, words) for path in RUNBOOKS for words in commands(path)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(f"target:\n  source: {tmp_path}\nhost:\n  workdir: {tmp_path / 'runs'}\n", encoding="utf-8")
    return path


def test_there_are_runbooks_with_commands():
    assert len(RUNBOOKS) >= 2
    assert all(commands(path) for path in RUNBOOKS)


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda p: p.name)
def test_a_runbook_answers_the_same_questions(path):
    text = path.read_text(encoding="utf-8")
    assert [part for part in PARTS if part not in text] == []


@pytest.mark.parametrize(("runbook", "words"), ALL, ids=lambda x: " ".join(x) if isinstance(x, list) else x)
def test_a_command_of_a_runbook_is_understood(runbook, words, config):
    group = typer.main.get_command(cli.app)
    name, *arguments = [str(config) if word == "CONFIG" else word for word in words]
    command = group.get_command(click.Context(group), name)
    assert command is not None, f"{runbook}: there is no command {name}"
    if isinstance(command, click.Group):
        name, *arguments = arguments
        command = command.get_command(click.Context(command), name)
        assert command is not None, f"{runbook}: there is no command {' '.join(words[:2])}"
    command.make_context(name, arguments)  # raises for an unknown option or a missing argument


def test_an_unknown_option_would_be_noticed(config):
    group = typer.main.get_command(cli.app)
    command = group.get_command(click.Context(group), "clean")
    with pytest.raises(Exception, match="option"):
        command.make_context("clean", [str(config), "--everything"])


def test_cleaning_where_nothing_runs_says_so(config, capsys):
    cli.app(["clean", str(config)], standalone_mode=False)
    assert "nothing of ours was running" in capsys.readouterr().out


def test_every_runbook_that_an_error_names_exists():
    root = Path(__file__).parent.parent
    named = {
        name
        for room in ("engine", "tasks", "flows")
        for file in (root / room).rglob("*.py")
        for name in re.findall(r'runbook="([^"]+)"', file.read_text(encoding="utf-8"))
    }
    assert named, "errors name runbooks"
    assert named <= {path.name for path in RUNBOOKS}

"""README and CONTRIBUTING name what is there: files, commands, settings. (Runbooks: test_runbooks.py.)"""

import re
from pathlib import Path

import pytest
import typer
import yaml

from slipstream.configs.load import load
from slipstream.flows.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# What somebody or a run writes, and names without their folder, which stands before them.
MADE = {"deployment.yaml", "runs/smollm2/report/report.html", "slipstream.json"}
SIBLINGS = {"conventions.py": "engine/drafts/eagle3/layer_ids", "h200.json": "tests/benchmarks"}


def is_file(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)*\.(py|md|yaml|json|jsonl)", name) is not None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_are_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (ROOT / link).exists()]
    for name in re.findall(r"`([^`\n]+)`", text):
        for word in name.split():
            if is_file(word) and word not in MADE and not (ROOT / SIBLINGS.get(word, "") / word).exists():
                missing.append(word)
    assert missing == []


def commands() -> list[str]:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    found = []
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found += [f"{name} {one}" for one in inner] if inner else [name]
    return found


@pytest.mark.parametrize("command", commands())
def test_every_command_stands_in_the_readme(command: str) -> None:
    assert f"`slipstream {command}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_commands_that_are_named_are_there() -> None:
    for document in DOCUMENTS:
        for line in re.findall(r"(?:^|`)slipstream ((?:host )?[a-z-]+)", document.read_text(encoding="utf-8"), re.M):
            assert line in commands() or line == "import", (document.name, line)


def test_the_deployment_of_the_readme_can_be_read(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    assert set(yaml.safe_load(block)) >= {"target", "data", "training", "server", "gates"}
    file = tmp_path / "d.yaml"
    file.write_text(block)
    assert load(file, (), {}).deployment.training.num_steps == 5

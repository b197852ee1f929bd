"""The house stands: imports go down only, the engine needs no orchestration, and serving works without it."""

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("flows", "tasks", "engine", "kernels", "configs")
# What each room may import of the others. `configs` is the schema that flows and tasks read; of the engine it knows
# only the form of an error.
MAY_IMPORT = {
    "flows": {"flows", "tasks", "engine", "kernels", "configs"},
    "tasks": {"tasks", "engine", "kernels", "configs"},
    "engine": {"engine", "kernels"},
    "kernels": {"kernels"},
    "configs": {"configs"},
}
EXCEPTIONS = {("configs", "slipstream.engine.errors")}
FORBIDDEN = {
    "engine": {"prefect", "fabric", "paramiko", "typer", "pydantic_settings"},
    "kernels": {"prefect", "fabric", "paramiko", "typer", "pydantic", "pydantic_settings", "transformers", "fastapi"},
    "tasks": {"prefect", "fabric", "paramiko", "typer"},
    "configs": {"prefect", "fabric", "paramiko", "typer", "torch", "transformers"},
}
# pydantic belongs to the HTTP front (its request types) and to nothing else in the engine.
PYDANTIC_IN_ENGINE = "engine/serving"
# SSH belongs to far hosts, which are opened when a deployment has one: stages run without it.
SSH, SSH_IN_TASKS = {"fabric", "paramiko"}, "tasks/hosts/"


def imports_of(path: Path, module: str) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, anywhere in it (function bodies and TYPE_CHECKING included), with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, *([base] if base else [])])
            yield base, node.lineno
            # `from slipstream import engine` and `from slipstream.engine import errors` name modules, too
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call):
            yield from _dynamic(node)


def _dynamic(node: ast.Call) -> Iterator[tuple[str, int]]:
    """`import_module("slipstream.…")` and `__import__("…")` with a literal name."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
        yield str(node.args[0].value), node.lineno


def type_checking_lines(path: Path) -> set[int]:
    """Lines under `if TYPE_CHECKING:`, which import nothing when the program runs."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and getattr(node.test, "id", getattr(node.test, "attr", "")) == "TYPE_CHECKING":
            lines.update(n.lineno for body in node.body for n in ast.walk(body) if hasattr(n, "lineno"))
    return lines


def arrows_up(root: Path) -> list[str]:
    """Every import that the rule forbids, as FILE:LINE and words."""
    found = []
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            name = path.relative_to(root)
            module = ".".join(["slipstream", *name.with_suffix("").parts])
            unused = type_checking_lines(path)
            for imported, line in imports_of(path, module):
                problem = _problem(room, imported, name, typing_only=line in unused)
                if problem:
                    found.append(f"{name}:{line}: {problem}")
    return sorted(set(found))


def _problem(room: str, imported: str, file: Path, *, typing_only: bool) -> str:
    parts = imported.split(".")
    if parts[0] in ROOMS:
        return f"imports {imported}: a room is called slipstream.{parts[0]}"
    if parts[0] == "slipstream" and len(parts) > 1 and parts[1] in ROOMS:
        allowed = parts[1] in MAY_IMPORT[room] or any(
            room == r and (imported == m or imported.startswith(f"{m}.") or m.startswith(f"{imported}."))
            for r, m in EXCEPTIONS
        )
        return "" if allowed else f"{room} imports {imported}"
    if typing_only:
        return ""
    if parts[0] in SSH and file.as_posix().startswith(SSH_IN_TASKS):
        return ""
    if parts[0] in FORBIDDEN.get(room, set()):
        return f"{room} imports {parts[0]}"
    if parts[0] == "pydantic" and room == "engine" and not file.as_posix().startswith(PYDANTIC_IN_ENGINE):
        return "engine imports pydantic outside its HTTP front"
    return ""


def test_imports_go_down_only() -> None:
    assert arrows_up(ROOT) == []


def test_triton_kernels_know_nothing_of_the_cuda_ones() -> None:
    """Kernels of CUDA C++ use what a launch needs of gpu/; only one module speaks to the driver."""
    files = {path: path.read_text(encoding="utf-8") for path in (ROOT / "kernels").rglob("*.py")}
    gpu = [path for path in files if path.parent.name == "gpu"]
    assert len(gpu) > 20
    imports = [name for path in gpu for name, _ in imports_of(path, f"slipstream.kernels.gpu.{path.stem}")]
    assert [name for name in imports if name.startswith("slipstream.kernels.cuda")] == []
    assert [path.name for path, text in files.items() if "CDLL(" in text] == ["driver.py"]


def test_every_room_was_walked() -> None:
    for room in ROOMS:
        assert list((ROOT / room).rglob("*.py")), room


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("engine/x.py", "from slipstream.tasks.stage import Stage\n", "engine imports slipstream.tasks.stage"),
        (
            "engine/x.py",
            "def f():\n    import slipstream.flows.cli\n",
            "x.py:2: engine imports slipstream.flows",
        ),
        ("engine/x.py", "from slipstream import configs\n", "engine imports slipstream.configs"),
        ("engine/a/b.py", "from ...configs import schema\n", "engine imports slipstream.configs"),
        ("engine/x.py", "from slipstream.configs.schema import Deployment\n", "engine imports slipstream.configs"),
        (
            "engine/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import slipstream.configs.schema\n",
            "engine/x.py:3",
        ),
        ("kernels/x.py", "from slipstream.engine.errors import SlipstreamError\n", "kernels imports slipstream.engine"),
        ("tasks/x.py", "from slipstream.flows import cli\n", "tasks imports slipstream.flows"),
        (
            "configs/x.py",
            "from slipstream.engine.capture import default_slots\n",
            "configs imports slipstream.engine.capture",
        ),
        ("configs/x.py", "import slipstream.tasks\n", "configs imports slipstream.tasks"),
        ("engine/x.py", "import prefect.flows\n", "engine imports prefect"),
        ("engine/x.py", "def f():\n    from fabric import Connection\n", "engine imports fabric"),
        ("engine/serving/x.py", "import typer\n", "engine imports typer"),
        ("engine/x.py", "import pydantic\n", "outside its HTTP front"),
        ("kernels/x.py", "import pydantic\n", "kernels imports pydantic"),
        ("tasks/x.py", "from prefect import flow\n", "tasks imports prefect"),
        ("tasks/x.py", "import fabric\n", "tasks imports fabric"),
        ("tasks/hosts/x.py", "import prefect\n", "tasks imports prefect"),
        ("tasks/x.py", "import importlib\nimportlib.import_module('slipstream.flows.cli')\n", "tasks/x.py:2"),
        ("flows/x.py", "import kernels\n", "a room is called slipstream.kernels"),
    ],
)
def test_an_arrow_up_is_found(tmp_path: Path, file: str, text: str, words: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = arrows_up(tmp_path)
    assert found
    assert words in "\n".join(found)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("flows/x.py", "from slipstream.tasks.stage import Stage\nimport prefect\n"),
        (
            "tasks/x.py",
            "import slipstream.configs.schema\nfrom slipstream.engine.errors import SlipstreamError\n",
        ),
        ("configs/x.py", "from slipstream.engine.errors import SlipstreamError\n"),
        ("tasks/hosts/x.py", "import paramiko\nfrom fabric import Connection\n"),
        ("engine/serving/x.py", "import pydantic\nfrom slipstream.kernels.linear import linear\n"),
        ("engine/x.py", "from . import errors\n"),
    ],
)
def test_an_arrow_down_passes(tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert arrows_up(tmp_path) == []


# ---- without prefect and fabric --------------------------------------------------------------------------------------

BLOCKER = """
import sys
from importlib.abc import MetaPathFinder


class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
        return None


sys.meta_path.insert(0, Refuse())
"""


def run_without(tmp_path: Path, blocked: set[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a Python that cannot import the blocked packages, with `arguments` as its command line."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(blocked=blocked))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]  # the blocker first, then what we run from
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


COMMAND = "import sys; sys.argv[0] = 'slipstream'; from slipstream.flows.cli import main; main()"
ORCHESTRATION = {"prefect", "fabric", "paramiko"}


def test_the_blocker_blocks(tmp_path: Path) -> None:
    done = run_without(tmp_path, ORCHESTRATION, "import prefect")
    assert done.returncode == 1
    assert "(blocked)" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--help",), "serve"),
        (("serve", "--help"), "--num-steps"),
        (("stage", "--help"), "CONFIG"),
        (("plan", "--help"), "--json"),
        (("schema",), "json-schema.org"),
    ],
)
def test_commands_without_orchestration(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run_without(tmp_path, ORCHESTRATION, COMMAND, *arguments)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


@pytest.mark.parametrize("name", ["resolve", "extract", "train", "parity"])
def test_a_stage_gets_as_far_as_its_inputs_without_orchestration(tmp_path: Path, name: str) -> None:
    """The stage's module is loaded whole and stops where the work of the stages before it is missing."""
    from slipstream.tasks.registry import get_stage

    config = tmp_path / "d.yaml"
    config.write_text(f"host: {{workdir: {tmp_path / 'work'}}}\ntarget: {{source: {tmp_path / 'absent'}}}\n")
    code = f"import slipstream.tasks.{name}; {COMMAND}"
    done = run_without(tmp_path, ORCHESTRATION, code, "stage", name, str(config))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "absent" in done.stderr if not get_stage(name).needs else "cannot start" in done.stderr


def test_stages_work_without_orchestration(
    tmp_path: Path, pipeline: ModuleType, chats: ModuleType, tiny: ModuleType
) -> None:
    """Extract and train, really run from the command line, on a tiny target."""
    made = pipeline.make_pipeline(tmp_path / "p", chats, tiny)
    config = tmp_path / "d.yaml"
    config.write_text(json.dumps(made.deployment.model_dump(mode="json")))  # JSON is YAML
    for name in ("extract", "train"):
        arguments = ("stage", name, str(config), "--workdir", str(made.workdir), "--json")
        done = run_without(tmp_path, ORCHESTRATION, COMMAND, *arguments)
        assert done.returncode == 0, done.stderr
        events = [json.loads(line) for line in done.stdout.splitlines()]
        assert events[0] == {"event": "started", "stage": name, "resumed": False}
        assert (events[-1]["event"], events[-1]["status"]) == ("finished", "done")
        assert (made.workdir / name / "manifest.json").is_file()


def test_run_without_orchestration_says_what_to_install(tmp_path: Path) -> None:
    config = tmp_path / "d.yaml"
    config.write_text(f"host: {{workdir: {tmp_path / 'work'}}}\n")
    done = run_without(tmp_path, ORCHESTRATION, COMMAND, "run", str(config))
    assert done.returncode == 1
    assert "slipstream[flows]" in done.stderr
    assert "Traceback" not in done.stderr


def test_engine_and_kernels_import_without_orchestration_and_configuration(tmp_path: Path) -> None:
    """A GPU host needs neither Prefect nor fabric, nor the command line, nor the deployment's schema."""
    modules = [
        ".".join(["slipstream", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        for room in ("engine", "kernels")
        for path in sorted((ROOT / room).rglob("*.py"))
    ]
    code = "import sys\nfrom importlib import import_module\nfor name in sys.argv[1:]:\n    import_module(name)\n"
    blocked = ORCHESTRATION | {"typer", "pydantic_settings"}
    done = run_without(tmp_path, blocked, code, *modules)
    assert done.returncode == 0, done.stderr


def test_every_package_is_installed():
    """What pyproject.toml does not list is missing from the wheel, and an editable install hides it."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        ".".join(("slipstream", *path.parent.relative_to(ROOT).parts))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
    }
    assert found == listed - {"slipstream.tests"}

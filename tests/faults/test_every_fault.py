"""All 20 faults of the incident are shown here, and every module says which, where it is caught and in which words."""

import ast
from pathlib import Path

import pytest

MODULES = sorted(Path(__file__).parent.glob("test_f[0-9]*.py"))


def caught(path: Path) -> list[tuple[str, str, str]]:
    """What a module declares; [] when it declares nothing."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["CAUGHT"]:
            return list(ast.literal_eval(node.value))
    return []


def test_all_twenty_are_here() -> None:
    shown = {fault for path in MODULES for fault, _, _ in caught(path)}
    assert shown == {f"F{number}" for number in range(1, 21)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_declares_what_it_is_named_after(path: Path) -> None:
    lines = caught(path)
    assert all(len(line) == 3 and all(line) for line in lines)
    assert f"F{int(path.stem[6:8])}" in {fault for fault, _, _ in lines}

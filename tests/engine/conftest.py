"""Modules beside the tests, loaded by path: nothing at the root is importable on purpose."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

_TESTS = Path(__file__).parents[1]


def _load(path: Path) -> ModuleType:
    name = f"slipstream_tests_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """tests/reference_eagle3.py."""
    return _load(_TESTS / "reference_eagle3.py")


@pytest.fixture(scope="session")
def draft_tools() -> ModuleType:
    """tests/engine/draft_tools.py."""
    return _load(_TESTS / "engine" / "draft_tools.py")


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """tests/engine/tiny.py: tiny random targets and drafts."""
    return _load(_TESTS / "engine" / "tiny.py")

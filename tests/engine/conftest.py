"""Modules beside the tests of the engine."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

_TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def reference(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    """tests/reference_eagle3.py."""
    return load_test_module(_TESTS / "reference_eagle3.py")


@pytest.fixture(scope="session")
def draft_tools(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    """tests/engine/draft_tools.py."""
    return load_test_module(_TESTS / "engine" / "draft_tools.py")

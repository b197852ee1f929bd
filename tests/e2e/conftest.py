"""Scripts beside the tests, loaded by path."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

_HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def lossless(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    """tests/e2e/lossless.py."""
    return load_test_module(_HERE / "lossless.py")


@pytest.fixture(scope="session")
def agreement(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    """tests/e2e/transformers_agreement.py."""
    return load_test_module(_HERE / "transformers_agreement.py")


@pytest.fixture(scope="session")
def worlds(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    """tests/e2e/world.py."""
    return load_test_module(_HERE / "world.py")

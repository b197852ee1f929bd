"""Scripts beside the tests, loaded by path; tests marked `soak` run only where `-m` names that mark."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skipped before fixtures are made, for those of a long test may be long, too."""
    if "soak" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="long: runs with -m soak"))


@pytest.fixture(scope="session")
def lossless(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    """tests/e2e/lossless.py."""
    return load_test_module(_HERE / "lossless.py")


@pytest.fixture(scope="session")
def agreement(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    """tests/e2e/transformers_agreement.py."""
    return load_test_module(_HERE / "transformers_agreement.py")

"""Scripts beside the tests, loaded by path; tests marked `soak` run only where `-m` names that mark."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

_HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    full_name = f"slipstream_tests_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, _HERE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full_name])
    return sys.modules[full_name]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skipped before fixtures are made, for those of a long test may be long, too."""
    if "soak" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="long: runs with -m soak"))


@pytest.fixture(scope="session")
def lossless() -> ModuleType:
    """tests/e2e/lossless.py."""
    return _load("lossless")


@pytest.fixture(scope="session")
def agreement() -> ModuleType:
    """tests/e2e/transformers_agreement.py."""
    return _load("transformers_agreement")

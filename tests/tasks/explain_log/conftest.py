"""`logs`: the module that writes logs."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def logs(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_test_module(Path(__file__).with_name("logs.py"))

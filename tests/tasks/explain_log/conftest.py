"""`logs`: the module that writes logs."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def logs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("explain_log_logs", Path(__file__).parent / "logs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

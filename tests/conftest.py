"""Helper modules beside the tests, loaded by path: nothing at the root is importable on purpose."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

# Without a GPU, Triton kernels are tested in Triton's interpreter, which must be asked for before triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

_TESTS = Path(__file__).parent


def _load(path: Path) -> ModuleType:
    name = f"slipstream_tests_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_load(_TESTS / "faults" / "table.py"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `soak` run only where `-m` names that mark; skipped before their fixtures, which may be long."""
    if "soak" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="long: runs with -m soak"))


@pytest.fixture(scope="session")
def load_test_module() -> Callable[[Path], ModuleType]:
    """Loads a helper module beside the tests by its path."""
    return _load


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for what a run makes once: its test processes share it."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """Eight processes that form groups of 1, 2, 4 and 8 ranks (tests/engine/rank_pool.py)."""
    pool = _load(_TESTS / "engine" / "rank_pool.py").RankPool(8)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """tests/engine/tiny.py: tiny random targets and drafts."""
    return _load(_TESTS / "engine" / "tiny.py")


@pytest.fixture(scope="session")
def pipeline() -> ModuleType:
    """tests/tasks/pipeline.py: a tiny target with its tokenizer, conversations, and the stages before extract."""
    return _load(_TESTS / "tasks" / "pipeline.py")


@pytest.fixture(scope="session")
def left_over() -> ModuleType:
    """tests/left_over.py: a deployment file and what earlier runs leave in its working directory."""
    return _load(_TESTS / "left_over.py")


@pytest.fixture(scope="session")
def tiny_server() -> ModuleType:
    """tests/tiny_server.py: a tiny target with its tokenizer, a draft, and real servers of them."""
    return _load(_TESTS / "tiny_server.py")


@pytest.fixture(scope="session")
def tiny_models(tiny: ModuleType, tiny_server: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories of a tiny target and its draft."""
    return tiny_server.make_models(tmp_path_factory.mktemp("models"), tiny)


@pytest.fixture(scope="session")
def served(tiny_server: ModuleType, tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real server at K = 3 with diagnostics, shared by the tests of a run that do it no harm."""
    server = tiny_server.start(tmp_path_factory.mktemp("served"), tiny_models, 3, "--diagnostics")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def chats() -> ModuleType:
    """tests/chat_models.py: tokenizers with chat templates, tiny GGUF files and wheels."""
    return _load(_TESTS / "chat_models.py")


@pytest.fixture(scope="session")
def real_target() -> Path:
    """The embedded target (SmolLM2-135M-Instruct) as a directory; fetched once into the user's cache."""
    from slipstream.configs.schema import Deployment
    from slipstream.tasks.target_sources import find_target

    return find_target(Deployment()).directory

"""Where the Triton kernels run in tests: on the GPU if there is one, else in Triton's interpreter.

tests/conftest.py asks for the interpreter before anything imports triton; interpreter.py repairs what it gets wrong.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

_CROSS_COMPILE = Path(__file__).with_name("cross_compile.py")


@pytest.fixture(autouse=True, scope="session")
def _repaired_interpreter(load_test_module: Callable[[Path], ModuleType]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        load_test_module(Path(__file__).with_name("interpreter.py")).repair()


@pytest.fixture
def kernel_device() -> str:
    """Where a test of kernels/gpu puts its tensors."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def cuda_on_cpu(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    """The emulated GPU of the CUDA C++ kernels (cuda_on_cpu/emulator.py); it needs g++."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return load_test_module(Path(__file__).parent / "cuda_on_cpu" / "emulator.py")


@pytest.fixture(scope="session")
def products(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Cases of the skinny kernels' tests, for kernels that must have their bits."""
    return load_test_module(Path(__file__).with_name("test_cuda_skinny_gemm.py"))


@pytest.fixture(scope="session")
def close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """close(found, expected): within the rounding of fp32 sums, or an ulp or two of 16-bit outputs."""

    def check(found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.dtype == expected.dtype
        tolerance = {torch.float32: 4e-6, torch.bfloat16: 0.016, torch.float16: 0.002}[found.dtype]
        torch.testing.assert_close(found.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=tolerance)

    return check


@pytest.fixture(scope="session")
def cross_compile() -> Callable[..., list[dict[str, Any]]]:
    """Compiles, without a card, what a function launches: cross_compile(file, function, capability) calls
    `function()` of the test module `file` in a process of its own (no interpreter), compiles every launch for that
    compute capability instead of running it, and returns one dict a launch: kernel, constants, shared (bytes),
    num_warps, ttgir, ptx."""

    def run(file: str | Path, function: str, capability: int) -> list[dict[str, Any]]:
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, str(_CROSS_COMPILE), str(file), function, str(capability)],
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run

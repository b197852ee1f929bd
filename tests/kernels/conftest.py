"""Where the Triton kernels run in tests: on the GPU if there is one, else in Triton's interpreter.

tests/conftest.py asks for the interpreter before anything imports triton. The interpreter holds bf16 as bit patterns
and cuts where the GPU rounds: bf16 results are compared within a few ulps there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

_CROSS_COMPILE = Path(__file__).with_name("cross_compile.py")


@pytest.fixture
def kernel_device() -> str:
    """Where a test of kernels/gpu puts its tensors."""
    return "cuda" if torch.cuda.is_available() else "cpu"


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

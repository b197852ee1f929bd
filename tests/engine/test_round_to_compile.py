"""A round as a card would run it, without a card: it waits for nothing, and every kernel of it compiles."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from slipstream.kernels.gpu import launch, tiles

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def to_compile(load_test_module):
    return load_test_module(HERE / "round_to_compile.py")


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that are launched; none of them runs."""
    names: Counter[str] = Counter()
    monkeypatch.setattr(launch, "capability", lambda: 90)
    monkeypatch.setattr(launch, "_run", lambda kernel, *_: names.update([kernel.__name__]))
    return names


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 7])
def test_a_round_waits_for_nothing(to_compile, launched, num_steps, batch):
    """On `meta` nothing has a value: what asked for one would fail. Shapes must not hang on values either."""
    to_compile.one_round(num_steps, batch)
    assert launched["_commit_kernel"] == 1
    assert launched["_verify_rows_kernel"] == 1
    assert launched["_draft_rows_kernel"] == (num_steps > 0)
    assert launched["_norm_qkv_kernel"] == launched["_decode"] == 2 + num_steps  # two layers, and the draft's one
    assert launched["_prefill"] == 0


@pytest.mark.parametrize("this_round", [0, 1, 2])
def test_a_round_of_a_smaller_k_waits_for_nothing_either(to_compile, launched, this_round):
    """Without a draft proposed, too, its one layer runs: it takes in what was committed."""
    to_compile.one_round(3, 2, this_round)
    assert launched["_draft_rows_kernel"] == 1
    assert launched["_norm_qkv_kernel"] == launched["_decode"] == 2 + max(1, this_round)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_chunk_waits_for_nothing(to_compile, launched, num_steps, batch):
    to_compile.one_chunk(num_steps, 64, batch)
    assert launched["_commit_kernel"] == 1
    assert launched["_norm_qkv_kernel"] == launched["_prefill"] == 2 + (num_steps > 0)
    assert launched["_decode"] == 0


def test_the_tests_see_a_round_that_looks_at_a_value(to_compile, launched, monkeypatch):
    from slipstream.engine import runner

    sample = runner.sample
    monkeypatch.setattr(runner, "sample", lambda *arguments: sample(*arguments) + int(arguments[2].max()))
    with pytest.raises(RuntimeError, match="meta"):
        to_compile.one_round(0, 1)


def test_every_kernel_of_a_round_compiles_within_shared_memory():
    """For compute capability 9.0; each kernel's own tests compile it for the other cards."""
    file = HERE.parent / "kernels" / "cross_compile.py"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(file), str(HERE / "round_to_compile.py"), "rounds", "90"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    names = {kernel["kernel"] for kernel in kernels}
    assert {"_draft_rows_kernel", "_verify_rows_kernel", "_commit_kernel", "_decode", "_prefill"} <= names
    assert max(kernel["shared"] for kernel in kernels) <= tiles.SHARED_BYTES[90]

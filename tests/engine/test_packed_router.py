"""A router packed beside its shared expert: where it is, and a whole block through its kernels on the emulated GPU."""

import copy
import shutil
from pathlib import Path

import pytest
import torch

from slipstream.engine.deepseek_config import Experts
from slipstream.engine.layers.experts import MixtureOfExperts
from slipstream.engine.packed_weights import describe, pack_weights
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels import gate_experts as op
from slipstream.kernels.cuda.pack import PackedWeight
from slipstream.kernels.gpu import launch
from slipstream.kernels.matrix_products import MatrixProducts
from slipstream.kernels.stream import Norm, Stream
from slipstream.kernels.weight import as_matrix

EMULATOR = Path(__file__).parents[1] / "kernels" / "cuda_on_cpu" / "emulator.py"
CUDA = MatrixProducts("cuda", "of a test")


def block_of(hidden=64, dtype=torch.bfloat16, shared=1, width=32):
    """A block with random weights."""
    experts = Experts(16, 4, shared, width, 0, 2.5, True, 1, 1)
    made = MixtureOfExperts(hidden, experts, TensorParallel(), dtype=dtype)
    generator = torch.Generator().manual_seed(8)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.15, generator=generator)
    return made.requires_grad_(False)


def packed_copy(block, monkeypatch, arch=90):
    monkeypatch.setattr(launch, "capability", lambda: arch)
    made = copy.deepcopy(block)
    pack_weights(made)
    return made


def test_a_router_is_packed_where_its_kernels_run(monkeypatch):
    for shared in (0, 2):
        plain = block_of(shared=shared)
        packed = packed_copy(plain, monkeypatch)
        assert isinstance(packed.gate.weight, PackedWeight)
        assert torch.equal(as_matrix(packed.gate.weight), plain.gate.weight)
        assert describe(CUDA, packed)["packed_weights"] == (3 if shared else 1)
    others = [block_of(dtype=torch.float32), block_of(hidden=80), block_of(width=40)]  # no multiples of 32
    for block, arch in ((block_of(), 80), *((one, 90) for one in others)):
        assert isinstance(packed_copy(block, monkeypatch, arch).gate.weight, torch.nn.Parameter)


def test_a_block_through_the_kernels_gives_the_twins_numbers(load_test_module, run_dir, monkeypatch):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    block = block_of()
    packed = packed_copy(block, monkeypatch)
    emulator = load_test_module(EMULATOR)
    emulated = emulator.ExpertEmulator(emulator.compile_front(run_dir))
    emulated.install(monkeypatch)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    norm = Norm(torch.ones(64).bfloat16(), 1e-5)
    with torch.no_grad():
        want = block(Stream(x), norm).rows
        assert torch.equal(packed(Stream(x), norm).rows, want)  # packed, but on a CPU
        monkeypatch.setattr(op, "on_gpu", lambda rows: True)
        found = packed(Stream(x), norm).rows
        alone = packed(Stream(x[2:3]), norm).rows
    assert emulated.faults == 0
    assert emulated.names == ["gate_rows", "choose_rows"] * 2
    assert torch.equal(alone, found[2:3])
    added = (want - x).float()
    assert float((found.float() - want.float()).norm() / added.norm()) < 0.02
    assert float(added.norm() / x.float().norm()) > 0.1

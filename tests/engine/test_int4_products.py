"""A model with INT4 weights through the CUDA C++ kernels: on an emulated GPU against the twins, on a card for real."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.engine.bench.sizes import Size, random_target
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.layers import Linear
from slipstream.engine.packed_weights import describe, mark_int4_weights, products_for
from slipstream.engine.runner import capture_states
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels import dispatch, matrix_products
from slipstream.kernels.int4 import Int4Weight
from slipstream.kernels.matrix_products import MatrixProducts

TINY = Size("tiny", 199, 128, 256, 3, 4, 2, 32, True, 1e4, 64, 80, int4_group=32)
EMULATOR = Path(__file__).parents[1] / "kernels" / "cuda_on_cpu" / "emulator.py"


def int4_layers(model):
    return [layer for layer in model.modules() if isinstance(layer, Linear) and isinstance(layer.weight, Int4Weight)]


def near(found, expected):
    """A few bf16 roundings apart: a wrong row order or norm is off by its whole size."""
    assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 0.02


@pytest.fixture
def emulator(load_test_module, run_dir, monkeypatch):
    """INT4 weights go to the emulated GPU."""
    from slipstream.kernels.cuda import int4_launch

    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    module = load_test_module(EMULATOR)
    made = module.Int4Emulator(module.compile_int4(run_dir, TINY.int4_group))
    made.install(monkeypatch)
    run = made.run

    def checked(*arguments):
        run(*arguments)
        assert made.faults == 0

    monkeypatch.setattr(made, "run", checked)
    monkeypatch.setattr(int4_launch, "load", lambda device, groups: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(matrix_products, "_load_int4", matrix_products._load_int4.__wrapped__)
    return made


def test_a_model_through_the_kernels_gives_the_twins_numbers(emulator, monkeypatch):
    """A prompt of two groups of rows, whole and in chunks: the same bits, and the twins' but for roundings."""
    target = random_target(TINY, "cpu")
    assert len(int4_layers(target)) == 4 * 3
    ids = torch.randint(0, 199, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    expected, expected_last = capture_states(target, ids, (0, 1, 2), prefill_chunk_tokens=256)
    mark_int4_weights(target)
    told = describe(MatrixProducts("cuda", "of a test"), target)
    assert (told["packed_weights"], told["other_weights"]) == (12, 0)
    kernels = dispatch.cuda_products
    for op in ("linear_add", "norm_gate_up", "norm_linear", "norm_qkv"):
        monkeypatch.setattr(f"slipstream.kernels.{op}.cuda_products", _on_card(kernels, monkeypatch))
    states, last = capture_states(target, ids, (0, 1, 2), prefill_chunk_tokens=256)
    assert {name.split("_")[1] for name in emulator.names} == {"1", "2", "3"}  # all products but the head
    again, last_again = capture_states(target, ids, (0, 1, 2), prefill_chunk_tokens=70)
    assert torch.equal(last, last_again)
    assert all(torch.equal(states[name], again[name]) for name in states)
    for name in expected:
        near(states[name], expected[name])
    near(last, expected_last)


def _on_card(kernels, monkeypatch):
    """`cuda_products` as on a card, though nothing else runs there."""

    def products(weight, x, half=16):
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "on_gpu", lambda x: True)
            return kernels(weight, x, half)

    return products


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("group", [32, 128])
def test_on_a_card(monkeypatch, group):
    """Tokens and states do not depend on graphs, dependent launch or neighbours; states are near those of Triton."""
    if products_for("cuda").kernels != "cuda":
        pytest.skip(products_for("cuda").reason)
    size = replace(TINY, hidden_size=256, intermediate_size=640, head_dim=64, int4_group=group)
    target = random_target(size)
    assert all(layer.weight.cuda for layer in int4_layers(target))
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 199, (n,), generator=draw).tolist() for n in (5, 200, 33, 70)]
    states, last = capture_states(target, prompts[1], (0, 1, 2))

    params = SamplingParams(max_tokens=24, ignore_eos=True)
    sizes = {"max_context_tokens": 256, "prefill_chunk_tokens": 128, "device": "cuda"}
    plain = None
    for batch, graphs, pdl in ((1, False, "0"), (1, True, "1"), (4, True, "1"), (4, True, "0")):
        monkeypatch.setenv("SLIPSTREAM_PDL", pdl)
        engine = Engine(target, EngineConfig(max_running_requests=batch, graphs=graphs, **sizes))
        answers = engine.generate(prompts, params, trace=True)
        plain = plain or answers
        for mine, alone in zip(answers, plain, strict=True):
            assert mine.token_ids == alone.token_ids, (batch, graphs, pdl)
            rows = min(len(mine.trace.teacher), len(alone.trace.teacher))
            assert torch.equal(mine.trace.teacher[:rows], alone.trace.teacher[:rows])

    monkeypatch.setenv(matrix_products.VARIABLE, "triton")
    other = random_target(size)
    assert not any(layer.weight.cuda for layer in int4_layers(other))
    their_states, their_last = capture_states(other, prompts[1], (0, 1, 2))
    for name in states:
        near(states[name], their_states[name])
    near(last, their_last)

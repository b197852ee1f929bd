"""What a card's kernels of routed experts do not take is refused, and they are there, before a layer takes memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.engine import streamed_load
from slipstream.engine.bench.random_deepseek import kimi_k25
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.expert_kernels import prepare_expert_kernels
from slipstream.engine.loader import load_target
from slipstream.engine.quantization import Quantization
from slipstream.kernels.cuda import build, expert_launch, expert_stream_launch, gate_launch, route_launch
from slipstream.kernels.int4 import unpack

KIMI = Path(__file__).parents[1] / "checkpoints" / "kimi.py"
CONFIG = kimi_k25(2, 64)


@pytest.fixture
def loaded(monkeypatch):
    """Names of the kernels that were loaded, on a card that there is none of."""
    names = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for module in (route_launch, gate_launch, expert_launch, expert_stream_launch):
        monkeypatch.setattr(module, "load", lambda device, name=module.__name__: names.append(name))
    return names


def test_the_kernels_are_loaded_for_a_card_and_nowhere_else(loaded):
    prepare_expert_kernels(CONFIG, torch.float32, "cpu")
    prepare_expert_kernels(replace(CONFIG, experts=None), torch.float32, "cuda")
    assert not loaded
    prepare_expert_kernels(CONFIG, torch.bfloat16, "cuda")
    names = ["route_launch", "gate_launch", "expert_launch", "expert_stream_launch"]
    assert [name.rpartition(".")[2] for name in loaded] == names


@pytest.mark.parametrize(
    ("changes", "dtype", "words"),
    [
        ({}, torch.float32, "INT4 in groups of 32 weights over float32"),
        ({"quantization": None}, torch.bfloat16, "plain weights over bfloat16"),
        ({"quantization": Quantization(128)}, torch.bfloat16, "INT4 in groups of 128 weights"),
        ({"experts": replace(CONFIG.experts, num=1024)}, torch.bfloat16, "at most 128 rows, 512 experts"),
    ],
)
def test_what_the_kernels_do_not_take(loaded, changes, dtype, words):
    with pytest.raises(SlipstreamError, match=words):
        prepare_expert_kernels(replace(CONFIG, **changes), dtype, "cuda")
    assert not loaded


def test_a_host_without_a_compiler_is_told_so(loaded, monkeypatch):
    def fails(device):
        raise RuntimeError("no nvcc on this host")

    monkeypatch.setattr(expert_launch, "load", fails)
    monkeypatch.setattr(build, "nvcc", lambda: None)
    with pytest.raises(SlipstreamError, match="no nvcc, nor kernels from an earlier start") as error:
        prepare_expert_kernels(CONFIG, torch.bfloat16, "cuda")
    assert "install it" in str(error.value)


def test_a_target_is_refused_before_a_layer_takes_memory(load_test_module, tmp_path, monkeypatch):
    made = load_test_module(KIMI).synthesise(tmp_path / "m", num_hidden_layers=2)
    units = []
    monkeypatch.setattr(streamed_load, "_allocate", lambda unit, device: units.append(unit))
    with pytest.raises(SlipstreamError, match="over float32, on a card"):
        load_target(made.directory, torch.float32, "cuda")
    assert not units


def test_our_own_packing_is_the_librarys_form(load_test_module, tmp_path):
    """Cards' tests write checkpoints without the library: the same names, shapes and types, and they load."""
    module = load_test_module(KIMI)
    ours, theirs = (
        module.synthesise(tmp_path / str(library), num_hidden_layers=2, library=library) for library in (False, True)
    )
    forms = [{name: (t.shape, t.dtype) for name, t in one.tensors.items()} for one in (ours, theirs)]
    assert forms[0] == forms[1]
    stem = "language_model.model.layers.1.mlp.experts.3.up_proj.weight_packed"
    same = unpack(ours.tensors[stem]) == unpack(theirs.tensors[stem])
    assert same.float().mean() > 0.97  # the library divides in bf16
    load_target(ours.directory, torch.bfloat16)

"""F8: a draft tensor misnamed, missing, extra or misshaped. Caught at conversion and at load, every one listed."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine.drafts.eagle3.checkpoint import from_tensors, load_draft, save_draft, to_tensors
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity

CAUGHT = [
    ("F8", "conversion, load", "tensors misnamed, missing, extra or misshaped: each one listed"),
]

RECORD = DraftRecord(TargetIdentity("a" * 64, "b" * 64, "c" * 64), Family.LLAMA, "f" * 64)


@pytest.fixture
def network(tiny, tmp_path):
    return tiny.tiny_draft(tiny.tiny_target(tmp_path / "target"))


def rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


def misnamed(tensors):
    rename(tensors, "midlayer.hidden_norm.weight", "midlayer.hidden_layernorm.weight")
    return "misnamed: midlayer.hidden_layernorm.weight [64], nearest is midlayer.hidden_norm.weight"


def missing(tensors):
    del tensors["midlayer.self_attn.k_proj.weight"]
    return "missing: midlayer.self_attn.k_proj.weight [32, 128]"


def extra(tensors):
    tensors["midlayer.self_attn.rotary_emb.scale"] = torch.ones(3)
    return "extra: midlayer.self_attn.rotary_emb.scale [3]"


def misshaped(tensors):
    # Features without the embedding half: the shape of an ordinary decoder layer.
    tensors["midlayer.self_attn.q_proj.weight"] = tensors["midlayer.self_attn.q_proj.weight"][:, :64].clone()
    return "misshaped: midlayer.self_attn.q_proj.weight is [64, 64], the config says [64, 128]"


FAULTS = [misnamed, missing, extra, misshaped]


@pytest.mark.parametrize("inject", FAULTS)
def test_caught_at_load(network, tmp_path, inject):
    save_draft(tmp_path / "draft", network, RECORD)
    path = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(path)
    line = inject(tensors)
    save_file(tensors, path)
    with pytest.raises(SlipstreamError) as caught:
        load_draft(tmp_path / "draft")
    assert caught.value.fault == "F8"
    assert line in str(caught.value)
    assert "differ in 1 tensors" in caught.value.found
    assert "every parameter loaded" in caught.value.expected
    load_draft(tmp_path / "draft", skip={"F8"})  # as the incident's server did


@pytest.mark.parametrize("inject", FAULTS)
def test_caught_at_conversion(network, inject):
    tensors = to_tensors(network)
    line = inject(tensors)
    options = {"where": "the training checkpoint"}
    with pytest.raises(SlipstreamError) as caught:
        from_tensors(network.config, tensors, torch.bfloat16, **options)
    assert (caught.value.fault, line in str(caught.value)) == ("F8", True)
    from_tensors(network.config, tensors, torch.bfloat16, **options, skip={"F8"})


def test_all_of_them_are_listed_at_once(network):
    tensors = to_tensors(network)
    lines = [inject(tensors) for inject in FAULTS]
    with pytest.raises(SlipstreamError) as caught:
        from_tensors(network.config, tensors, torch.bfloat16, where="the file")
    assert "differ in 4 tensors" in caught.value.found
    assert all(line in str(caught.value) for line in lines)


def test_what_passes_unnoticed_without_the_check(network):
    """The parameter under the wrong name keeps its first value: nothing crashes, and the drafts are bad."""
    tensors = to_tensors(network)
    misnamed(tensors)
    loaded = from_tensors(network.config, tensors, torch.bfloat16, where="the file", skip={"F8"})
    assert torch.equal(loaded.midlayer.hidden_norm.weight, torch.ones_like(loaded.midlayer.hidden_norm.weight))
    assert not torch.equal(loaded.midlayer.hidden_norm.weight, network.midlayer.hidden_norm.weight)
    assert torch.equal(loaded.fc.weight, network.fc.weight)

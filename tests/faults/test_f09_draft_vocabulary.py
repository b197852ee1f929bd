"""F9: d2t absolute instead of offset, or out of range; lm_head missing with a reduced vocabulary.

Caught at conversion (`save_draft`) and at load (`load_draft`).
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine.drafts.eagle3.checkpoint import load_draft, save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.drafts.eagle3.tensor_checks import check_vocabulary
from slipstream.engine.drafts.eagle3.vocab import count_tokens, select_draft_vocab
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity

CAUGHT = [
    ("F9", "conversion, load", "d2t is absolute, or out of range; d2t and t2d disagree; no lm_head"),
]

RECORD = DraftRecord(TargetIdentity("a" * 64, "b" * 64, "c" * 64), Family.LLAMA, "f" * 64)
V, VD = 199, 66


@pytest.fixture
def network(tiny, tmp_path):
    network = tiny.tiny_draft(tiny.tiny_target(tmp_path / "target"))
    counts = torch.randint(0, 50, (V,), generator=torch.Generator().manual_seed(2))
    network.d2t.copy_(select_draft_vocab(counts, VD).d2t)
    return network


def absolute(d2t):
    ids = d2t + torch.arange(VD)
    listed = ", ".join(map(str, ids[:4].tolist()))
    return ids, rf"holds target ids \(absolute: {listed}, \.\.\.\), which would be read as offsets"


def out_of_range(d2t):
    d2t = d2t.clone()
    d2t[-1] = V - (VD - 1)  # one past the last target id
    return d2t, r"maps 1 draft tokens outside the vocabulary \(to \d+\.\.199\)"


def negative(d2t):
    d2t = d2t.clone()
    d2t[0] = -1
    return d2t, r"maps 1 draft tokens outside the vocabulary \(to -1\.\."


def twice_the_same(d2t):
    d2t = d2t.clone()
    d2t[5] = d2t[4] - 1
    target_id = int(d2t[4]) + 4
    return d2t, f"maps draft tokens 4 and 5 to target tokens {target_id} and {target_id}"


FAULTS = [absolute, out_of_range, negative, twice_the_same]


@pytest.mark.parametrize("inject", FAULTS)
def test_d2t_caught_at_conversion(network, tmp_path, inject):
    damaged, words = inject(network.d2t)
    network.d2t.copy_(damaged)
    with pytest.raises(SlipstreamError, match=words) as caught:
        save_draft(tmp_path / "draft", network, RECORD)
    assert caught.value.fault == "F9"
    assert not (tmp_path / "draft").exists()
    save_draft(tmp_path / "draft", network, RECORD, skip={"F9"})


@pytest.mark.parametrize("inject", FAULTS)
@pytest.mark.parametrize("with_t2d", [True, False])
def test_d2t_caught_at_load(network, tmp_path, inject, with_t2d):
    save_draft(tmp_path / "draft", network, RECORD)
    path = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"], words = inject(tensors["d2t"])
    if not with_t2d:
        del tensors["t2d"]
    save_file(tensors, path)
    with pytest.raises(SlipstreamError, match=words) as caught:
        load_draft(tmp_path / "draft")
    assert caught.value.fault == "F9"
    loaded = load_draft(tmp_path / "draft", skip={"F9"})  # unnoticed: a healthy draft that proposes other tokens
    assert not torch.equal(loaded.to_target(torch.arange(VD)), network.to_target(torch.arange(VD)))


def test_absolute_ids_that_stay_in_range_are_recognised():
    """Read as offsets, these 600 target ids would all be legal, rising target ids."""
    ids = torch.randperm(3000, generator=torch.Generator().manual_seed(0))[:600].sort().values
    tensors = {"d2t": ids, "lm_head.weight": torch.zeros(600, 4)}
    with pytest.raises(SlipstreamError, match="absolute"):
        check_vocabulary(tensors, 9000, 600, where="the file")
    check_vocabulary(tensors | {"d2t": ids - torch.arange(600)}, 9000, 600, where="the file")


def test_t2d_of_another_choice(network, tmp_path):
    save_draft(tmp_path / "draft", network, RECORD)
    path = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(path)
    tensors["t2d"] = tensors["t2d"].roll(1)
    save_file(tensors, path)
    with pytest.raises(SlipstreamError, match=r"d2t and t2d disagree about \d+ target tokens") as caught:
        load_draft(tmp_path / "draft")
    assert caught.value.fault == "F9"
    load_draft(tmp_path / "draft", skip={"F9"})


@pytest.mark.parametrize(
    ("name", "silent"), [("lm_head.weight", "the first 66 rows of the target's head"), ("d2t", "target ids 0..65")]
)
def test_lm_head_or_d2t_missing_with_a_reduced_vocabulary(network, tmp_path, name, silent):
    save_draft(tmp_path / "draft", network, RECORD)
    path = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(SlipstreamError, match=f"has no {name}, and a draft vocabulary of 66 of 199") as caught:
        load_draft(tmp_path / "draft")
    assert caught.value.fault == "F9"
    assert silent in caught.value.expected
    load_draft(tmp_path / "draft", skip={"F9"})


def test_d2t_and_t2d_of_a_real_choice_round_trip():
    """What `select_draft_vocab` makes passes, and both directions agree."""
    generator = torch.Generator().manual_seed(1)
    tokens = [(torch.randint(0, V, (90,), generator=generator), torch.arange(90) > 9) for _ in range(5)]
    vocab = select_draft_vocab(count_tokens(tokens, V), VD)
    check_vocabulary(
        {"d2t": vocab.d2t, "t2d": vocab.t2d, "lm_head.weight": torch.zeros(VD, 4)}, V, VD, where="the file"
    )
    assert torch.equal(vocab.t2d.nonzero().squeeze(1), vocab.target_ids)

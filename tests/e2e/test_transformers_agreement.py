"""Agreement with transformers: on a tiny model in every run, on the real target by hand; and that it can fail."""

import pytest
import torch

from slipstream.engine.loader import load_target
from slipstream.engine.models.dense import DenseModel
from slipstream.tasks.parity_target import LogitFindings


@pytest.fixture(scope="module")
def model_dir(tiny, tmp_path_factory):
    """bf16 on disk, so that fp32 and bf16 have the same weights, as with the real target."""
    return tiny.save_tiny(tmp_path_factory.mktemp("target"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def measured(tiny, agreement, model_dir):
    def measure(target):
        return agreement.measure(model_dir, target, tiny.prompts(8, seed=3), 32)

    return measure


def test_a_tiny_target_agrees(agreement, measured, model_dir):
    findings = measured(load_target(model_dir, "bfloat16"))
    assert findings.positions > 8 * 32
    assert agreement.failures(findings) == []
    assert 0 < findings.self_differ < 0.05 * findings.positions
    assert ("NOT reached" in agreement.describe(findings)[1]) == (findings.share > agreement.MAX_DIFFERENCE)
    assert 0.3 < findings.error_ratio < agreement.MAX_ERROR_RATIO


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda logits: logits.roll(1, dims=-1), "argmax differs"),
        (lambda logits: (logits * 4).round() / 4, "error against fp32"),
    ],
)
def test_other_logits_are_seen(agreement, measured, model_dir, monkeypatch, change, word):
    logits = DenseModel.logits
    monkeypatch.setattr(DenseModel, "logits", lambda self, last: change(logits(self, last)))
    assert any(word in f for f in agreement.failures(measured(load_target(model_dir, "bfloat16"))))


def later_positions_are_one_too_far(target):
    table = target.rotary.table  # [2, P, d]
    table[:, 20:-1] = table[:, 21:].clone()


def heads_swapped(target):
    weight, dim = target.layers[1].self_attn.qkv_proj.weight.data, target.config.head_dim  # [(q + 2 kv) * d, h]
    weight[: 2 * dim] = weight[: 2 * dim].roll(dim, dims=0)


def second_norm_without_its_weight(target):
    target.layers[2].post_attention_layernorm.weight.data.fill_(1.0)


def scale_of_the_next_larger_head(target):
    for layer in target.layers:
        layer.self_attn.scale *= 0.8  # 1 / sqrt(1.5 d)


def layer_skipped(target):
    target.layers[2].forward = lambda stream, *_: stream


FAULTS = [
    later_positions_are_one_too_far,
    heads_swapped,
    second_norm_without_its_weight,
    scale_of_the_next_larger_head,
    layer_skipped,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_target_are_seen(agreement, measured, model_dir, fault):
    """Each by every rule that could have let it pass as rounding."""
    target = load_target(model_dir, "bfloat16")
    fault(target)
    findings = measured(target)
    found = agreement.failures(findings)
    assert any("beyond the bound of" in sentence for sentence in found), (found, findings)
    assert any(sentence.startswith("the argmax differs from transformers in fp32") for sentence in found), (
        found,
        findings,
    )
    assert findings.beyond_tie > 0


@pytest.mark.parametrize(
    ("independent", "differ", "own", "bound"),
    [
        (True, 74, 50, ""),  # what an H200 gave
        (True, 95, 50, "bound of 1.50%"),
        (True, 60, 75, "differs from transformers in fp32"),
        (False, 43, 17, ""),  # a CPU
        (False, 74, 50, "bound of 1.10%"),
    ],
)
def test_the_bounds_at_counts_of_the_real_target(agreement, independent, differ, own, bound):
    """Of 5,630 positions transformers in bf16 differs at 48 from fp32, and at 74 from itself with other attention."""
    findings = LogitFindings(independent, 5630, differ=differ, reference_differ=48, self_differ=74, own_differ=own)
    findings.error_sum = findings.reference_error_sum = 1.0
    found = agreement.failures(findings)
    assert len(found) == bool(bound)
    assert all(bound in sentence for sentence in found)


def test_where_the_reference_reaches_what_is_asked_so_must_we(agreement):
    findings = LogitFindings(True, 5630, differ=28, reference_differ=90, self_differ=28)
    findings.error_sum = findings.reference_error_sum = 1.0
    assert agreement.failures(findings) == []
    findings.differ = 29
    (found,) = agreement.failures(findings)
    assert "asked at most 0.50%, NOT reached; transformers differs from itself at 0.50%" in found
    assert "ours at 0.52%, beyond the bound of 0.50%" in found


@pytest.mark.real
@pytest.mark.soak
def test_the_real_target_agrees(agreement, real_target):
    """32 prompts x 128 tokens."""
    assert agreement.main(["--target", str(real_target)]) == 0

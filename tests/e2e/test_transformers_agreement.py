"""Agreement with transformers: on a tiny model in every run, on the real target by hand; and that it can fail."""

import pytest
import torch

from slipstream.engine.loader import load_target
from slipstream.engine.models.dense import DenseModel


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
    measurement = measured(load_target(model_dir, "bfloat16"))
    findings = measurement.findings
    assert findings.positions > 8 * 32
    assert agreement.failures(findings) == []
    assert 0 < measurement.self_differ < 0.05 * findings.positions
    assert ("NOT reached" in measurement.describe()[1]) == (findings.share > agreement.MAX_DIFFERENCE)
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
    assert any(word in f for f in agreement.failures(measured(load_target(model_dir, "bfloat16")).findings))


@pytest.mark.real
@pytest.mark.soak
def test_the_real_target_agrees(agreement, real_target):
    """32 prompts x 128 tokens."""
    assert agreement.main(["--target", str(real_target)]) == 0

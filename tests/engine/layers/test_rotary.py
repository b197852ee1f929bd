"""The rotary tables against transformers', for every kind of scaling."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.engine.layers import RotaryEmbedding

LENGTH = 4096
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS = {
    "default": {"rope_type": "default"},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 512},
    "llama3, length not told": LLAMA3,
    "yarn": YARN,
    "yarn, length not told": {"rope_type": "yarn", "factor": 4.0},
    "yarn, factor from the lengths": {**YARN, "factor": None},
    "yarn, attention factor": {**YARN, "attention_factor": 1.5},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn, betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, factor below 1": {**YARN, "factor": 0.5},
}


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_tables_equal_transformers(scaling, head_dim):
    theta = 10000.0
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=LENGTH, rope_parameters={**scaling, "rope_theta": theta}
    )
    positions = torch.tensor([[0, 1, 17, 511, 1023], [1024, 2047, 3000, LENGTH - 2, LENGTH - 1]])
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = RotaryEmbedding(head_dim, LENGTH, theta, scaling)(positions, torch.float32)
    for one, other in zip(ours, expected, strict=True):
        # Angles go up to 4095 radians: an ulp of a frequency is 2.4e-4 there.
        torch.testing.assert_close(one, other, rtol=0, atol=5e-4)
        torch.testing.assert_close(one[0, :3], other[0, :3], rtol=0, atol=2e-6)


def test_a_table_in_bf16_is_the_rounded_one_and_padding_reads_position_0():
    exact, rounded = RotaryEmbedding(64, 50, 1e4), RotaryEmbedding(64, 50, 1e4, dtype=torch.bfloat16)
    positions = torch.tensor([3, -1, 49, 0])
    for one, other in zip(exact(positions, torch.bfloat16), rounded(positions, torch.bfloat16), strict=True):
        assert one.shape == (4, 64)
        assert torch.equal(one, other)
        assert torch.equal(one[1], one[3])
    with pytest.raises(ValueError, match="is rounded to"):
        rounded(positions, torch.float32)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "linear", "factor": 2.0}, "'linear' is not supported; known: default, llama3, yarn"),
        ({"type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "yarn"}, "'yarn' has no factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "no low_freq_factor and no high_freq_factor"),
    ],
)
def test_other_scalings_are_refused(scaling, words):
    with pytest.raises(ValueError, match=words):
        RotaryEmbedding(64, 50, 1e4, scaling)


def test_a_position_beyond_the_table_is_an_error():
    with pytest.raises((IndexError, RuntimeError)):
        RotaryEmbedding(64, 50, 1e4)(torch.tensor([50]), torch.float32)

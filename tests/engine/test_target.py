"""The target against transformers: logits, every slot, greedy tokens; and prefill cut anywhere."""

import pytest
import torch

from slipstream.engine.capture import slot_name
from slipstream.engine.engine import Engine, EngineConfig
from slipstream.engine.runner import capture_states
from slipstream.engine.sampling_params import SamplingParams

VARIANTS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "wide heads": {"head_dim": 32, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("sizes", VARIANTS.values(), ids=VARIANTS.keys())
def test_states_and_logits_equal_transformers(tiny, tmp_path, sizes):
    target = tiny.tiny_target(tmp_path, dtype=torch.float32, **sizes)
    reference = tiny.tiny_hf(**sizes)
    ids = tiny.prompts(1, low=70, high=70)[0]
    num_layers = target.config.num_layers
    states, teacher = capture_states(target, ids, tuple(range(num_layers + 1)), prefill_chunk_tokens=32)
    before_norm = []
    reference.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    with torch.no_grad():
        expected = reference(torch.tensor([ids]), output_hidden_states=True)
        logits = target.logits(teacher)
    for slot in range(num_layers):
        torch.testing.assert_close(states[slot_name(slot)], expected.hidden_states[slot][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(teacher, before_norm[0][0], rtol=1e-4, atol=1e-4)
    assert torch.equal(teacher, states[slot_name(num_layers)])
    torch.testing.assert_close(target.final_norm(teacher), expected.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(teacher, expected.hidden_states[-1][0], rtol=0.1, atol=0.1)  # it is no identity
    torch.testing.assert_close(logits, expected.logits[0], rtol=1e-4, atol=1e-3)


def test_greedy_tokens_equal_transformers(tiny, tmp_path):
    target, reference = tiny.tiny_target(tmp_path, dtype=torch.float32), tiny.tiny_hf()
    prompts = tiny.prompts(4)
    engine = Engine(target, EngineConfig(max_context_tokens=128, prefill_chunk_tokens=16, dtype="float32"))
    answers = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(ids, max_new_tokens=40, min_new_tokens=40, do_sample=False, eos_token_id=None)
        assert answer.token_ids == expected[0, len(prompt) :].tolist()
        assert answer.finish_reason == "length"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prefill_does_not_depend_on_its_cuts(tiny, tmp_path, dtype):
    target = tiny.tiny_target(tmp_path, dtype=dtype)
    ids = tiny.prompts(1, low=90, high=90)[0]
    whole, teacher = capture_states(target, ids, (0, 2), prefill_chunk_tokens=128)
    for chunk in (1, 7, 16, 33):
        states, last = capture_states(target, ids, (0, 2), prefill_chunk_tokens=chunk)
        assert torch.equal(last, teacher), chunk
        assert all(torch.equal(states[name], whole[name]) for name in whole), chunk


def test_capture_does_not_change_the_states(tiny, tmp_path):
    target = tiny.tiny_target(tmp_path)
    ids = tiny.prompts(1)[0]
    _, plain = capture_states(target, ids, ())
    _, captured = capture_states(target, ids, (0, 1, 2, 3, 4))
    assert torch.equal(plain, captured)

"""Every family against transformers in fp32: states, logits, greedy tokens with and without speculation."""

import pytest
import torch

from slipstream.engine.capture import slot_name
from slipstream.engine.engine import Engine, EngineConfig
from slipstream.engine.layers import RotaryEmbedding
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.runner import capture_states
from slipstream.engine.sampling_params import SamplingParams

NEW_TOKENS = 48
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
# Every family, head size, kind of head and of scaling; texts go on to about 90 tokens, beyond 32 and the window.
CASES = {
    "llama 64 tied, llama3": {"family": "llama", "head_dim": 64, "rope_parameters": LLAMA3},
    "llama 128 untied, yarn": {
        "family": "llama", "head_dim": 128, "rope_parameters": YARN, "tie_word_embeddings": False
    },
    "mistral 96 untied, window": {
        "family": "mistral", "head_dim": 96, "sliding_window": 20, "tie_word_embeddings": False
    },
    "mistral 128 tied, no window": {"family": "mistral", "head_dim": 128, "sliding_window": None},
    "qwen3 256 tied": {"family": "qwen3", "head_dim": 256},
    "qwen3 64 untied, yarn": {
        "family": "qwen3", "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_parameters": YARN, "tie_word_embeddings": False,
    },
}  # fmt: skip


class World:
    """One case: ours on a device, transformers' on the CPU."""

    def __init__(self, tiny, directory, device, sizes) -> None:
        sizes = {**SMALL, **sizes}
        self.target = tiny.tiny_target(directory, dtype=torch.float32, device=device, **sizes)
        self.reference = tiny.tiny_hf(**sizes)
        self.device = device
        self.prompts = tiny.prompts(3, low=24, high=40)

    def engine(self, num_steps: int = 0, proposer=None) -> Engine:
        config = EngineConfig(
            num_steps=num_steps,
            max_running_requests=4,
            max_context_tokens=128,
            prefill_chunk_tokens=16,
            dtype="float32",
            device=self.device,
        )
        return Engine(self.target, config, proposer)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def world(request, tiny, device, tmp_path):
    return World(tiny, tmp_path, device, request.param)


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Errors are at most 1e-4 of the largest value."""
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_states_and_logits_equal_transformers(world, tiny):
    (ids,) = tiny.prompts(1, seed=4, low=90, high=90)
    num_layers = world.target.config.num_layers
    states, teacher = capture_states(world.target, ids, tuple(range(num_layers + 1)), prefill_chunk_tokens=32)
    before_norm = []
    world.reference.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    with torch.no_grad():
        expected = world.reference(torch.tensor([ids]), output_hidden_states=True)
        logits = world.target.logits(teacher)
    for slot in range(num_layers):
        ours = states[slot_name(slot)].cpu()
        assert_close(ours, expected.hidden_states[slot][0])
    assert_close(teacher.cpu(), before_norm[0][0])
    assert_close(logits.cpu(), expected.logits[0])


def test_greedy_tokens_equal_transformers_with_and_without_speculation(world):
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    answers = [answer.token_ids for answer in world.engine().generate(world.prompts, params)]
    for prompt, answer in zip(world.prompts, answers, strict=True):
        text = torch.tensor([prompt])
        length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        expected = world.reference.generate(text, **length, do_sample=False, eos_token_id=None)
        assert answer == expected[0, len(prompt) :].tolist()
    recordings = {str(i): [*p, *a] for i, (p, a) in enumerate(zip(world.prompts, answers, strict=True))}
    engine = world.engine(3, OracleProposer(3, recordings, world.target.config.vocab_size))
    assert [answer.token_ids for answer in engine.generate(world.prompts, params)] == answers
    assert min(engine.stats.acceptance[3].histogram) > 0  # every accepted count occurred


@pytest.mark.parametrize("world", [v for v in CASES.values() if v.get("sliding_window", 1)], indirect=True)
def test_what_a_family_adds_is_not_without_effect(world):
    """Without the window, the head norms or the scaling the states would be others: the equalities above see them."""
    (ids, *_), config = world.prompts, world.target.config
    ids = [*ids, *ids]
    _, right = capture_states(world.target, ids, ())
    if config.rope_scaling["rope_type"] != "default":
        world.target.rotary = RotaryEmbedding(config.head_dim, config.max_position, config.rope_theta).to(world.device)
    for layer in world.target.layers:
        layer.self_attn.window = layer.self_attn.q_norm = layer.self_attn.k_norm = None
    _, plain = capture_states(world.target, ids, ())
    assert (right - plain).abs().max() > 0.01 * right.abs().max()

"""A trace holds what one pass over the finished text gives: states, teacher, argmax, and every round."""

import pytest
import torch

from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine, EngineConfig
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.runner import capture_states
from slipstream.engine.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=30, temperature=1.0, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    return tiny.tiny_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("num_steps", [0, 4])
def test_states_equal_those_of_extraction(tiny, target, num_steps):
    """Bitwise: the slots that serving captures are the slots that training will read."""
    prompts = tiny.prompts(3)
    plain = Engine(target, EngineConfig(max_context_tokens=128)).generate(prompts, PARAMS)
    oracle = None
    if num_steps:
        recordings = {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(plain)}
        oracle = OracleProposer(num_steps, recordings, target.config.vocab_size)
    config = EngineConfig(num_steps=num_steps, max_context_tokens=128, prefill_chunk_tokens=16)
    answers = Engine(target, config, oracle, capture_slots=(0, 3, 4)).generate(prompts, PARAMS, trace=True)
    for answer, expected in zip(answers, plain, strict=True):
        trace, ids = answer.trace, expected.prompt_ids + expected.token_ids
        assert trace.token_ids == ids
        states, teacher = capture_states(target, ids[:-1], (0, 3, 4))
        assert trace.states.keys() == states.keys()
        assert all(torch.equal(trace.states[name], states[name]) for name in states)
        assert torch.equal(trace.teacher, teacher)
        assert torch.equal(trace.target_argmax, target.logits(teacher).max(-1).indices)
        assert len(trace.rounds) == (0 if num_steps == 0 else len({r.start for r in trace.rounds}))
        start = len(expected.prompt_ids) + 1
        for r in trace.rounds:
            assert r.start == start
            drafted = r.draft_tokens[: r.accepted].tolist()
            assert drafted == ids[start : start + r.accepted]
            start += r.accepted + 1
        if num_steps:
            assert start == len(ids)


def test_a_stop_cuts_the_trace(tiny, target):
    (prompt,) = tiny.prompts(1)
    greedy = SamplingParams(max_tokens=30, ignore_eos=True)
    (plain,) = Engine(target, EngineConfig(max_context_tokens=128)).generate([prompt], greedy)
    at = next(i for i in range(6, 30) if plain.token_ids[i] not in plain.token_ids[:i])
    oracle = OracleProposer(5, {"0": prompt + plain.token_ids}, target.config.vocab_size, [1.0] * 5)
    engine = Engine(target, EngineConfig(num_steps=5, max_context_tokens=128), oracle, capture_slots=(2,))
    stop = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(plain.token_ids[at],))
    (answer,) = engine.generate([prompt], stop, trace=True)
    assert answer.trace.token_ids == prompt + plain.token_ids[: at + 1]
    assert len(answer.trace.teacher) == len(answer.trace.states["slot_2"]) == len(prompt) + at


def test_draft_logits_are_kept(tiny, target):
    draft = tiny.tiny_draft(target)
    engine = Engine(target, EngineConfig(num_steps=3, max_context_tokens=128), Eagle3Proposer(draft, 3))
    (answer,) = engine.generate(tiny.prompts(1), PARAMS, trace=True)
    assert list(answer.trace.states) == ["slot_1", "slot_2", "slot_4"]
    for r in answer.trace.rounds:
        assert r.draft_logits.shape == (3, draft.config.draft_vocab_size)
        assert r.draft_tokens.shape == (3,)

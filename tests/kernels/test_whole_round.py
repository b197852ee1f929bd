"""Rounds through the Triton kernels alone, from the prompt to the tokens on the host: equal to the twins' tokens.

In Triton's interpreter where there is no card, in fp32, so that another order of summation changes no token. What the
kernels find there, uninitialised memory and what an engine keeps between requests, is garbage.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.gpu import attention_split

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=3, temperature=0.9, top_k=20, top_p=0.9, seed=4, ignore_eos=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card runs tests/engine/test_round_graph_gpu.py")
def test_tokens_and_counts_of_the_kernels_are_those_of_the_twins(tiny, load_test_module, tmp_path, monkeypatch):
    as_on_a_card = load_test_module(Path(__file__).parents[1] / "engine" / "round_to_compile.py").as_on_a_card
    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny.tiny_target(tmp_path, dtype=torch.float32, **sizes)
    draft = tiny.tiny_draft(target, slots=(0, 1))
    prompts = [tiny.prompts(1, low=18, high=18)[0], *tiny.prompts(1, seed=1, low=3, high=3)]

    def engine() -> Engine:
        config = EngineConfig(2, 2, 48, prefill_chunk_tokens=16, dtype="float32")
        return Engine(target, config, Eagle3Proposer(draft, 2))

    twins = engine()
    expected = twins.generate(prompts, [GREEDY, SAMPLED], trace=True)
    kernels = engine()
    load_test_module(Path(__file__).parents[1] / "benchmarks" / "poison.py").poison(kernels)
    monkeypatch.setattr(attention_split, "_WORKSPACES", {})
    torch.use_deterministic_algorithms(True)  # so torch.empty and its like are filled with NaN
    try:
        with as_on_a_card():
            found = kernels.generate(prompts, [GREEDY, SAMPLED], trace=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert kernels.stats.acceptance == twins.stats.acceptance
    for mine, theirs in zip(found, expected, strict=True):
        for name, state in theirs.trace.states.items():
            torch.testing.assert_close(mine.trace.states[name], state, rtol=1e-4, atol=1e-4)
        for one, other in zip(mine.trace.rounds, theirs.trace.rounds, strict=True):
            assert replace(one, draft_logits=None, draft_tokens=None) == replace(
                other, draft_logits=None, draft_tokens=None
            )
            used = max(1, one.num_valid)
            torch.testing.assert_close(one.draft_logits[:used], other.draft_logits[:used], rtol=1e-4, atol=1e-3)
            assert torch.equal(one.draft_tokens[:used], other.draft_tokens[:used])

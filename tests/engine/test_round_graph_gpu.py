"""Captured steps on a card: equal to steps without graphs, and to those of the CPU in what must not depend on it.

SLIPSTREAM_TEST_TARGET (a Hugging Face directory) and SLIPSTREAM_TEST_DRAFT (an EAGLE-3 directory) add a real model.
"""

import copy
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.inject import inject
from slipstream.engine.injection import parse_injections
from slipstream.engine.loader import load_target
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_k=40, top_p=0.95, seed=5, ignore_eos=True)
STEPS = (0, 1, 3, 5, 7)
SIZES = {"max_running_requests": 5, "max_context_tokens": 128, "prefill_chunk_tokens": 32, "device": "cuda"}


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 509}  # heads of 64
    directory = tiny.save_tiny(tmp_path_factory.mktemp("target"), **sizes)
    return load_target(directory, torch.bfloat16, "cuda")


@pytest.fixture(scope="module")
def draft(tiny, target):
    return tiny.tiny_draft(target).to("cuda")


@pytest.fixture(scope="module")
def prompts(tiny):
    return tiny.prompts(9, high=70)


@pytest.fixture(scope="module")
def params():
    return [replace((GREEDY, SAMPLED)[i % 2], max_tokens=8 + 4 * i) for i in range(9)]


@pytest.fixture(scope="module")
def plain(target, prompts, params):
    """Answers without speculation, without graphs, a request at a time."""
    return Engine(target, EngineConfig(**{**SIZES, "max_running_requests": 1, "graphs": False})).generate(
        prompts, params
    )


def oracle(target, plain, num_steps, inner=None):
    recordings = {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(plain)}
    return OracleProposer(num_steps, recordings, target.config.vocab_size, seed=3, inner=inner)


@pytest.mark.parametrize("kind", ["oracle", "draft"])
@pytest.mark.parametrize("num_steps", STEPS)
def test_tokens_do_not_depend_on_k_graphs_or_neighbours(target, draft, prompts, params, plain, num_steps, kind):
    proposer = None
    if num_steps:
        proposer = oracle(target, plain, num_steps) if kind == "oracle" else Eagle3Proposer(draft, num_steps)
    engine = Engine(target, EngineConfig(num_steps=num_steps, **SIZES), proposer)
    assert [a.token_ids for a in engine.generate(prompts, params)] == [a.token_ids for a in plain]
    assert (engine.captures_after_ready, engine.compiles_after_ready) == (0, 0)
    assert engine.scheduler.blocks.num_used == 0
    if num_steps and kind == "oracle":
        assert min(engine.stats.acceptance[num_steps].histogram) > 0


@pytest.mark.parametrize("num_steps", [0, 3])
def test_slots_draft_logits_and_counts_equal_those_without_graphs(target, draft, prompts, params, num_steps):
    """Bitwise, A, B, A through the same buffers."""
    found = []
    for graphs in (False, True):
        proposer = Eagle3Proposer(draft, num_steps) if num_steps else None
        sizes = {**SIZES, "max_running_requests": 1, "graphs": graphs}
        engine = Engine(target, EngineConfig(num_steps=num_steps, **sizes), proposer, capture_slots=(0, 3, 4))
        found.append(([engine.generate([prompts[i]], params[4], trace=True)[0] for i in (0, 1, 0)], engine))
    (eager, one), (replayed, other) = found
    assert one.stats.acceptance == other.stats.acceptance
    for a, b in zip(eager, replayed, strict=True):
        assert a.token_ids == b.token_ids
        assert a.trace.states.keys() == b.trace.states.keys()
        assert all(torch.equal(a.trace.states[n], b.trace.states[n]) for n in a.trace.states)
        assert torch.equal(a.trace.teacher, b.trace.teacher)
        for mine, theirs in zip(a.trace.rounds, b.trace.rounds, strict=True):
            assert torch.equal(mine.draft_tokens, theirs.draft_tokens)
            assert torch.equal(mine.draft_logits, theirs.draft_logits)
            assert (mine.start, mine.num_valid, mine.accepted) == (theirs.start, theirs.num_valid, theirs.accepted)


@pytest.mark.parametrize("fault", ["F6:slot=2", "F6:slot=2,kind=frozen", "F5:slot=2,kind=normed", "F19:kind=draft-kv"])
def test_faults_put_in_before_the_capture_are_replayed(target, draft, prompts, fault):
    """Tokens stay right; what the fault bends differs from the eager engine's, or for the draft its logits do."""
    found = []
    for faults, graphs in (((), False), ((fault,), True)):
        sizes = {**SIZES, "max_running_requests": 1, "graphs": graphs}
        engine = Engine(target, EngineConfig(num_steps=3, **sizes), Eagle3Proposer(draft_copy(draft), 3))
        forward = target.forward
        try:
            inject(engine, parse_injections(faults))
            found.append(engine.generate([prompts[0]], GREEDY, trace=True)[0])
        finally:
            target.forward = forward
    clean, bent = found
    assert bent.token_ids == clean.token_ids
    if fault.startswith("F19"):
        pairs = [(a.draft_logits, b.draft_logits) for a, b in zip(clean.trace.rounds, bent.trace.rounds, strict=False)]
        assert not all(torch.equal(a, b) for a, b in pairs)
    else:
        assert not torch.equal(bent.trace.states["slot_2"], clean.trace.states["slot_2"])
        assert torch.equal(bent.trace.states["slot_1"], clean.trace.states["slot_1"])


def draft_copy(draft):
    """Faults wrap a draft's methods; the next engine must not have them."""
    return copy.deepcopy(draft)


def test_the_device_tells_the_time_of_rounds(target, draft, prompts):
    engine = Engine(target, EngineConfig(num_steps=3, **SIZES), Eagle3Proposer(draft, 3))
    engine.generate(prompts, GREEDY)
    stats = engine.stats
    assert stats.draft_seconds > 0
    assert stats.verify_seconds > 0
    assert stats.prefill_seconds > 0
    assert stats.draft_seconds + stats.verify_seconds < 60


def test_a_cache_that_does_not_fit_is_refused_with_numbers(target):
    from slipstream.engine.errors import SlipstreamError

    with pytest.raises(SlipstreamError, match="GiB beside the weights") as error:
        Engine(target, EngineConfig(**{**SIZES, "num_kv_blocks": 2**31}))
    assert "room for" in str(error.value)


@pytest.fixture(scope="module")
def real():
    """(target, draft or None) of the environment."""
    directory = os.environ.get("SLIPSTREAM_TEST_TARGET")
    if not directory:
        pytest.skip("SLIPSTREAM_TEST_TARGET names no target")
    target = load_target(directory, torch.bfloat16, "cuda")
    where = os.environ.get("SLIPSTREAM_TEST_DRAFT")
    draft = None
    if where:
        draft = load_draft(Path(where), torch.bfloat16, target_embedding=target.embed_tokens.weight).eval()
    return target, draft


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_tokens_of_a_real_target_do_not_depend_on_k(real, tiny, batch):
    target, draft = real
    prompts = tiny.prompts(16, low=20, high=200, vocab_size=target.config.vocab_size)
    params = [replace((GREEDY, SAMPLED)[i % 2], max_tokens=64, seed=i) for i in range(16)]
    sizes = {"max_running_requests": batch, "max_context_tokens": 512, "device": "cuda"}
    plain = Engine(target, EngineConfig(max_running_requests=1, max_context_tokens=512, device="cuda")).generate(
        prompts, params
    )
    for num_steps in STEPS:
        inner = Eagle3Proposer(draft, num_steps) if draft and num_steps else None
        proposers = [None]
        if num_steps:
            proposers = [
                oracle(target, plain, num_steps, inner),
                *([Eagle3Proposer(draft, num_steps)] if draft else []),
            ]
        for proposer in proposers:
            engine = Engine(target, EngineConfig(num_steps=num_steps, **sizes), proposer)
            answers = engine.generate(prompts, params)
            assert [a.token_ids for a in answers] == [a.token_ids for a in plain], (num_steps, type(proposer).__name__)
            assert (engine.captures_after_ready, engine.compiles_after_ready) == (0, 0)

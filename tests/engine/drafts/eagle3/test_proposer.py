"""Chains over the paged draft cache equal chains computed anew for every round, at every step."""

import pytest
import torch

from slipstream.engine.capture import CapturePlan
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine, EngineConfig
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.sampling import gumbel_noise

NUM_STEPS = 5
SWITCHES = {
    "eagle3": {},
    "norm_output": {"norm_output": True},
    "norms": {"norm_before_residual": True, "fc_norm": True},
}


def plain_chain(network, features, token_ids, slot, num_steps, chain):
    """Logits [K, Vd] of the chain that starts at `slot`: all slots at step 1 anew, keys in a list, then own states.

    features: [T, F] of the committed positions; token_ids: committed tokens; chain: tokens embedded by steps 2..K.
    """
    config = network.config
    keys, values, logits = [], [], []

    def attend(q, k, v):
        keys.extend(k.unbind(0))
        values.extend(v.unbind(0))
        out = []
        for row in range(q.shape[0]):
            last = len(keys) - q.shape[0] + row + 1
            k_all = torch.stack(keys[:last]).repeat_interleave(config.num_heads // config.num_kv_heads, dim=1)
            v_all = torch.stack(values[:last]).repeat_interleave(config.num_heads // config.num_kv_heads, dim=1)
            weights = torch.einsum("hd,thd->ht", q[row], k_all) * config.head_dim**-0.5
            out.append(torch.einsum("ht,thd->hd", weights.softmax(-1), v_all))
        return torch.stack(out)

    tokens = torch.tensor(token_ids[1 : slot + 2])  # slot t embeds x_{t+1}
    states = network(tokens, network.fuse(features[: slot + 1]), torch.arange(slot + 1), attend)
    state = states[-1:]
    logits.append(network.logits(state)[0])
    for step in range(2, num_steps + 1):
        token, position = torch.tensor([chain[step - 2]]), torch.tensor([slot + step - 1])
        state = network(token, network.feedback(state), position, attend)
        logits.append(network.logits(state)[0])
    return torch.stack(logits)


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
def test_every_chain_equals_one_without_a_cache(tiny, tmp_path, switches):
    target = tiny.tiny_target(tmp_path, dtype=torch.float32)
    draft = tiny.tiny_draft(target, slots=(4, 1), **switches)
    prompts, params = tiny.prompts(3), SamplingParams(max_tokens=40, ignore_eos=True)
    plain = Engine(target, EngineConfig(max_context_tokens=128)).generate(prompts, params)
    recordings = {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(plain)}
    # The oracle decides how many are accepted; the draft runs on its own tokens, and its logits are what traces keep.
    oracle = OracleProposer(NUM_STEPS, recordings, target.config.vocab_size, inner=Eagle3Proposer(draft, NUM_STEPS))
    config = EngineConfig(num_steps=NUM_STEPS, max_context_tokens=128, prefill_chunk_tokens=16)
    engine = Engine(target, config, oracle)
    answers = engine.generate(prompts, params, trace=True)
    assert min(engine.stats.acceptance[NUM_STEPS].histogram) > 0
    compared = 0
    plan = CapturePlan(draft.config.slots, target.config.num_layers)
    for answer in answers:
        trace = answer.trace
        features = plan.select(trace.states)
        for r in (r for r in trace.rounds if r.num_valid):
            tokens = draft.to_target(r.draft_logits.max(-1).indices)  # what the draft itself proposed, greedily
            expected = plain_chain(draft, features, trace.token_ids, r.start - 2, r.num_valid, tokens.tolist())
            torch.testing.assert_close(r.draft_logits[: r.num_valid], expected, rtol=1e-4, atol=1e-3)
            compared += r.num_valid
    assert compared > 60


def test_drafts_are_target_ids(tiny, tmp_path):
    target = tiny.tiny_target(tmp_path)
    draft = tiny.tiny_draft(target)
    engine = Engine(target, EngineConfig(num_steps=2, max_context_tokens=128), Eagle3Proposer(draft, 2))
    (answer,) = engine.generate(tiny.prompts(1), SamplingParams(max_tokens=20, ignore_eos=True), trace=True)
    for r in answer.trace.rounds:
        assert r.draft_tokens.tolist() == [3 * i for i in r.draft_logits.max(-1).indices.tolist()]


def test_drafts_take_the_noise_of_the_position_they_are_for(tiny, tmp_path):
    target = tiny.tiny_target(tmp_path)
    draft = tiny.tiny_draft(target)
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=9, ignore_eos=True)
    engine = Engine(target, EngineConfig(num_steps=3, max_context_tokens=128), Eagle3Proposer(draft, 3))
    (answer,) = engine.generate(tiny.prompts(1), params, trace=True)
    target_ids = draft.to_target(torch.arange(draft.config.draft_vocab_size))
    for r in answer.trace.rounds:
        positions = torch.arange(r.start, r.start + 3)[None]  # [1, 3]
        noise = gumbel_noise(torch.tensor([9]), torch.tensor([0]), positions, target_ids)[0]  # [3, Vd]
        expected = target_ids[(r.draft_logits.float() / 0.7 + noise).max(-1).indices]
        assert r.draft_tokens.tolist() == expected.tolist()


def test_a_perfect_draft_is_always_accepted(tiny, tmp_path):
    """The drafts of a proposer that knows the answer are all used: a lost bonus token or a shift would show here."""
    target = tiny.tiny_target(tmp_path)
    (prompt,) = tiny.prompts(1)
    params = SamplingParams(max_tokens=41, ignore_eos=True)
    (plain,) = Engine(target, EngineConfig(max_context_tokens=128)).generate([prompt], params)
    oracle = OracleProposer(4, {"0": prompt + plain.token_ids}, target.config.vocab_size, [1.0] * 4)
    engine = Engine(target, EngineConfig(num_steps=4, max_context_tokens=128), oracle)
    (answer,) = engine.generate([prompt], params)
    assert answer == plain
    assert engine.stats.rounds == 8  # 1 token from prefill, then 8 x 5

"""A tiny Kimi-K2.5 on a card: latent cache, routed experts, captured steps.

Bits are compared with other ways of running it there; with the CPU, which sums in another order, how far both are from
fp32.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.expert_choices import experts_name, record_choices
from slipstream.engine.loader import load_target
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.runner import capture_states
from slipstream.engine.sampling_params import SamplingParams
from slipstream.tasks.parity_findings import ParityPrompt, examine
from slipstream.tasks.parity_target import TargetReference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
KIMI = Path(__file__).parents[1] / "checkpoints" / "kimi.py"
WIDE = {"hidden_size": 128, "q_lora_rank": 64, "kv_lora_rank": 512}  # heads and latents of the published sizes
SIZES = {"max_running_requests": 5, "max_context_tokens": 128, "prefill_chunk_tokens": 32, "device": "cuda"}
ALONE = {**SIZES, "max_running_requests": 1, "graphs": False}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_k=40, top_p=0.95, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(load_test_module, tmp_path_factory):
    return load_test_module(KIMI).synthesise(tmp_path_factory.mktemp("kimi") / "m", library=False, **WIDE).directory


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory, torch.bfloat16, "cuda")


@pytest.fixture(scope="module")
def draft(tiny, directory):
    of_cpu = load_target(directory, torch.bfloat16)
    return tiny.tiny_draft(of_cpu, slots=(0, 2, 4), head_dim=64).to("cuda")


@pytest.fixture(scope="module")
def prompts(tiny):
    return tiny.prompts(7, high=70)


@pytest.fixture(scope="module")
def params():
    return [replace((GREEDY, SAMPLED)[i % 2], max_tokens=8 + 4 * i) for i in range(7)]


@pytest.fixture(scope="module")
def plain(target, prompts, params):
    """Answers without speculation, without graphs, a request at a time."""
    return Engine(target, EngineConfig(**ALONE)).generate(prompts, params)


def oracle(target, plain, num_steps):
    recordings = {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(plain)}
    return OracleProposer(num_steps, recordings, target.config.vocab_size, seed=3)


@pytest.mark.parametrize(("num_steps", "kind"), [(0, ""), (3, "oracle"), (3, "draft"), (7, "oracle")])
def test_tokens_do_not_depend_on_k_graphs_or_neighbours(target, draft, prompts, params, plain, num_steps, kind):
    """Greedy and seeded; nothing is compiled or captured behind the start, prompts of several at once included."""
    proposers = {"oracle": lambda: oracle(target, plain, num_steps), "draft": lambda: Eagle3Proposer(draft, num_steps)}
    for most in (1, 5):
        proposer = proposers[kind]() if kind else None
        engine = Engine(target, EngineConfig(num_steps=num_steps, **{**SIZES, "max_running_requests": most}), proposer)
        engine.start()
        engine.mark_ready()
        assert [a.token_ids for a in engine.generate(prompts, params)] == [a.token_ids for a in plain]
        assert (engine.captures_after_ready, engine.compiles_after_ready) == (0, 0)
        assert engine.scheduler.blocks.num_used == 0
        if kind == "oracle" and most > 1:
            assert min(engine.stats.acceptance[num_steps].histogram) > 0


def observed(target, settings, proposer, prompts, params):
    """(tokens, position -> logits of committed rows, cells) of each prompt, of an engine without graphs."""
    engine = Engine(target, EngineConfig(**{**settings, "graphs": False, "rounds_in_flight": 0}), proposer)
    logits, take, blocks = [{} for _ in prompts], engine.runner.round, {}

    def spy(slots, num_steps):
        result = take(slots, num_steps)
        running = {s.slot: s for s in engine.scheduler.running}
        for b, slot in enumerate(slots.tolist()):
            if slot in running:
                request = int(running[slot].request.request_id)
                blocks[request] = list(running[slot].blocks)
                for i in range(int(result.accepted[b]) + 1):
                    logits[request][int(result.start[b]) - 1 + i] = result.logits[b, i].clone()
        return result

    engine.runner.round = spy
    answers = engine.generate(prompts, params)
    lengths = [len(p) + one.max_tokens - 1 for p, one in zip(prompts, params, strict=True)]  # the last is in no cache
    return (
        [a.token_ids for a in answers],
        logits,
        [engine.runner.cache.read(blocks[i], n) for i, n in enumerate(lengths)],
    )


def test_logits_and_latents_do_not_depend_on_chunks_neighbours_or_k(target, prompts, params, plain):
    """Bit for bit: a request alone at K = 0, and among four with an oracle at K = 3, prompts cut otherwise."""
    few = slice(3, 7)
    alone = [observed(target, ALONE, None, [p], [q]) for p, q in zip(prompts[few], params[few], strict=True)]
    settings = {**SIZES, "num_steps": 3, "prefill_chunk_tokens": 48, "max_running_requests": 4}
    tokens, logits, cells = observed(target, settings, oracle(target, plain[few], 3), prompts[few], params[few])
    for i, (token, logit, cell) in enumerate(alone):
        assert token[0] == tokens[i]
        shared = logit[0].keys() & logits[i].keys()
        assert len(shared) >= len(token[0]) - 2
        assert all(torch.equal(logit[0][p], logits[i][p]) for p in shared)
        assert torch.equal(cell[0], cells[i])
        assert cell[0].any(-1).all()


@pytest.mark.parametrize("num_steps", [0, 3])
def test_slots_draft_logits_and_counts_equal_those_without_graphs(target, draft, prompts, params, num_steps):
    """Bitwise, A, B, A through the same buffers."""
    found = []
    for graphs in (False, True):
        proposer = Eagle3Proposer(draft, num_steps) if num_steps else None
        settings = EngineConfig(num_steps=num_steps, **{**ALONE, "graphs": graphs})
        engine = Engine(target, settings, proposer, capture_slots=(0, 1, 2, 4))
        found.append(([engine.generate([prompts[i]], params[4], trace=True)[0] for i in (0, 1, 0)], engine))
    (eager, one), (replayed, other) = found
    assert one.stats.acceptance == other.stats.acceptance
    for a, b in zip(eager, replayed, strict=True):
        assert a.token_ids == b.token_ids
        assert all(torch.equal(a.trace.states[n], b.trace.states[n]) for n in a.trace.states)
        assert torch.equal(a.trace.teacher, b.trace.teacher)
        for mine, theirs in zip(a.trace.rounds, b.trace.rounds, strict=True):
            if num_steps:
                assert torch.equal(mine.draft_tokens, theirs.draft_tokens)
                assert torch.equal(mine.draft_logits, theirs.draft_logits)
            assert (mine.start, mine.num_valid, mine.accepted) == (theirs.start, theirs.num_valid, theirs.accepted)


def test_states_and_logits_are_as_near_to_fp32_as_those_of_the_cpu(target, directory, tiny):
    """Teacher-forced through prompts: every slot, and logits. A row near a tie of experts may go elsewhere."""
    ids = tiny.prompts(1, seed=2, low=90, high=90)[0]
    slots = tuple(range(5))
    exact = load_target(directory, torch.float32)
    found = {}
    for name, model in {"fp32": exact, "cpu": load_target(directory, torch.bfloat16), "card": target}.items():
        states, last = capture_states(model, ids, slots, prefill_chunk_tokens=32)
        with torch.inference_mode():
            found[name] = {**states, "logits": model.logits(last)}
    for name, right in found["fp32"].items():
        near = {who: float((found[who][name].cpu().float() - right).abs().mean()) for who in ("cpu", "card")}
        print(name, {who: f"{error:.5f}" for who, error in near.items()}, f"of {float(right.abs().mean()):.3f}")
        assert near["card"] <= 1.5 * near["cpu"] + 1e-6, name


def test_decode_gives_the_rows_of_a_prompt(target, prompts):
    """Absorbed a row at a time, against the same positions within one prompt: other kernels, the same numbers."""
    engine = Engine(target, EngineConfig(**ALONE), None, capture_slots=(1, 2, 4))
    (answer,) = engine.generate([prompts[0]], GREEDY, trace=True)
    ids, states = answer.trace.token_ids, answer.trace.states
    whole, _ = capture_states(target, ids, (1, 2, 4), prefill_chunk_tokens=128)
    for name, state in states.items():
        error = (state.cpu().float() - whole[name][: len(state)].cpu().float()).abs().mean()
        assert error <= 0.03 * whole[name].float().abs().mean(), name


def test_prompts_longer_than_a_launch_of_the_router(target, tiny):
    """More rows than the router takes at once, and more pairs than lists that fit in shared memory."""
    ids = tiny.prompts(1, seed=4, low=400, high=400)[0]
    whole, last = capture_states(target, ids, (2, 4), prefill_chunk_tokens=400)
    cut, other = capture_states(target, ids, (2, 4), prefill_chunk_tokens=96)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert torch.equal(last, other)


def test_what_the_kernels_do_not_take_is_refused_before_any_memory(directory, tmp_path, load_test_module):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with pytest.raises(SlipstreamError, match="over float32, on a card"):
        load_target(directory, torch.float32, "cuda")
    dense = load_test_module(KIMI).synthesise(tmp_path / "dense", int4=False, num_hidden_layers=2).directory
    with pytest.raises(SlipstreamError, match="routed experts with plain weights over bfloat16"):
        load_target(dense, torch.bfloat16, "cuda")
    assert torch.cuda.memory_allocated() == before


def test_parity_in_bf16_goes_where_the_card_went(directory, draft, prompts):
    """Through captured steps: the experts that a trace tells are those of its own rows, A, B, A included."""
    served, offline = load_target(directory, torch.bfloat16, "cuda"), load_target(directory, torch.bfloat16)
    record_choices(served)
    slots, params = (0, 2, 4), replace(GREEDY, max_tokens=32)
    made = []
    for graphs in (True, False):
        config = EngineConfig(num_steps=3, **{**SIZES, "graphs": graphs})
        engine = Engine(served, config, Eagle3Proposer(draft, 3), slots)
        engine.start()
        made.append([a.trace for a in engine.generate([prompts[i] for i in (0, 1, 0, 2, 3)], params, trace=True)])
    replayed, eager = made
    for a, b in zip(replayed, eager, strict=True):
        assert {experts_name(layer) for layer in (1, 2, 3)} < set(a.states) == set(b.states)
        assert all(torch.equal(a.states[name], b.states[name]) for name in a.states)
    asked = [ParityPrompt(f"p{i}", "validation", prompts[k], 32) for i, k in enumerate((0, 1, 0, 2, 3))]
    found = examine(asked, replayed, offline, TargetReference(directory), {}, slots, 3)
    print(*found.describe(0.005), sep="\n")
    assert found.failures(max_slot_share=0.1, max_argmax_difference=0.005, max_tau_gap=0.1) == []
    assert found.experts.choices == 3 * found.logits.positions

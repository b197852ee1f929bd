"""A draft with latent attention (MLA) on a card, beside a tiny Kimi: its own cache of latents, within captured rounds.

Bits are compared with other ways of running it there; draft logits with the independent reference on the CPU, by what
rounding alone does to each round, as parity does.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.engine.capture import CapturePlan
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.checkpoint import load_draft, save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.inject import inject
from slipstream.engine.injection import parse_injections
from slipstream.engine.loader import load_target
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.sampling_params import SamplingParams
from slipstream.tasks.parity_draft import SERVER, DraftFindings, compare_drafts, in_fp32

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
KIMI = Path(__file__).parents[1] / "checkpoints" / "kimi.py"
WIDE = {"hidden_size": 128, "q_lora_rank": 64, "kv_lora_rank": 512}  # heads and latents of the published sizes
SIZES = {"max_running_requests": 2, "max_context_tokens": 128, "prefill_chunk_tokens": 32, "device": "cuda"}
ALONE = {**SIZES, "max_running_requests": 1, "graphs": False}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_k=40, top_p=0.95, seed=5, ignore_eos=True)
SLOTS = (0, 2, 4)


@pytest.fixture(scope="module")
def root(tiny, load_test_module, tmp_path_factory):
    """Directories `target` and `draft`."""
    root = tmp_path_factory.mktemp("kimi")
    load_test_module(KIMI).synthesise(root / "target", library=False, **WIDE)
    of_cpu = load_target(root / "target", torch.bfloat16)
    draft = tiny.tiny_draft(of_cpu, slots=SLOTS, latent=True, fc_norm=True, norm_output=True)
    save_draft(root / "draft", draft, DraftRecord(TargetIdentity.from_dir(root / "target"), Family.KIMI_K25, "0" * 64))
    return root


@pytest.fixture(scope="module")
def target(root):
    return load_target(root / "target", torch.bfloat16, "cuda")


@pytest.fixture(scope="module")
def load(root, target):
    """() -> the draft as a server loads it, packed."""

    def load():
        return load_draft(root / "draft", torch.bfloat16, target_embedding=target.embed_tokens.weight).eval()

    return load


@pytest.fixture(scope="module")
def draft(load):
    return load()


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


def oracle(target, plain, num_steps, inner):
    recordings = {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(plain)}
    return OracleProposer(num_steps, recordings, target.config.vocab_size, seed=3, inner=inner)


@pytest.mark.parametrize(("num_steps", "kind"), [(1, "draft"), (3, "draft"), (3, "oracle"), (7, "oracle")])
def test_tokens_do_not_depend_on_k_graphs_or_neighbours(target, draft, prompts, params, plain, num_steps, kind):
    """Greedy and seeded; the oracle runs the draft, too. Nothing is compiled or captured behind the start."""
    for most in (1, 2):
        proposer = Eagle3Proposer(draft, num_steps)
        if kind == "oracle":
            proposer = oracle(target, plain, num_steps, proposer)
        engine = Engine(target, EngineConfig(num_steps=num_steps, **{**SIZES, "max_running_requests": most}), proposer)
        engine.start()
        engine.mark_ready()
        assert [a.token_ids for a in engine.generate(prompts, params)] == [a.token_ids for a in plain]
        assert (engine.captures_after_ready, engine.compiles_after_ready) == (0, 0)
        assert engine.scheduler.blocks.num_used == 0
        if kind == "oracle" and most > 1:
            assert min(engine.stats.acceptance[num_steps].histogram) > 0


def answered(target, draft, prompts, params, plain, settings, faults=()):
    """(traces, the engine) at K = 3; tokens are those without speculation."""
    engine = Engine(target, EngineConfig(num_steps=3, **settings), Eagle3Proposer(draft, 3), SLOTS)
    inject(engine, parse_injections(faults))
    answers = engine.generate(prompts, params, trace=True)
    assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
    return [answer.trace for answer in answers], engine


def test_draft_logits_and_counts_equal_those_without_graphs(target, draft, prompts, params, plain):
    """Bitwise, through the same buffers."""
    eager, one = answered(target, draft, prompts, params, plain, ALONE)
    replayed, other = answered(target, draft, prompts, params, plain, {**ALONE, "graphs": True})
    assert one.stats.acceptance == other.stats.acceptance
    for a, b in zip(eager, replayed, strict=True):
        for mine, theirs in zip(a.rounds, b.rounds, strict=True):
            assert torch.equal(mine.draft_tokens, theirs.draft_tokens)
            assert torch.equal(mine.draft_logits, theirs.draft_logits)
            assert (mine.start, mine.num_valid, mine.accepted) == (theirs.start, theirs.num_valid, theirs.accepted)


def test_draft_logits_and_latents_do_not_depend_on_neighbours(target, draft, prompts, params, plain):
    """Bitwise: alone, and beside another."""
    alone, one = answered(target, draft, prompts, params, plain, ALONE)
    among, many = answered(target, draft, prompts, params, plain, {**SIZES, "graphs": False})
    for a, b in zip(alone, among, strict=True):
        for mine, theirs in zip(a.rounds, b.rounds, strict=True):
            assert torch.equal(mine.draft_logits[: mine.num_valid], theirs.draft_logits[: theirs.num_valid])
    for engine in (one, many):
        assert engine.runner.proposer.cache.layers[0].shape == engine.runner.cache.layers[0].shape
        assert engine.runner.proposer.cache.layers[0].any()


def findings_of(root, traces, target) -> DraftFindings:
    export, findings = load_draft(root / "draft"), DraftFindings(3)
    plan = CapturePlan(SLOTS, target.config.num_layers)
    for trace in traces:
        compare_drafts(findings, trace, {"export": in_fp32(export)}, export, plan.select(trace.states))
    return findings


def test_draft_logits_pass_parity(root, target, draft, prompts, params, plain):
    """Of captured rounds in a batch, against the reference and the exported draft in fp32 on the CPU."""
    traces, _ = answered(target, draft, prompts, params, plain, SIZES)
    findings = findings_of(root, traces, target)
    print([step.describe() for step in findings.errors[SERVER]])
    assert min(step.rounds for step in findings.errors[SERVER]) > 20
    assert findings.verdict(SERVER) == findings.verdict("export") == ""


@pytest.mark.parametrize("kind", ["feedback", "rope", "draft-kv"])
def test_a_draft_that_is_served_wrongly_fails_parity_and_changes_no_token(
    root, target, load, prompts, params, plain, kind
):
    """Put in before the capture, and replayed."""
    traces, _ = answered(target, load(), prompts, params, plain, SIZES, [f"F19:kind={kind}"])
    assert findings_of(root, traces, target).fault == "F19"

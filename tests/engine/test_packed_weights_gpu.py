"""CUDA C++ products in the engine on a card: against Triton, against themselves with other neighbours, in memory."""

import gc

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.loader import load_target
from slipstream.engine.packed_weights import describe, pack_weights, products_for
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.runner import capture_states
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.cuda.pack import PackedWeight
from slipstream.kernels.matrix_products import VARIABLE, matrix_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 509}  # heads of 64
SLOTS = (0, 2, 4)
ENGINE = {"max_context_tokens": 256, "prefill_chunk_tokens": 256, "device": "cuda"}


@pytest.fixture(scope="module")
def targets(tiny, tmp_path_factory):
    """{kernels: the same target, its draft}."""
    if matrix_products("cuda").kernels != "cuda":
        pytest.skip(matrix_products("cuda").reason)
    directory, made = tiny.save_tiny(tmp_path_factory.mktemp("target"), **SIZES), {}
    for kernels in ("cuda", "triton"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, kernels)
            target = load_target(directory, torch.bfloat16, "cuda")
            draft = tiny.tiny_draft(target, slots=SLOTS).to("cuda")
        if kernels == "cuda":
            pack_weights(draft)
        made[kernels] = target, draft
    return made


@pytest.fixture(scope="module")
def prompts(tiny):
    """One is longer than a group of rows."""
    return [*tiny.prompts(3, high=70), *tiny.prompts(1, low=200, high=200)]


def test_the_weights_are_packed(targets, monkeypatch):
    monkeypatch.setenv(VARIABLE, "cuda")
    target, draft = targets["cuda"]
    assert isinstance(target.head_weight, PackedWeight)
    assert isinstance(draft.fc.weight, PackedWeight)
    told = describe(products_for("cuda"), target, draft)
    assert told["kernels"] == "cuda"
    assert told["packed_weights"] == 4 * 4 + 1 + 6 - 1  # 80 features of the draft's down_proj are no multiple of 32
    assert told["other_weights"] == 1
    assert not isinstance(targets["triton"][0].head_weight, PackedWeight)


def test_no_second_copy_stays_but_the_tied_head(tiny, tmp_path, targets, monkeypatch):
    wide = {**SIZES, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096}
    directory, taken = tiny.save_tiny(tmp_path, **wide), {}
    for kernels in ("triton", "cuda"):
        monkeypatch.setenv(VARIABLE, kernels)
        gc.collect()
        before = torch.cuda.memory_allocated()
        target = load_target(directory, torch.bfloat16, "cuda")
        gc.collect()
        taken[kernels] = torch.cuda.memory_allocated() - before
        if kernels == "cuda":
            copies = describe(products_for("cuda"), target)["second_copy_bytes"]
        del target
    assert copies == 4096 * 512 * 2
    assert taken["cuda"] - taken["triton"] <= copies + 2**16  # allocations are rounded up


def proposer_of(kind, draft, plain, num_steps):
    if num_steps == 0:
        return None
    inner = Eagle3Proposer(draft, num_steps)
    if kind == "draft":
        return inner
    return OracleProposer(
        num_steps, {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(plain)}, 509, seed=3, inner=inner
    )


@pytest.mark.parametrize("kind", ["draft", "oracle"])
@pytest.mark.parametrize("batch", [1, 4])
def test_tokens_and_states_do_not_depend_on_k_graphs_or_neighbours(targets, prompts, kind, batch):
    """Tokens, and the bits of every row's states: decoded alone, or verified beside others."""
    target, draft = targets["cuda"]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    config = EngineConfig(max_running_requests=1, graphs=False, **ENGINE)
    plain = Engine(target, config, capture_slots=SLOTS).generate(prompts, params, trace=True)
    for num_steps in (0, 1, 3):
        config = EngineConfig(num_steps=num_steps, max_running_requests=batch, **ENGINE)
        engine = Engine(target, config, proposer_of(kind, draft, plain, num_steps), capture_slots=SLOTS)
        answers = engine.generate(prompts, params, trace=True)
        assert (engine.captures_after_ready, engine.compiles_after_ready) == (0, 0)
        for mine, alone in zip(answers, plain, strict=True):
            assert mine.token_ids == alone.token_ids, num_steps
            rows = min(len(mine.trace.teacher), len(alone.trace.teacher))
            assert torch.equal(mine.trace.teacher[:rows], alone.trace.teacher[:rows])
            for name, states in alone.trace.states.items():
                assert torch.equal(mine.trace.states[name][:rows], states[:rows]), (num_steps, name)


def near(found, expected):
    """A few bf16 roundings apart: a wrong row order, or a norm left out, is off by the whole size."""
    assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 0.02


def test_prompts_and_rounds_are_those_of_triton_but_for_roundings(targets, prompts):
    """Teacher-forced: both read the same tokens and, in the rounds, the same cache."""
    states, heads = {}, {}
    for kernels, (target, _) in targets.items():
        states[kernels] = capture_states(target, prompts[3], SLOTS)
        heads[kernels] = target.logits(states[kernels][1])
    (ours, last), (theirs, their_last) = states["cuda"], states["triton"]
    for name in theirs:
        near(ours[name], theirs[name])
    near(last, their_last)
    near(heads["cuda"], heads["triton"])

    rounds, drafts = {}, {}
    token_ids = torch.tensor(prompts[3][:8], device="cuda").view(2, 4)
    positions = torch.tensor([[0, 1, 2, 3], [20, 21, 22, 23]], device="cuda")
    for kernels, (target, draft) in targets.items():
        kv = target.allocate_kv(9, 16).view(torch.arange(1, 9, device="cuda").view(2, 4))
        with torch.inference_mode():
            rounds[kernels] = target(token_ids, positions, kv, SLOTS)
            features = torch.cat(list(rounds["cuda"].states.values()), dim=-1)
            cache = torch.zeros(9, 16, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
            attend = draft.midlayer.self_attn.paged(cache, kv.rows(positions))
            drafts[kernels] = draft.logits(draft(token_ids, draft.fuse(features), positions, attend))
    near(rounds["cuda"].last, rounds["triton"].last)
    near(drafts["cuda"], drafts["triton"])


def test_dependent_launch_changes_no_bit(targets, prompts, monkeypatch):
    target, draft = targets["cuda"]
    answers = []
    for pdl in ("0", "1"):
        monkeypatch.setenv("SLIPSTREAM_PDL", pdl)
        config = EngineConfig(num_steps=3, max_running_requests=4, **ENGINE)
        engine = Engine(target, config, Eagle3Proposer(draft, 3), capture_slots=SLOTS)
        answers.append(engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True), trace=True))
    for off, on in zip(*answers, strict=True):
        assert off.token_ids == on.token_ids
        assert torch.equal(off.trace.teacher, on.trace.teacher)
        for a, b in zip(off.trace.rounds, on.trace.rounds, strict=True):
            assert torch.equal(a.draft_logits, b.draft_logits)

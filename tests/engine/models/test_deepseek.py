"""Tiny Kimi-K2.5 and DeepSeek-V3 in fp32 against transformers: logits, every slot, greedy tokens, and K."""

from pathlib import Path

import pytest
import torch

from slipstream.engine.capture import slot_name
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine, EngineConfig
from slipstream.engine.loader import load_target
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.runner import capture_states
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.stream import Stream

KIMI = Path(__file__).parents[2] / "checkpoints" / "kimi.py"
BOUND = 1e-4
SLOTS = (0, 1, 2, 3, 4)
TOKENS = 64
YARN_LENGTH = 16
FORMS = {
    "Kimi-K2.5, INT4": {"int4": True, "wrapper": True},
    "DeepSeek-V3, dense, groups, 2 shared": {
        "int4": False,
        "wrapper": False,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
    },
}


class World:
    """A checkpoint, what transformers makes of it, and ours."""

    def __init__(self, kimi, directory, form):
        self.made = kimi.synthesise(directory, **FORMS[form])
        self.target = load_target(directory, torch.float32)

    @torch.no_grad()
    def reference(self, ids):
        """transformers' logits [T, V], the states after 0 .. N layers [T, h] each."""
        states = {}

        def keep(slot):
            return lambda _layer, args: states.__setitem__(slot, args[0][0])

        model = self.made.reference.model
        modules = [*model.layers, model.norm]  # the last state before the final norm goes into that
        hooks = [module.register_forward_pre_hook(keep(slot)) for slot, module in enumerate(modules)]
        logits = self.made.reference(torch.tensor([ids]), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        return logits, states


@pytest.fixture(scope="module", params=FORMS)
def world(request, load_test_module, tmp_path_factory) -> World:
    return World(load_test_module(KIMI), tmp_path_factory.mktemp("kimi"), request.param)


@pytest.fixture(scope="module")
def prompts(tiny):
    return tiny.prompts(4, seed=6, low=YARN_LENGTH + 2, high=48)


@pytest.fixture(scope="module")
def plain(world, prompts):
    """Answers at K = 0, a request at a time."""
    engine = Engine(world.target, config(0, max_running_requests=1))
    return engine.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))


def config(num_steps: int, **sizes) -> EngineConfig:
    sizes = {"max_running_requests": 3, "max_context_tokens": 128, "prefill_chunk_tokens": 16, **sizes}
    return EngineConfig(num_steps=num_steps, **sizes)


def test_logits_and_every_slot(world, prompts):
    """By prefill (un-absorbed), in chunks that cut blocks; positions beyond where YaRN begins to stretch."""
    for ids in prompts:
        expected, states = world.reference(ids)
        captured, last = capture_states(world.target, ids, SLOTS, prefill_chunk_tokens=24)
        with torch.inference_mode():
            worst = {"logits": float((world.target.logits(last) - expected).abs().max())}
        worst |= {slot_name(s): float((captured[slot_name(s)] - states[s]).abs().max()) for s in SLOTS}
        print(len(ids), {name: f"{error:.1e}" for name, error in worst.items()})
        assert max(worst.values()) <= BOUND
        assert states[4].abs().max() > 1


def test_the_bias_changes_who_is_chosen(world, prompts):
    """Otherwise a router that ignores it would pass."""
    router = world.target.layers[3].mlp.gate
    captured, _ = capture_states(world.target, prompts[0], (3,))
    of_router = Stream(captured["slot_3"]), world.target.layers[3].post_attention_layernorm.constants, None
    chosen = router(*of_router).choice.ids.sort(dim=1).values
    bias = router.e_score_correction_bias.data.clone()
    router.e_score_correction_bias.data.zero_()
    unbiased = router(*of_router).choice.ids.sort(dim=1).values
    router.e_score_correction_bias.data.copy_(bias)
    changed = (chosen != unbiased).any(1).float().mean()
    print(f"the bias changes the experts of {changed:.0%} of rows")
    assert changed > 0.3


def test_greedy_tokens_are_those_of_transformers(world, prompts, plain):
    """By absorbed decode. transformers runs the whole text again for every token."""
    for prompt, answer in zip(prompts[:2], plain, strict=False):
        logits, _ = world.reference([*prompt, *answer.token_ids])
        ids = (
            logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        )  # teacher-forced: equal to the end means equal throughout
        assert len(answer.token_ids) == TOKENS
        assert answer.token_ids == ids


def test_decode_logits_and_slots(world, prompts, plain):
    """Absorbed rows, of rounds of K = 3 with some accepted, against transformers."""
    recordings = {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(plain)}
    oracle = OracleProposer(3, recordings, world.target.config.vocab_size, (0.8, 0.6, 0.4), seed=3)
    engine = Engine(world.target, config(3), oracle, SLOTS)
    answers = engine.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True), trace=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        _, states = world.reference(answer.trace.token_ids[: len(answer.trace.states["slot_0"])])
        worst = max(float((answer.trace.states[slot_name(s)] - states[s]).abs().max()) for s in SLOTS)
        assert worst <= BOUND
        assert len(answer.trace.states["slot_0"]) > len(prompt) + TOKENS - 6


def test_tokens_do_not_depend_on_k_draft_or_neighbours(tiny, world, prompts, plain):
    params, num_steps = SamplingParams(max_tokens=TOKENS, ignore_eos=True), 3
    tokens = [answer.token_ids for answer in plain]
    recordings = {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(plain)}
    oracle = OracleProposer(num_steps, recordings, world.target.config.vocab_size, seed=3)
    engine = Engine(world.target, config(num_steps), oracle)
    assert [a.token_ids for a in engine.generate(prompts, params)] == tokens
    assert min(engine.stats.acceptance[num_steps].histogram) > 0
    draft = tiny.tiny_draft(world.target, slots=(0, 2, 4))
    engine = Engine(world.target, config(num_steps), Eagle3Proposer(draft, num_steps))
    assert [a.token_ids for a in engine.generate(prompts, params)] == tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_cache_do_not_depend_on_chunks_neighbours_or_k(world, prompts, dtype):
    """Bit for bit: a request alone at K = 0, and in a batch of all with an oracle at K = 3."""
    target = world.target if dtype is torch.float32 else load_target(world.made.directory, dtype)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = [_observed(target, config(0, max_running_requests=1), None, [prompt], params) for prompt in prompts]
    recordings = {str(i): prompts[i] + alone[i][0][0] for i in range(len(prompts))}
    oracle = OracleProposer(3, recordings, target.config.vocab_size, seed=3)
    sizes = {"max_running_requests": 4, "prefill_chunk_tokens": 48}
    tokens, logits, cells = _observed(target, config(3, **sizes), oracle, prompts, params)
    for i, (token, logit, cell) in enumerate(alone):
        assert token[0] == tokens[i]
        assert logit[0].keys() <= logits[i].keys() | {max(logit[0])}
        assert all(torch.equal(logit[0][p], logits[i][p]) for p in logit[0] if p in logits[i])
        assert torch.equal(cell[0], cells[i])


def _observed(target, settings, oracle, prompts, params):
    """(tokens, position -> logits of committed rows, cells before the end) of each prompt."""
    engine = Engine(target, settings, oracle)
    logits, take, blocks = [{} for _ in prompts], engine.runner.round, {}

    def spy(slots, num_steps):
        result = take(slots, num_steps)
        ids = {s.slot: int(s.request.request_id) for s in engine.scheduler.running}
        for b, slot in enumerate(slots.tolist()):
            if slot in ids:
                blocks[ids[slot]] = list(next(s.blocks for s in engine.scheduler.running if s.slot == slot))
                for i in range(int(result.accepted[b]) + 1):
                    logits[ids[slot]][int(result.start[b]) - 1 + i] = result.logits[b, i].clone()
        return result

    engine.runner.round = spy
    answers = engine.generate(prompts, params)
    lengths = [len(prompt) + params.max_tokens - 1 for prompt in prompts]  # the last token is never in the cache
    cells = [engine.runner.cache.read(blocks[i], n) for i, n in enumerate(lengths)]
    return [a.token_ids for a in answers], logits, cells

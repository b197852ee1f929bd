"""Parity of a target with routed experts in bf16: near ties go either way, everything else is found.

Each fault is in the server's copy of the target, most in the one that parity compares with offline, too: our own code
is wrong then, and only transformers can say.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.expert_choices import experts_name, record_choices, routers
from slipstream.engine.inject import inject
from slipstream.engine.injection import parse_injections
from slipstream.engine.loader import load_target
from slipstream.engine.sampling_params import SamplingParams
from slipstream.tasks import parity_experts
from slipstream.tasks.parity_experts import SCORES_OF_A_TIE, ExpertFindings, ReferenceChoices, Routed, choice_gaps
from slipstream.tasks.parity_findings import ParityPrompt, examine
from slipstream.tasks.parity_target import TargetReference

KIMI = Path(__file__).parents[1] / "checkpoints" / "kimi.py"
SLOTS, K = (1, 2, 3), 3
BOUNDS = {"max_slot_share": 0.1, "max_argmax_difference": 0.005, "max_tau_gap": 0.1}  # a deployment's own


class World:
    """Tiny Kimi in bf16, a draft for it, and what parity holds against them."""

    def __init__(self, tiny, directory):
        self.directory = directory
        self.target = self.load()
        self.draft = tiny.tiny_draft(self.target, slots=SLOTS)
        self.reference = TargetReference(directory)
        generator = torch.Generator().manual_seed(5)
        texts = [torch.randint(3, 199, (6 + i,), generator=generator).tolist() for i in range(8)]
        self.prompts = [ParityPrompt(f"p{i}", "validation", ids, 40) for i, ids in enumerate(texts)]
        self.traces = self.serve(self.target)

    def load(self, dtype=torch.bfloat16):
        return load_target(self.directory, dtype)

    def serve(self, target, *faults, num_steps=K):
        record_choices(target)
        dtype = target.norm.weight.dtype
        config = EngineConfig(num_steps=num_steps, max_context_tokens=64, dtype=str(dtype).removeprefix("torch."))
        proposer = Eagle3Proposer(copy.deepcopy(self.draft).to(dtype), K) if num_steps else None
        engine = Engine(target, config, proposer, SLOTS)
        inject(engine, parse_injections(faults))
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        made = engine.generate([p.token_ids for p in self.prompts], params, trace=True)
        return [completion.trace for completion in made]

    def examine(self, traces, target=None, drafts=False):
        networks = {"export": self.draft, "trainer": self.draft} if drafts else {}
        return examine(self.prompts, traces, target or self.target, self.reference, networks, SLOTS, K)

    def broken(self, fault: Callable[..., None]):
        """Findings where server and offline target have the fault."""
        target = self.load()
        fault(target)
        return self.examine(self.serve(target, num_steps=0), target)


@pytest.fixture(scope="module")
def world(tiny, load_test_module, tmp_path_factory):
    return World(tiny, load_test_module(KIMI).synthesise(tmp_path_factory.mktemp("kimi") / "model").directory)


@pytest.fixture(scope="module")
def clean(world):
    return world.examine(world.traces, drafts=True)


def test_right_wiring_passes_though_experts_flip(clean):
    assert clean.failures(**BOUNDS) == []
    found = clean.experts
    assert found.choices == 3 * clean.logits.positions  # three layers with experts
    assert 0 < found.differ < found.allowed < 0.1 * found.choices
    assert 0 < found.own_differ <= found.allowed_own
    assert min(found.self_differ, found.reference_differ) > 0
    assert 0 < found.largest_gap <= SCORES_OF_A_TIE
    assert max(s.share for s in clean.slots) < 0.06
    assert all(rows.wrong == 0 for rows in clean.capture.slots.values())
    assert clean.acceptance["validation"].differing_rounds == 0
    (line,) = [line for line in clean.describe(0.005) if line.startswith("experts: ")]
    assert f"{found.differ} of {found.choices} choices (rows x layers) are not those of transformers" in line
    assert clean.capture.describe_tokens().endswith("run as a prompt: latent attention rounds otherwise there")
    assert clean.to_dict()["experts"]["own_differ"] == found.own_differ


def test_without_following_the_same_server_would_fail(world, monkeypatch):
    """What the bound is for: rows that went elsewhere are far off, and so are those behind them."""
    follow = parity_experts.FollowedRouters.follow
    monkeypatch.setattr(parity_experts.FollowedRouters, "follow", lambda self, _choices: follow(self, {}))
    assert any(f.startswith("slot 4: error") for f in world.examine(world.traces).failures(**BOUNDS))


def without_bias(target):
    routers(target)[2].e_score_correction_bias.data.zero_()


def with_one_bias_a_tenth_off(target):
    routers(target)[3].e_score_correction_bias.data[4] += 0.1


def with_one_expert_less(target):
    router = routers(target)[2]
    router.routing = replace(router.routing, per_token=7)


CHOICES = [
    (without_bias, "layer 2, p0"),
    (with_one_bias_a_tenth_off, "layer 3, p"),
    (with_one_expert_less, None),
]


@pytest.mark.parametrize(("fault", "where"), CHOICES)
def test_a_wrong_choice_is_found_and_passes_with_the_check_off(world, fault, where):
    found = world.broken(fault)
    failures = found.failures(**BOUNDS)
    assert all(f.startswith("experts: ") for f in failures)
    assert "were to be expected" in failures[-1]
    if where is not None:
        assert "choices are none of near equals: scores would have to move" in failures[0]
        assert found.experts.where[0].startswith(where)
    assert found.failures(**BOUNDS, skip={"experts"}) == []


def test_a_routers_wrong_weight_is_found_in_the_choices_and_in_the_states(world):
    def with_two_experts_rows_exchanged(target):
        weight = routers(target)[1].weight.data
        weight[[3, 9]] = weight[[9, 3]]

    found = world.broken(with_two_experts_rows_exchanged)
    assert found.experts.where[0].startswith("layer 1, p0")
    assert any(f.startswith("slot 2") for f in found.failures(**BOUNDS, skip={"experts"}))


def with_another_scaling(target):
    router = routers(target)[2]
    router.routing = replace(router.routing, scaling=2.5)


def without_normalising(target):
    router = routers(target)[2]
    router.routing = replace(router.routing, normalise=False)


@pytest.mark.parametrize("fault", [with_another_scaling, without_normalising])
def test_wrong_weights_of_right_choices_are_found_in_the_states(world, fault):
    """Transformers follows the choice and not the weights."""
    found = world.broken(fault)
    assert found.failures(**BOUNDS, skip={"experts"})
    assert found.failures(**BOUNDS, skip={"experts", "slots", "logits"}) == []


FAULTS = [
    ("F3", "slot 1", "nearest to state 2"),
    ("F5:slot=3,kind=no-residual", "slot 3", ""),
    ("F6:slot=2", "slot 2", "of rounds"),
]


@pytest.mark.parametrize(("fault", "slot", "words"), FAULTS)
def test_a_wrong_capture_is_found_as_on_a_dense_target(world, fault, slot, words):
    """F3, F5 and F6 leave the choices alone: not one more is counted."""
    found = world.examine(world.serve(world.load(), fault, num_steps=0))
    failures = found.failures(**BOUNDS)
    assert failures[0].startswith(slot)
    assert words in failures[0]
    assert not any(f.startswith("experts") for f in failures)
    assert found.failures(**BOUNDS, skip={"slots"}) == []


def test_states_of_other_slots_under_the_names_of_these_are_found(world):
    """F2: the server captures one layer later than it says."""
    moved = {"slot_1": "slot_2", "slot_2": "slot_3"}
    traces = [replace(t, states={**t.states, **{a: t.states[b] for a, b in moved.items()}}) for t in world.traces]
    found = world.examine(traces)
    assert "slot 1 of the server is nearest to state 2" in found.failures(**BOUNDS)[0]
    assert found.failures(**BOUNDS, skip={"slots"}) == []


def test_fp32_has_no_flips_to_excuse(world):
    target = world.load(torch.float32)
    found = world.examine(world.serve(target, num_steps=0), target)
    assert found.failures(**BOUNDS) == []
    assert (found.experts.own_differ, found.experts.differ, found.experts.self_differ) == (0, 0, 0)
    assert found.experts.allowed == 2


def test_a_trace_that_does_not_say_whom_rows_went_to_is_refused(world):
    name = experts_name(2)
    traces = [replace(t, states={n: s for n, s in t.states.items() if n != name}) for t in world.traces]
    with pytest.raises(SlipstreamError, match=r"the trace of p0 has experts of 2 layers"):
        world.examine(traces)


# ---- how near a choice was -------------------------------------------------------------------------------------------


def chosen_by(scores, per_token, groups=1, kept=1):
    """The rule, row by row: [n, E] -> [n, E] bool."""
    rows = torch.zeros_like(scores, dtype=torch.bool)
    for row, values in enumerate(scores.tolist()):
        size = len(values) // groups
        parts = [sorted(values[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: sum(parts[g][:2]), reverse=True)[:kept]
        allowed = [e for g in best for e in range(g * size, (g + 1) * size)]
        rows[row, sorted(allowed, key=values.__getitem__, reverse=True)[:per_token]] = True
    return rows


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (8, 4)])
def test_scores_that_moved_by_so_much_explain_a_gap_of_twice_that(groups, kept):
    """The bound is never too narrow: whatever moves each score by at most d leaves a gap of at most 2 d."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(400, 32, generator=generator)
    for d in (0.002, 0.02, 0.2):
        moved = scores + d * (2 * torch.rand(scores.shape, generator=generator) - 1)
        chosen = chosen_by(moved, 6, groups, kept)
        right = chosen_by(scores, 6, groups, kept)
        gaps = choice_gaps(scores, chosen, groups, kept)
        assert (gaps <= 2 * d + 1e-6).all()
        assert (gaps[(chosen == right).all(1)] == 0).all()
        assert (gaps[(chosen != right).any(1)] > 0).all()
        assert (chosen != right).any()


def test_the_gap_of_one_group_by_hand():
    scores = torch.tensor([[0.9, 0.5, 0.4, 0.1]])
    chosen = torch.tensor([[True, False, True, False]])
    torch.testing.assert_close(choice_gaps(scores, chosen), torch.tensor([0.1]))
    worst = torch.tensor([[False, False, True, True]])
    torch.testing.assert_close(choice_gaps(scores, worst), torch.tensor([0.8]))


def routed(scores, per_token=2):
    return Routed(scores, scores.topk(per_token).indices)


def test_more_flips_than_the_reference_has_are_too_many_however_near_they_are():
    """Pairs of experts 0.001 apart, all chosen the other way; transformers' own bf16 moves scores by 0.01."""
    exact = torch.tensor([[0.9, 0.501, 0.5, 0.1]]).repeat(40, 1)
    bf16 = exact + torch.tensor([0.0, 0.0, 0.0, 0.01])
    eager = bf16.clone()
    eager[:4, 2] += 0.01
    bf16_other = bf16.clone()
    bf16_other[:4, 2] += 0.01
    reference = ReferenceChoices({1: routed(exact)}, {1: routed(bf16_other)}, {1: routed(bf16)})
    ours = torch.tensor([[0, 1]]).repeat(40, 1)
    near = ExpertFindings()
    near.add("p", {1: ours}, reference, in_bf16=True)
    assert (near.differ, near.self_differ, near.reference_differ, near.own_differ) == (4, 4, 4, 0)
    assert near.failures() == []
    ours[:20, 1] = 2
    many = ExpertFindings()
    many.add("p", {1: ours}, reference, in_bf16=True)
    assert (many.own_differ, many.beyond_tie) == (20, 0)
    (failure,) = many.failures()
    assert "20 not those of its fp32" in failure
    assert "at most 8 and" in failure

"""Parity's comparisons on a tiny random target and draft: right wiring passes, each wrong wiring is named."""

import copy
from dataclasses import replace

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.loader import load_target
from slipstream.engine.sampling_params import SamplingParams
from slipstream.tasks.parity_findings import ParityPrompt, examine
from slipstream.tasks.parity_target import SlotFinding, TargetReference, reference_device

SLOTS = (1, 2, 3)
K = 3
PROMPTS = [[5, 9, 17, 3, 44, 60], [7, 7, 21, 90, 11], [100, 4, 8, 15, 16, 23, 42], [3, 1, 4, 1, 5, 9, 2, 6]]
BOUNDS = {"max_slot_share": 0.1, "max_argmax_difference": 0.05, "max_tau_gap": 0.1}


class World:
    """A served draft, its traces, and everything that parity holds against them."""

    def __init__(self, tiny, directory):
        self.directory = directory
        self.target = tiny.tiny_target(directory)
        self.draft = tiny.tiny_draft(self.target, slots=SLOTS)
        self.reference = TargetReference(directory)
        self.prompts = [ParityPrompt(f"p{i}", "validation", ids, 24) for i, ids in enumerate(PROMPTS)]
        self.traces = self.serve(self.draft)

    def serve(self, draft):
        config = EngineConfig(num_steps=K, max_context_tokens=64)
        engine = Engine(self.target, config, Eagle3Proposer(draft, K), capture_slots=SLOTS)
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        return [c.trace for c in engine.generate([p.token_ids for p in self.prompts], params, trace=True)]

    def failures(self, traces=None, skip=(), networks=None):
        networks = networks or {"export": self.draft, "trainer": self.draft}
        found = examine(self.prompts, traces or self.traces, self.target, self.reference, networks, SLOTS, K)
        return found.failures(**BOUNDS, skip=skip)


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory):
    return World(tiny, tmp_path_factory.mktemp("target"))


def with_states(traces, change):
    return [replace(t, states=change(dict(t.states))) for t in traces]


def test_right_wiring_passes(world):
    assert world.failures() == []


def test_every_step_of_every_implementation_was_compared(world):
    networks = {"export": world.draft, "trainer": world.draft}
    found = examine(world.prompts, world.traces, world.target, world.reference, networks, SLOTS, K)
    assert sorted(found.drafts.errors) == ["export", "rounding alone", "server", "trainer"]
    assert all(errors[0].rounds > 20 for errors in found.drafts.errors.values())
    assert found.acceptance["validation"].rounds > 20
    assert found.acceptance["validation"].differing_rounds == 0
    assert {s.slot for s in found.slots} == {*SLOTS, world.target.config.num_layers}


def test_transformers_runs_on_the_card_where_it_fits(world, monkeypatch):
    directory = world.directory
    assert reference_device(directory, "cpu")[0] == "cpu"
    free = {"bytes": 1 << 40}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free["bytes"], 1 << 41))
    assert reference_device(directory, "cuda")[0] == "cuda"
    free["bytes"] = 1 << 30
    device, told = reference_device(directory, "cuda")
    assert device == "cpu"
    assert "GB are free on cuda, so it runs on the CPU" in told


def test_permuted_slots_are_named_f3(world):
    swapped = with_states(world.traces, lambda s: s | {"slot_1": s["slot_2"], "slot_2": s["slot_1"]})
    failures = world.failures(swapped, skip={"drafts", "acceptance"})
    assert "slot 1 of the server is nearest to state 2" in failures[0]
    assert world.failures(swapped, skip={"slots", "drafts", "acceptance"}) == []


def test_a_state_taken_before_the_residual_was_added_is_caught(world):
    def without_residual(states):
        return states | {"slot_2": states["slot_2"] - states["slot_1"]}

    failures = world.failures(with_states(world.traces, without_residual), skip={"drafts", "acceptance"})
    assert any(f.startswith("slot 2") for f in failures)


def test_a_teacher_after_the_final_norm_is_caught(world):
    normed = [replace(t, teacher=world.target.final_norm(t.teacher)) for t in world.traces]
    failures = world.failures(normed, skip={"drafts", "acceptance"})
    assert any("slot 4" in f for f in failures)
    assert any("final norm, head or sampling" in f for f in failures)


def with_another_scale(target):
    for layer in target.layers:
        layer.self_attn.scale *= 0.8


def without_a_layer(target):
    target.layers[2].forward = lambda stream, *_: stream


@pytest.mark.parametrize("fault", [with_another_scale, without_a_layer])
def test_another_target_than_that_of_transformers_is_caught(world, fault):
    """Our own code is wrong, in the server and offline alike: only the independent reference can say."""
    wrong = copy.copy(world)
    wrong.target = load_target(world.directory, torch.bfloat16)
    fault(wrong.target)
    wrong.traces = wrong.serve(wrong.draft)
    failures = wrong.failures(skip={"slots"})
    assert "beyond the bound of" in failures[0]
    assert any("is not that of transformers in fp32" in f for f in failures)
    assert wrong.failures(skip={"slots", "logits"}) == []  # unnoticed
    assert any(f.startswith("slot 4") for f in wrong.failures(skip={"logits"}))


def test_parity_says_what_was_asked_and_what_transformers_itself_reaches(world):
    networks = {"export": world.draft, "trainer": world.draft}
    found = examine(world.prompts, world.traces, world.target, world.reference, networks, SLOTS, K)
    (line,) = [line for line in found.describe(0.005) if "asked at most" in line]
    share = found.logits.self_differ / found.logits.positions
    assert f"transformers differs from itself at {share:.2%} (eager attention for sdpa)" in line
    told = found.to_dict()["logits"]
    assert {"self_differ", "reference_differ", "independent", "positions"} <= set(told)  # what the gate reads


def test_a_draft_fed_with_permuted_features_is_wrong_at_the_first_step(world):
    served = copy.deepcopy(world.draft)
    first, second, third = served.fc.weight.chunk(3, dim=1)
    with torch.no_grad():  # the same as wiring the slots (2, 1, 3): tokens stay right, only the drafts suffer
        served.fc.weight.copy_(torch.cat([second, first, third], 1))
    traces = world.serve(served)
    assert [t.token_ids for t in traces] == [t.token_ids for t in world.traces]
    failures = world.failures(traces, skip={"acceptance"})
    assert any(f.startswith("server: the first step is wrong") for f in failures)
    assert world.failures(traces, skip={"drafts", "acceptance"}) == []


def test_later_steps_wrong_are_told_from_the_first(world):
    from slipstream.engine.drafts.eagle3.network import Eagle3Network

    class PostNorm(Eagle3Network):
        def feedback(self, state):
            return self.norm(state)

    served = copy.deepcopy(world.draft)
    served.__class__ = PostNorm
    failures = world.failures(world.serve(served), skip={"acceptance"})
    assert any(f.startswith("server: the first step is right, later steps are wrong") for f in failures)


def test_acceptance_that_differs_names_the_first_round(world):
    target_length = len(world.traces[0].rounds)
    assert target_length > 2
    bent = [
        replace(t, rounds=[replace(r, accepted=min(r.accepted + 1, r.num_valid)) for r in t.rounds])
        for t in world.traces
    ]
    failures = world.failures(bent, skip={"drafts"})
    assert any("p0, round 0" in f and "offline accepts" in f for f in failures)


def test_beside_a_small_state_a_share_of_the_next_is_no_bound():
    """An embedding is far smaller than the states behind it: lost altogether, it is still a twentieth of the next."""
    slot = SlotFinding(slot=0, nearest=0, error=1.05, second=1, second_error=19.4)
    assert slot.share < 0.1
    assert not slot.agrees(0.1)
    assert "error 1.0500 of its own size (expected at most 0.25), 5.4% of that to slot 1" in slot.describe()


def test_one_stale_row_is_found(world):
    """An average over all rows does not see it."""
    stale = world.traces[1].states["slot_2"].clone()
    stale[12] = stale[11]
    traces = [world.traces[0], replace(world.traces[1], states={**world.traces[1].states, "slot_2": stale})]
    traces += world.traces[2:]
    (failure,) = world.failures(traces, skip={"drafts", "acceptance"})
    assert failure.startswith("slot 2 equals an earlier capture, of other rows (1 of 1 wrong rows; position 12 of p1")
    assert "wrong in 0 of 26 rows of prompts and 1 of" in failure
    found = examine(world.prompts, traces, world.target, world.reference, {}, SLOTS, K)
    assert all(s.agrees(0.1) for s in found.slots)


def test_tokens_of_plain_decoding_may_come_from_the_server(world):
    plain = [t.target_argmax.clone() for t in world.traces]
    found = examine(world.prompts, world.traces, world.target, world.reference, {}, SLOTS, K, plain=plain)
    assert found.capture.tokens_differ == 0 < found.capture.tokens
    plain[0][-1] += 1
    found = examine(world.prompts, world.traces, world.target, world.reference, {}, SLOTS, K, plain=plain)
    assert (
        found.capture.describe_tokens() == f"tokens: 1 of {found.capture.tokens} differ from K = 0 on the same context"
    )

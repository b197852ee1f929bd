"""Which draft logits of the server are right: every round is held against what rounding alone does to that round."""

import math
from dataclasses import replace

import pytest
import torch

from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.trace import RequestTrace, RoundTrace
from slipstream.tasks import parity_draft, parity_rounding
from slipstream.tasks.parity_draft import (
    ACCEPTED,
    FIRST,
    MAX_ERROR_FP32,
    MAX_ERROR_SERVED,
    REJECTED,
    SERVER,
    DraftFindings,
    RoundError,
    StepErrors,
    compare_drafts,
    in_fp32,
    kinds_of,
)
from slipstream.tasks.parity_rounding import moved_by_a_last_place, relative_errors, unrolled_logits

WIDTH, IDS, ROUNDS = 32, 24, 12
CONFIG = Eagle3Config(
    hidden_size=WIDTH,
    intermediate_size=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=WIDTH // 2,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position=64,
    vocab_size=IDS,
    draft_vocab_size=IDS,
    target_hidden_size=WIDTH,
    slots=(1, 2),
    target_num_layers=2,
    fc_norm=False,
)


def touchy_draft(left: float) -> Eagle3Network:
    """In bf16; of slot 1's state a, `left` is what its layer leaves: a plus attention's -(1 - left) a, so that
    rounding of 2^-9 of a is about 2^-9 / left of the state. With one key attention is that key's value."""
    network = Eagle3Network(CONFIG, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    one = torch.eye(WIDTH)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_() if parameter.dim() > 1 else parameter.fill_(1)
        network.fc.weight[:, :WIDTH] = one
        network.midlayer.self_attn.qkv_proj.weight[2 * WIDTH :, WIDTH:] = one  # v of the normed feature
        network.midlayer.self_attn.o_proj.weight.copy_((left - 1) * one)
        network.lm_head.weight.copy_(torch.randn(IDS, WIDTH, generator=generator))
    return network.eval().requires_grad_(False)


def unit_features(seed: int) -> torch.Tensor:
    """[2, F] bf16 of two positions: two slots, each near a root mean square of 1."""
    parts = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    parts = parts / parts.square().mean(-1, keepdim=True).sqrt()
    return parts.view(2, -1).bfloat16()  # [4, h] -> [2, 2h]


def rounded_otherwise(network: Eagle3Network, seed: int) -> Eagle3Network:
    """The network in fp32 with each weight off by up to half a last place of bf16: nothing of a bf16 kernel in it."""
    generator = torch.Generator().manual_seed(seed)
    other = in_fp32(network)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter *= 1 + 2**-9 * (2 * torch.rand(parameter.shape, generator=generator) - 1)
    return other


def served_by(network: Eagle3Network, features: torch.Tensor, first: int = 1) -> RequestTrace:
    """One round of K = 1 behind two tokens."""
    with torch.no_grad():
        logits = unrolled_logits(network, torch.tensor([first, 2, 3]), features, 1)[:, 0]  # [1, 1, Vd] -> [1, Vd]
    drafted = RoundTrace(2, logits.argmax(-1), logits.bfloat16(), num_valid=1, accepted=0)
    return RequestTrace([first, 2, 3], {}, torch.empty(0), torch.empty(0), [drafted])


def compared(left: float, wrong: bool = False) -> StepErrors:
    """Rounds of a server that rounds otherwise than the exported network; wrong: it reads slot 2 in slot 1's place."""
    draft = touchy_draft(left)
    findings = DraftFindings(1)
    for seed in range(ROUNDS):
        features = unit_features(seed)
        read = features.roll(WIDTH, -1) if wrong else features
        trace = served_by(rounded_otherwise(draft, seed), read.float(), first=seed)
        compare_drafts(findings, trace, {"export": in_fp32(draft)}, draft, features)
    assert not findings.wrong("export")
    return findings.errors[SERVER][0]


def test_a_round_that_magnifies_rounding_is_no_fault():
    found = compared(left=1 / 32)
    assert found.rounds == ROUNDS
    assert sum(r.error > MAX_ERROR_SERVED for r in found.found) > 6  # this much is wrong where rounding is not asked
    assert not found.wrong


def test_a_fault_is_beyond_what_rounding_does_to_the_same_rounds():
    found = compared(left=1 / 32, wrong=True)
    assert len(found.wrong) == ROUNDS
    assert all(r.error > 1 for r in found.found)


def test_a_right_round_is_not_asked_further(monkeypatch):
    monkeypatch.setattr(parity_draft, "rounding_errors", None)
    found = compared(left=1 / 2)
    assert {r.bound for r in found.found} == {MAX_ERROR_SERVED}


def test_where_rounding_is_all_a_warning_says_that_little_is_proven():
    hidden, seen = (DraftFindings(1, {SERVER: [compared(left)]}) for left in (1 / 512, 1 / 2))
    (warning,) = hidden.warnings()
    assert "k = 1: 12 of 12 rounds magnify the rounding of server" in warning
    assert seen.warnings() == []


# ---- one wrong round among many --------------------------------------------------------------------------------------


def findings_of(*rounds: RoundError) -> DraftFindings:
    return DraftFindings(2, {SERVER: [StepErrors(list(rounds)), StepErrors([replace(rounds[0], error=0.01)])]})


RIGHT = [RoundError(0.01, MAX_ERROR_SERVED, FIRST if not i % 10 else REJECTED, i, False, context=i) for i in range(100)]
WRONG = [RoundError(0.3 - i / 10, 0.06, ACCEPTED, 77 + i, True, context=77 + i) for i in range(2)]


def test_two_wrong_rounds_of_a_hundred_are_found_and_described():
    """They are 0.04 of the root mean square over all rounds, and nothing of the one in the middle."""
    findings = findings_of(*RIGHT, *WRONG)
    assert findings.wrong(SERVER) == [1]
    assert findings.verdict(SERVER).startswith(
        "server: the first round of each request is right (error 0.0100), the first step of later rounds is wrong "
        "(k=1: 0.010 in the middle, 2 of 102 rounds beyond rounding (the first of a request: 0 of 10, after a "
        "rejection: 0 of 90, after a chain accepted whole: 2 of 2), worst 0.300 at position 77, expected at most 0.060)"
    )
    assert findings_of(*RIGHT).verdict(SERVER) == ""


def test_one_wrong_round_alone_is_a_warning_however_often_it_was_run():
    again = replace(WRONG[0], kind=REJECTED)
    findings = DraftFindings(2, {SERVER: [StepErrors([*RIGHT, WRONG[0], again]), StepErrors([WRONG[0]])]})
    assert findings.wrong(SERVER) == []
    assert findings.verdict(SERVER) == findings.fault == ""
    first, second = findings.warnings()
    assert first.startswith("draft logits at k = 1: 0.010 in the middle, 2 of 102 rounds beyond rounding")
    assert second.startswith("draft logits at k = 2: 0.300 in the middle, 1 of 1 rounds beyond rounding")


def test_wrong_first_rounds_are_a_wrong_first_step():
    first = [replace(r, kind=FIRST) for r in WRONG]
    assert findings_of(*RIGHT, *first).verdict(SERVER).startswith("server: the first step is wrong (k=1: ")


def test_no_number_is_wrong():
    assert findings_of(*RIGHT, *(replace(r, error=math.nan) for r in WRONG)).wrong(SERVER) == [1]


def test_the_trainer_is_allowed_no_rounding():
    draft = touchy_draft(1 / 32)
    findings = DraftFindings(1)
    trained = rounded_otherwise(draft, 1)
    features = unit_features(0)
    networks = {"export": in_fp32(draft), "trainer": trained}
    compare_drafts(findings, served_by(in_fp32(draft), features.float()), networks, draft, features)
    assert findings.wrong("trainer") == [1]
    assert findings.errors["trainer"][0].worst.bound == MAX_ERROR_FP32
    assert findings.wrong("export") == []
    assert findings.wrong(parity_draft.ROUNDING) == []


def test_kinds_follow_from_the_round_before():
    def accepted(count):
        return RoundTrace(2, torch.zeros(3), None, num_valid=3, accepted=count)

    assert kinds_of([accepted(3), accepted(0), accepted(2), accepted(3)]) == [FIRST, ACCEPTED, REJECTED, REJECTED]
    assert kinds_of([]) == []


# ---- rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_move_by_a_last_place_at_most_and_zeros_stay(dtype):
    x = torch.randn(4, 500, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:, ::10] = 0
    moved = moved_by_a_last_place(x, torch.Generator().manual_seed(2))
    assert moved.dtype == dtype
    assert (moved[:, ::10] == 0).all()
    size = x.abs().float()
    away = (moved.float() - x.float()).abs()
    assert (away <= torch.finfo(dtype).eps * size).all()
    assert 0.4 < (away[size > 0] > 0).float().mean() < 0.6
    assert not torch.equal(moved, moved_by_a_last_place(x, torch.Generator().manual_seed(3)))


def test_logits_of_some_slots_are_those_of_all():
    draft = in_fp32(touchy_draft(1 / 2))
    tokens, features = torch.arange(9), torch.cat([unit_features(i) for i in range(4)]).float()
    slots = torch.tensor([6, 0, 3])
    whole = unrolled_logits(draft, tokens, features, 2)  # [2, 8, Vd]
    assert whole.shape == (2, 8, IDS)
    torch.testing.assert_close(unrolled_logits(draft, tokens, features, 2, slots), whole[:, slots])


def test_errors_are_shares_of_the_spread():
    reference = torch.tensor([[1.0, 3.0, 5.0]])
    assert relative_errors(reference + 7, reference) > 1  # a constant is an error, and no part of the spread
    assert relative_errors(reference * 1.0, reference) == 0
    assert relative_errors(torch.full((1, 3), 3.0), reference) == 1


def test_samples_differ():
    draft, features = touchy_draft(1 / 32), unit_features(0)
    tokens, slots = torch.tensor([1, 2, 3]), torch.tensor([0])
    reference = unrolled_logits(in_fp32(draft), tokens, features.float(), 1, slots)
    found = parity_rounding.rounding_errors(draft, tokens, features, slots, reference)
    assert found.shape == (parity_rounding.SAMPLES, 1, 1)
    assert len(set(found.flatten().tolist())) > parity_rounding.SAMPLES / 2

"""Counts while serving, the replay of held-out run lengths, and the comparison of the two."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.acceptance import (
    AcceptanceCounts,
    ConversationRuns,
    JointAcceptance,
    compare,
    round_kind,
    run_lengths_to_tau,
    usable_steps,
)


def run_lengths(hits: list[bool], most: int) -> list[int]:
    """L_t of every slot, when a draft for slot t is right where `hits[t]`."""
    lengths, run = [], 0
    for hit in reversed(hits):
        run = min(run + 1, most) if hit else 0
        lengths.append(run)
    return lengths[::-1]


def counts_of(num_steps: int, *accepted: int) -> AcceptanceCounts:
    counts = AcceptanceCounts(num_steps)
    for a in accepted:
        counts.add(a)
    return counts


def served(lengths: list[int], num_steps: int, ended_by_limit: bool) -> AcceptanceCounts:
    """A server in miniature: it commits token by token and learns of the end only when the last one is committed."""
    answer = len(lengths)  # tokens behind the first; the token at index i is predicted at slot i
    counts = AcceptanceCounts(num_steps)
    committed = 0
    while committed < answer:
        proposed = num_steps
        if ended_by_limit:  # the limit is known beforehand, a stop token is not
            proposed = max(0, min(num_steps, answer - committed - 1))
        accepted = 0
        for _ in range(proposed):
            if accepted >= lengths[committed]:
                break
            accepted += 1
        taken = min(accepted + 1, answer - committed)  # nothing behind the end is committed
        committed += taken
        counts.add(taken - 1, clamped=proposed < num_steps, ends_request=committed == answer)
    return counts


@given(st.lists(st.integers(0, 8), max_size=60), st.integers(0, 8), st.booleans())
@settings(max_examples=300, deadline=None)
def test_replay_leaves_out_the_rounds_that_serving_leaves_out(lengths: list[int], num_steps: int, limit: bool) -> None:
    lengths = [min(length, len(lengths) - i) for i, length in enumerate(lengths)]
    replayed = run_lengths_to_tau([ConversationRuns(lengths, ended_by_limit=limit)], num_steps)
    assert replayed.to_dict() == served(lengths, num_steps, limit).to_dict()
    assert replayed.rounds + replayed.left_out <= len(lengths)


def test_replay_by_hand() -> None:
    # Slots 0 (accepts 2 of 3), 3 (none), 4 (3 of 5), 8 (one, then the bonus is the last token).
    lengths = [2, 9, 9, 0, 5, 9, 9, 9, 1, 0]
    stopped = run_lengths_to_tau([ConversationRuns(lengths, ended_by_limit=False)], 3)
    assert stopped.histogram == [1, 0, 1, 1]
    assert (stopped.rounds, stopped.tokens, stopped.ended, stopped.clamped) == (3, 8, 1, 0)
    # Two slots before the limit only one draft is proposed: left out as well, here as the round that ends the request.
    assert run_lengths_to_tau([lengths], 3).to_dict() == stopped.to_dict()
    # A miss there: the stopped answer's round counts, and the limited one's proposed too few.
    lengths[8] = 0
    stopped = run_lengths_to_tau([ConversationRuns(lengths, ended_by_limit=False)], 3)
    limited = run_lengths_to_tau([ConversationRuns(lengths, ended_by_limit=True)], 3)
    assert (stopped.histogram, stopped.ended, stopped.clamped) == ([2, 0, 1, 1], 1, 0)
    assert (limited.histogram, limited.ended, limited.clamped) == ([1, 0, 1, 1], 1, 1)


def test_average_over_slots_is_not_what_is_served() -> None:
    """design.md's case, at K = 5: hit rates .9 / .2 in stretches of 30 give 2.88 by slots and 1.99 served."""
    draw = random.Random(0)
    conversations = []
    for _ in range(100):
        hits = [draw.random() < (0.9 if slot // 30 % 2 == 0 else 0.2) for slot in range(3000)]
        conversations.append(run_lengths(hits, 5))
    replayed = run_lengths_to_tau(conversations, 5)
    by_slots = 1 + sum(map(sum, conversations)) / sum(map(len, conversations))
    assert replayed.accept_length == pytest.approx(1.99, abs=0.015)
    assert by_slots == pytest.approx(2.88, abs=0.02)


def test_constant_acceptance_gives_the_closed_form() -> None:
    """incident.md: 74.7 % on a chain of five is 3.27, not the 2.95 of p / (1 - p)."""
    draw = random.Random(1)
    lengths = run_lengths([draw.random() < 0.747 for _ in range(400_000)], 5)
    replayed = run_lengths_to_tau([lengths], 5)
    assert replayed.accept_length == pytest.approx(3.27, abs=0.02)
    for joint in replayed.joint:
        assert abs(joint.rate - 0.747**joint.step) < 4 * joint.standard_error
    assert all(a == pytest.approx(0.747, abs=0.01) for a in replayed.conditional)


def test_run_lengths_measured_with_fewer_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="measured with 3 draft steps and say nothing of K = 5"):
        run_lengths_to_tau([[3, 3, 3]], 5, measured_steps=3)
    assert run_lengths_to_tau([[3, 3, 3, 0, 0, 0, 0]], 3, measured_steps=3).rounds == 1


@given(st.integers(1, 8), st.data())
@settings(max_examples=100, deadline=None)
def test_accept_length_is_one_plus_the_sum_of_joint_acceptance(num_steps: int, data: st.DataObject) -> None:
    accepted = data.draw(st.lists(st.integers(0, num_steps), min_size=1))
    counts = counts_of(num_steps, *accepted)
    assert counts.accept_length == pytest.approx(1 + sum(joint.rate for joint in counts.joint))
    assert counts.accept_length == pytest.approx(sum(a + 1 for a in accepted) / len(accepted))
    assert counts.acceptance_rate == pytest.approx(sum(accepted) / (num_steps * len(accepted)))
    assert 1 <= counts.accept_length <= num_steps + 1
    product = 1.0
    for joint, conditional in zip(counts.joint, counts.conditional, strict=True):
        product *= conditional
        assert joint.rate == pytest.approx(0.0 if math.isnan(product) else product)


def test_the_rule_for_what_is_left_out() -> None:
    kinds = {(clamped, ends): round_kind(clamped, ends) for clamped in (False, True) for ends in (False, True)}
    assert kinds == {
        (False, False): "counted",
        (True, False): "clamped",
        (False, True): "ended",
        (True, True): "ended",
    }
    counts = counts_of(2, 0, 2)
    before = (counts.rounds, counts.tokens, [joint.rate for joint in counts.joint])
    counts.add(1, clamped=True)
    counts.add(2, ends_request=True)
    assert (counts.rounds, counts.tokens, [joint.rate for joint in counts.joint]) == before
    assert (counts.clamped, counts.ended, counts.left_out) == (1, 1, 2)


def test_usable_steps_leave_room_for_the_bonus_token() -> None:
    assert [usable_steps(3, left) for left in (5, 4, 3, 2, 1, 0)] == [3, 3, 2, 1, 0, 0]


def test_no_speculation_commits_one_token_a_round() -> None:
    counts = run_lengths_to_tau([[4, 0, 7, 1]], 0)
    assert (counts.accept_length, counts.joint, counts.rounds, counts.ended) == (1.0, (), 3, 1)
    assert math.isnan(counts.acceptance_rate)


def test_figures_without_rounds_do_not_exist() -> None:
    counts = AcceptanceCounts(2)
    assert math.isnan(counts.accept_length)
    data = counts.to_dict()
    assert (data["accept_length"], data["acceptance_rate"], data["conditional"]) == (None, None, [None, None])
    assert (data["joint"][0]["rate"], data["joint"][0]["standard_error"]) == (None, None)


def test_counts_survive_json_and_add_up() -> None:
    a, b = counts_of(3, 0, 3, 3, 1), counts_of(3, 2)
    b.add(1, clamped=True)
    a.add(0, ends_request=True)
    a.merge(AcceptanceCounts.from_dict(b.to_dict()))
    assert a.histogram == [1, 1, 1, 2]
    assert (a.clamped, a.ended) == (1, 1)
    assert [j.hits for j in a.joint] == [4, 3, 2]
    assert b.histogram == [0, 0, 1, 0]
    with pytest.raises(ValueError, match="K = 3 and K = 2 do not add"):
        a.merge(AcceptanceCounts(2))


@pytest.mark.parametrize("accepted", [-1, 4])
def test_impossible_counts_are_refused(accepted: int) -> None:
    with pytest.raises(ValueError, match=f"{accepted} drafts accepted in a round of K = 3"):
        AcceptanceCounts(3).add(accepted)
    with pytest.raises(ValueError, match="has 4 entries"):
        AcceptanceCounts(3, [1, 2])


def test_standard_error_is_binomial() -> None:
    assert JointAcceptance(1, 30, 100).standard_error == pytest.approx(math.sqrt(0.3 * 0.7 / 100))
    assert JointAcceptance(1, 0, 100).standard_error == 0
    assert math.isnan(JointAcceptance(1, 0, 0).standard_error)


def test_comparison_of_like_with_like_agrees() -> None:
    draw = random.Random(3)
    halves = [counts_of(3), counts_of(3)]
    for half in halves:
        for _ in range(2000):
            accepted = 0
            while accepted < 3 and draw.random() < 0.6:
                accepted += 1
            half.add(accepted)
    found = compare(*halves)
    assert found.agrees
    assert found.first_difference is None
    assert found.relative_gap < 0.1
    assert "K = 3: accept length replayed" in found.describe()
    for k, joint in enumerate(halves[0].joint, start=1):
        assert f"A_{k}: replayed {joint.rate:.3f} ({joint.hits}/2000)" in found.describe()


def test_comparison_names_the_first_step_that_differs() -> None:
    """A draft that is right at step 1 and wrong from step 2 on (F19) agrees in A_1 and not in A_2."""
    replayed = AcceptanceCounts(2, [400, 240, 360])
    wrong_later = AcceptanceCounts(2, [400, 540, 60])
    found = compare(replayed, wrong_later)
    assert (found.first_difference, found.agrees) == (2, False)
    assert found.relative_gap == pytest.approx((0.96 - 0.66) / 0.66)
    wrong_first = AcceptanceCounts(2, [700, 120, 180])
    assert compare(replayed, wrong_first).first_difference == 1


def test_a_small_gap_within_errors_and_a_large_one_without() -> None:
    few = compare(AcceptanceCounts(1, [5, 5]), AcceptanceCounts(1, [6, 4]))
    assert few.first_difference is None  # ten rounds cannot tell .5 from .4
    assert not few.agrees  # but the gap of accept length - 1 is a quarter
    assert few.relative_gap == pytest.approx(0.25)
    assert compare(AcceptanceCounts(1, [500, 500]), AcceptanceCounts(1, [600, 400])).first_difference == 1
    # Deviation by hand: pooled rate .45 of 2 x 1000 rounds.
    step = compare(AcceptanceCounts(1, [500, 500]), AcceptanceCounts(1, [600, 400])).steps[0]
    assert step.deviation == pytest.approx(0.1 / math.sqrt(0.45 * 0.55 * 2 / 1000))


def test_comparison_at_the_edges() -> None:
    all_right = AcceptanceCounts(2, [0, 0, 50])
    assert compare(all_right, all_right).agrees
    none_right = AcceptanceCounts(2, [50, 0, 0])
    assert compare(none_right, none_right).agrees
    assert compare(all_right, none_right).relative_gap == math.inf
    assert compare(all_right, none_right).first_difference == 1
    with pytest.raises(ValueError, match="compare equal K only"):
        compare(AcceptanceCounts(2, [1, 0, 0]), AcceptanceCounts(1, [1, 0]))
    with pytest.raises(ValueError, match="0 rounds replayed, 50 served"):
        compare(AcceptanceCounts(2), none_right)

"""F19: a draft that is right at step 1 and wrong from step 2 on. Caught by parity: logits for every k, A_k / A_(k-1).

(Permuted features are told from it by the same numbers: test_f03_numeric_probe.py.)
"""

import pytest

from slipstream.engine.acceptance import AcceptanceCounts
from slipstream.tasks.parity_acceptance import untrained_steps

CAUGHT = [("F19", "parity", "the first step is right, later steps are wrong: the state after the norm is fed back")]


@pytest.fixture(scope="module")
def feedback(served_pipeline, tmp_path_factory):
    """Through the served path."""
    return served_pipeline.compare(tmp_path_factory.mktemp("feedback"), "F19:kind=feedback")


def test_the_normed_state_fed_back_is_caught(served_pipeline, feedback):
    (failure, *others) = served_pipeline.failures(feedback, "acceptance")
    assert others == []
    assert failure.startswith("server: the first step is right, later steps are wrong (k=2: ")
    assert "the state after the norm is fed back, trained was the one before it (error to that 0.00" in failure
    assert "; fix: feed back the state before the norm" in failure
    assert "A_k / A_(k-1) for k = 1.. offline" in failure
    assert "; served" in failure
    assert feedback.fault == "F19"


def test_slots_and_tokens_cannot_show_it(feedback):
    assert all(rows.wrong == 0 for rows in feedback.capture.slots.values())
    assert feedback.capture.tokens_differ == 0 < feedback.capture.tokens


def test_no_alarm_without_the_fault(served_pipeline, clean_findings):
    assert served_pipeline.failures(clean_findings) == []
    assert all(e.error < 0.01 and e.rounds > 5 for e in clean_findings.drafts.errors["server"])


def test_the_fault_passes_with_the_check_off(served_pipeline, feedback):
    assert served_pipeline.failures(feedback, "drafts", "acceptance") == []


# ---- the other kinds, by the engine in this process ------------------------------------------------------------------


def test_a_rope_position_that_stays_is_caught(served_pipeline, examined):
    findings = examined("F19:kind=rope")
    failure = served_pipeline.failures(findings, "acceptance")[0]
    assert failure.startswith("server: the first step is right, later steps are wrong (k=2: ")
    assert "the rope position is not advanced from step 2 on (error to that 0.00" in failure
    assert findings.fault == "F19"


def test_keys_of_an_old_chain_are_caught(served_pipeline, examined):
    findings = examined("F19:kind=draft-kv")
    failure = served_pipeline.failures(findings, "acceptance")[0]
    assert failure.startswith("server: the first round of each request is right (error 0.00")
    assert "the first step of later rounds is wrong" in failure
    assert "the draft's KV after a rejection" in failure
    assert findings.fault == "F19"


def test_the_engine_without_faults_raises_no_alarm(served_pipeline, examined):
    assert served_pipeline.failures(examined()) == []


# ---- trained without unrolled steps ----------------------------------------------------------------------------------


def counts_of(*histogram):
    return AcceptanceCounts(len(histogram) - 1, list(histogram))


def test_a_fall_behind_the_trained_step_is_a_warning_with_the_numbers():
    warning = untrained_steps(counts_of(250, 600, 120, 30), trained_steps=1)
    assert warning.startswith("F19: the draft's logits are those of training at every step")
    assert "falls from 0.75 at k = 1 (750 of 1000 rounds) to 0.20 at k = 2 (150 of 750)" in warning
    assert "it was trained to run 1 step on its own states, and runs 3" in warning


@pytest.mark.parametrize(
    "histogram",
    [
        (250, 188, 140, 422),  # constant 0.75
        (300, 280, 200, 220),  # falls a little, as drafts do
        (5, 12, 2, 1),  # falls, on too few rounds to tell
        (1000, 0, 0, 0),
    ],
)
def test_no_warning_where_it_does_not_fall(histogram):
    assert untrained_steps(counts_of(*histogram), trained_steps=3) == ""

"""F6: a capture that is not replayed, or is one replay late. Caught by parity through the served path, row by row.

Inputs A, B, A: each capture equals the eager capture of that same input.
"""

import pytest

CAUGHT = [("F6", "parity", "slot 2 equals an earlier capture, of other rows; prompts right, rounds wrong; fix")]


@pytest.fixture(scope="module")
def stale(served_pipeline, tmp_path_factory):
    return served_pipeline.compare(tmp_path_factory.mktemp("stale"), "F6:slot=2")


def test_caught_by_name(served_pipeline, stale):
    first = served_pipeline.failures(stale)[0]
    assert first.startswith("slot 2 equals an earlier capture, of other rows")
    assert "wrong rows; position" in first
    assert "cosine to its own reference" in first
    assert "fix: make the copy part of what every replay runs" in first
    assert stale.fault == "F6"


def test_prompts_are_right_and_rounds_are_wrong(stale):
    rows = stale.capture.slots[2]
    assert rows.prompt_rows[0] == 0 < rows.prompt_rows[1]
    assert rows.round_rows[0] > rows.round_rows[1] / 2
    assert "(round " in rows.first
    assert all(stale.capture.slots[slot].wrong == 0 for slot in (1, 3, 4))


def test_a_b_a_are_each_compared_with_the_eager_capture_of_their_own(stale, clean_findings):
    for findings in (stale, clean_findings):
        repeated = [kept for kept in findings.capture.slots[2].kept if " as " in kept.prompt]
        assert [kept.prompt.partition(" as ")[2] for kept in repeated] == ["A", "B", "A again"]
        a, b, again = repeated
        assert len({len(kept.token_ids) for kept in repeated}) == 1
        assert a.token_ids == again.token_ids != b.token_ids
        assert all(bool(kept.wrong.any()) is (findings is stale) for kept in repeated)


def test_tokens_cannot_show_it(stale):
    assert stale.capture.tokens_differ == 0
    assert "identical to K = 0" in stale.capture.describe_tokens()


def test_no_alarm_without_the_fault(served_pipeline, clean_findings):
    assert served_pipeline.failures(clean_findings) == []


def test_the_fault_passes_with_the_check_off(served_pipeline, stale):
    assert served_pipeline.failures(stale, "slots", "acceptance") == []

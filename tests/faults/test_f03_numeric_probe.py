"""F3, by numbers: permuted slots, and permuted columns of the features. Names are checked earlier; parity measures."""

CAUGHT = [
    ("F3", "parity", "slot 1 equals slot 2's state; the first step is wrong: fc reads the slots as [slot_2, ...]")
]


def test_permuted_features_are_named_as_f3(served_pipeline, examined):
    """The numeric probe of F3: slots right, the first step wrong, and the order that explains it."""
    findings = examined("F3:kind=features")
    failure = served_pipeline.failures(findings, "acceptance")[0]
    assert failure.startswith("server: the first step is wrong")
    assert "fc reads the slots as [slot_2, slot_1, slot_3] (error to that 0.00" in failure
    assert "; fix: put them side by side as [slot_1, slot_2, slot_3], by name" in failure
    assert findings.fault == "F3"


def test_slots_that_changed_names_are_named_as_f3(served_pipeline, examined):
    findings = examined("F3:kind=order")
    first, second = served_pipeline.failures(findings, "acceptance", "drafts")
    assert first.startswith("slot 1 equals slot 2's state: cosine to its own reference")
    assert second.startswith("slot 2 equals slot 1's state")
    assert findings.fault == "F3"
    assert served_pipeline.failures(findings, "slots", "acceptance", "drafts") == []

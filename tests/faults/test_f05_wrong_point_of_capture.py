"""F5: a state taken at the wrong point of the stream: residual not added, already normed, or before the all-reduce.

Caught by parity through the served path: each slot nearest to its own reference, its error under a tenth of that to the
second nearest. Tokens stay right, so token equality cannot see it.
"""

import json

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.injection import UnknownInjection, parse_injections
from slipstream.flows import cli
from slipstream.tasks import parity

CAUGHT = [("F5", "parity", "slot 2 equals the block's output without the residual: cosine to its own, to that; fix")]


@pytest.fixture(scope="module")
def told(served_pipeline):
    """`slipstream parity CONFIG --inject ...`: exit code, what it printed, its folder."""
    with pytest.MonkeyPatch.context() as patch:
        words = ["parity", str(served_pipeline.config), "--workdir", str(served_pipeline.workdir), "--json"]
        faults = ["--inject", "F5:slot=2,kind=no-residual", "--inject", "F5:slot=1,kind=normed"]
        patch.setattr("sys.argv", ["slipstream", *words, *faults])
        shown = []
        patch.setattr(cli, "show_error", lambda error: shown.append(str(error)))
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return ended.value.code, shown[0], served_pipeline.workdir / parity.INJECTED


def test_caught_with_its_cause_and_exit_code_3(told):
    code, words, _ = told
    assert code == 3
    assert words.startswith("F5: parity failed in ")
    assert "slot 1 equals the next layer's normed input: cosine to its own reference" in words
    assert "slot 2 equals the block's output without the residual: cosine to its own reference" in words
    assert "(expected > 0.99), to the block's output without the residual 1.00" in words
    assert "fix: add the residual stream before the capture" in words
    assert "slot 3" not in words.partition("draft")[0]


def test_tokens_stay_right_and_the_log_is_silent(told, served_pipeline):
    _, _, folder = told
    measured = json.loads((folder / "parity.json").read_text())
    assert measured["tokens"]["differ"] == 0 < measured["tokens"]["compared"]
    assert measured["injections"] == ["F5:slot=2,kind=no-residual", "F5:slot=1,kind=normed"]
    log = (served_pipeline.workdir / "parity-inject.log").read_text()
    assert "WARNING: FAULT PUT IN ON PURPOSE: F5:slot=2,kind=no-residual" in log
    assert "error" not in log.lower()


def test_the_real_parity_is_not_touched(told, served_pipeline):
    assert not (served_pipeline.workdir / "parity").exists()
    assert not list(served_pipeline.workdir.glob("*.state.json"))


def test_no_alarm_without_the_fault(served_pipeline, clean_findings):
    assert served_pipeline.failures(clean_findings) == []
    assert all(rows.wrong == 0 and rows.round_rows[1] > 20 for rows in clean_findings.capture.slots.values())
    assert clean_findings.diagnoses == {}


@pytest.mark.parametrize("kind", ["no-residual", "normed"])
def test_the_fault_passes_with_the_check_off(served_pipeline, examined, kind):
    findings = examined(f"F5:slot=2,kind={kind}")
    assert findings.capture.slots[2].wrong > 0
    assert served_pipeline.failures(findings, "slots", "acceptance") == []


def test_what_a_server_cannot_have_is_refused(examined):
    with pytest.raises(SlipstreamError, match="slot 0 is not captured") as caught:
        examined("F5:slot=0,kind=normed")
    assert caught.value.expected == "one of the slots [1, 2, 3]"
    with pytest.raises(SlipstreamError, match="one rank's partial sum is the whole sum"):
        examined("F5:slot=1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F99", "there is no F99 to inject"),
        ("F5", "F5 is about one slot: name it"),
        ("F5:slot=two", "slot is 'two', no number"),
        ("F5:slot=2,kind=odd", "F5 has no kind 'odd'"),
        ("F6:layer=2", "'layer=2' says nothing of F6"),
        ("F19:kind=untrained", "training.num_steps: 1"),
        ("F5:slot=2,slot=3", "slot is given twice"),
        ("F3 F3", "F3:kind=order is injected already"),  # names swapped twice are right: nothing to be found
        ("F5:slot=2 F5:slot=2,kind=normed", "F5:slot=2,kind=partial is injected already"),
        ("F6:slot=1 F6:kind=frozen", "F6:slot=1,kind=stale is injected already"),
    ],
)
def test_an_unknown_fault_lists_what_there_is(text, words):
    with pytest.raises(UnknownInjection) as caught:
        parse_injections(text.split())
    assert words in caught.value.found
    assert "F19:kind=rope" in caught.value.expected
    assert "F6:slot=...,rank=...,kind=stale" in caught.value.expected


@pytest.mark.parametrize(
    "text",
    [
        "F3 F3:kind=features",
        "F5:slot=1 F5:slot=2",
        "F5:slot=1 F6:slot=1",
        "F6:rank=0 F6:rank=1",
        "F19 F19:kind=rope",
    ],
)
def test_faults_of_different_things_go_together(text):
    assert len(parse_injections(text.split())) == 2

"""F12: an "accept rate" read from another engine's log. Converted by its engine and version's formula, or refused."""

import json
import random

import pytest

from slipstream.engine.acceptance import AcceptanceCounts
from slipstream.engine.engine_versions import Engine
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.explain_log import width
from slipstream.tasks.explain_log.read import read_file
from slipstream.tasks.explain_log.run_figures import figures
from slipstream.tasks.other_engines.metric_definitions import ACCEPTED_OVER_PROPOSED, accept_length_from_rate

CAUGHT = [
    (
        "F12",
        "explain-log",
        "rates do not fit the definition of 0.5.14; a rate alone is refused",
    ),
]

K = 5
LINE = (
    "[2026-02-05 10:00:00] Decode batch, #running-req: 1, #token: 186, "
    "accept len: {length:.2f}, accept rate: {rate:.2f}, cuda graph: True, gen throughput (token/s): 54.80, "
)


def served(seed=0, intervals=30):
    """Rounds of a real chain, 40 an interval: counts of each."""
    draw, made = random.Random(seed), []
    for _ in range(intervals):
        counts = AcceptanceCounts(K)
        for _ in range(40):
            accepted = 0
            while accepted < K and draw.random() < 0.45:
                accepted += 1
            counts.add(accepted)
        made.append(counts)
    return made


def write_log(path, intervals, *, with_bonus):
    """The same rounds as two releases print them: the rate differs, nothing else does."""
    lines = []
    for counts in intervals:
        bonus = counts.rounds if with_bonus else 0
        proposed = counts.rounds * (K + 1 if with_bonus else K)
        lines.append(LINE.format(length=counts.accept_length, rate=(counts.accepted + bonus) / proposed))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def truth():
    return sum(c.accepted for c in served()) / sum(K * c.rounds for c in served())


@pytest.mark.parametrize(("with_bonus", "version"), [(True, "0.5.9"), (False, "0.5.14")])
@pytest.mark.parametrize("stated", [True, False])
def test_f12_two_releases_print_different_rates_of_the_same_rounds(tmp_path, truth, with_bonus, version, stated):
    path = write_log(tmp_path / "server.log", served(), with_bonus=with_bonus)
    run = figures(read_file(path), version=version if stated else None)
    assert run.num_steps == K
    assert run.acceptance_rate == pytest.approx(truth, abs=0.002)
    # What is printed is not that number for the older release: 30 % stands for 16 %.
    assert (abs(run.rate_printed - truth) > 0.1) == with_bonus


def test_f12_the_wrong_release_is_contradicted_by_the_log_itself(tmp_path):
    path = write_log(tmp_path / "server.log", served(), with_bonus=True)
    run = figures(read_file(path), version="0.5.14")
    (words,) = run.refused
    assert "do not fit the definition of 0.5.14" in words
    assert "fit that of SGLang up to 0.5.10.post1" in words
    assert (run.num_steps, run.acceptance_rate, run.rate_meaning) == (None, None, "")


@pytest.mark.parametrize("version", [None, "nightly", "0.5.9+patched", "0.9.0"])
def test_f12_a_rate_alone_is_refused_without_a_known_release(tmp_path, version):
    page = tmp_path / "metrics.txt"
    page.write_text("sglang:spec_accept_rate 0.30\nsglang:spec_num_draft_tokens 6.0\n")
    with pytest.raises(SlipstreamError) as error:
        figures(read_file(page), version=version)
    assert error.value.fault == "F12"
    assert "is not converted" in error.value.found
    assert error.value.runbook == "accept-length-low.md"


def test_f12_no_false_alarm_when_the_release_is_known(tmp_path):
    page = tmp_path / "metrics.txt"
    page.write_text("sglang:spec_accept_rate 0.30\nsglang:spec_num_draft_tokens 6.0\n")
    assert figures(read_file(page), version="0.5.9").accept_length == pytest.approx(1.8)
    assert figures(read_file(page), version="0.5.14").accept_length == pytest.approx(2.5)


def test_f12_the_engine_s_own_length_of_a_request_is_not_taken(tmp_path):
    """completion_tokens / verifies counts the token of the prefill."""
    info = {
        "completion_tokens": 19, "spec_verify_ct": 10, "spec_accept_length": 1.9, "spec_num_correct_drafts": 8,
        "spec_num_proposed_drafts": 50, "spec_correct_drafts_histogram": [5, 3, 1, 1],
    }  # fmt: skip
    path = tmp_path / "answer.json"
    path.write_text(json.dumps({"meta_info": info}))
    run = figures(read_file(path))
    assert run.accept_length == pytest.approx(1.8)
    assert any("counts the first token" in words for words in run.refused)


def test_f12_another_engine_s_rate_is_refused_by_name(tmp_path):
    path = tmp_path / "other.log"
    path.write_text("I slot print_timing: id 1 | draft acceptance = 0.64479 ( 167 accepted / 259 generated)\n")
    with pytest.raises(SlipstreamError, match="definition is not known here") as error:
        read_file(path)
    assert error.value.fault == "F12"
    assert "draft acceptance = 0.64479" in error.value.found


def test_f12_passes_unnoticed_when_the_check_is_off(tmp_path, monkeypatch):
    """One definition for every release, as the incident read it: 30 % becomes a length of 2.5, and nobody knows."""
    page = tmp_path / "metrics.txt"
    page.write_text("sglang:spec_accept_rate 0.30\nsglang:spec_num_draft_tokens 6.0\n")
    always = "slipstream.tasks.other_engines.metric_definitions.rate_definition"
    monkeypatch.setattr(always, lambda engine, version, topk=1: ACCEPTED_OVER_PROPOSED)
    monkeypatch.setattr(width, "rate_definition", lambda engine, version, topk=1: ACCEPTED_OVER_PROPOSED)
    run = figures(read_file(page), version="nightly")
    assert run.accept_length == pytest.approx(2.5)  # 1.8 was served
    assert run.refused == ()
    assert accept_length_from_rate(Engine.SGLANG, "nightly", 0.30, 6) == pytest.approx(2.5)

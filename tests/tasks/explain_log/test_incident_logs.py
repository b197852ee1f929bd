"""The incident's three logs give the incident's numbers, and the verdicts that these carry."""

import json
from pathlib import Path

import pytest

from slipstream.flows import cli, explain_log
from slipstream.tasks.explain_log.compare import partial_sum
from slipstream.tasks.explain_log.explanations import ranked, verdict

LOGS = [Path(__file__).parents[3] / "configs" / "incident-logs" / f"launch-{n}.log" for n in (1, 2, 3)]


@pytest.fixture(scope="module")
def told():
    return explain_log.explain(LOGS, baseline=90, version=None, accuracy=0.747)


@pytest.fixture(scope="module")
def runs(told):
    return told[0]


def test_figures_of_the_incident(runs):
    assert [run.num_steps for run in runs] == [1, 15, 5]
    assert [(f"{run.accept_length:.1f}", run.ceiling) for run in runs] == [("1.6", 2), ("1.9", 16), ("1.8", 6)]
    assert [f"{run.acceptance_rate:.0%}" for run in runs] == ["60%", "6%", "16%"]
    assert [f"{run.sum_joint:.1f}" for run in runs] == ["0.6", "0.9", "0.8"]
    assert [f"{run.tokens_per_second:.1f}" for run in runs] == ["56.8", "46.7", "54.8"]
    assert [f"{run.round_ms:.1f}" for run in runs] == ["28.2", "40.7", "32.8"]
    assert [f"{run.break_even:.2f}" for run in runs] == ["2.54", "3.66", "2.96"]
    assert [run.can_win for run in runs] == [False, True, True]
    assert [f"{run.rate_printed:.2f}" for run in runs] == ["0.80", "0.12", "0.30"]


def test_a_mean_length_holds_no_joint_acceptance_but_that_of_one_step(runs):
    assert runs[0].joint == pytest.approx((0.6,))
    assert [run.joint for run in runs[1:]] == [None, None]
    assert [str(partial_sum(run, 1)) for run in runs] == ["0.60", "between 0.06 and 0.90", "between 0.16 and 0.80"]


def test_the_flags_that_were_cut_are_side_by_side(runs):
    first = runs[0]
    assert (first.asked.num_steps, first.asked.verify_width) == (1, 16)
    assert (first.effective.num_steps, first.effective.verify_width) == (1, 2)
    assert [run.asked.verify_width for run in runs[1:]] == [run.verify_width for run in runs[1:]]


def test_the_right_form_of_the_projection(runs):
    assert [f"{run.projected:.2f}" for run in runs] == ["1.75", "3.92", "3.27"]
    expectation = {item.name: item for item in ranked(runs[2])}["expectation"]
    assert "p/(1-p) = 2.95" in expectation.told
    assert "3.27 at K = 5" in expectation.told
    assert "teacher-forced" in expectation.told


def test_verdicts(runs):
    assert "no draft could have won at K = 1: break-even 2.54 is above the ceiling 2" in verdict(runs[0])
    assert "71.0 of 90 tok/s" in verdict(runs[0])
    for run in runs[1:]:
        assert verdict(run).startswith("slower than no speculation")
    assert "must fall from 32.8 to 20.0 ms" in verdict(runs[2])


def test_what_is_to_blame(runs):
    order = [[item.name for item in ranked(run)] for run in runs]
    assert order[0][:2] == ["flags", "round cost"]
    assert order[1][0] == order[2][0] == "wiring"
    assert [item.proven for item in ranked(runs[0])] == [True, True, False, False]
    assert not any(item.proven for run in runs[1:] for item in ranked(run))
    flags, cost = ranked(runs[0])[:2]
    assert "16 was asked for, 2 is in force" in flags.told
    assert cost.tokens == pytest.approx(2.54 - 1.747, abs=0.005)


@pytest.mark.parametrize("accuracy", [0.747, 0.3, 0.95])
def test_the_numbers_of_a_run_add_up(accuracy):
    """hoped - served = expectation + flags + wiring, and break-even - served = round cost + wiring."""
    for run in explain_log.explain(LOGS, baseline=90, version=None, accuracy=accuracy)[0]:
        tokens = {item.name: item.tokens for item in ranked(run)}
        hoped = accuracy / (1 - accuracy)
        assert tokens["expectation"] + tokens["flags"] + tokens["wiring"] == pytest.approx(hoped - run.accept_length)
        assert tokens["round cost"] + tokens["wiring"] == pytest.approx(run.break_even - run.accept_length)


def test_neither_launch_is_shown_to_be_improved(told):
    first, second = told[1]
    assert first.verdict == second.verdict == "not shown to be improved"
    text = "\n".join(second.reasons)
    assert "1.90 of 16 -> 1.80 of 6" in text
    assert "6% -> 16% and the printed rate 12% -> 30% compare nothing" in text
    assert "from K = 15 to 5" in text
    # Speed came from the shorter chain alone: 54.8 / 46.7 = 0.95 x 1.24.
    assert "0.95x by accept length and 1.24x by the round (40.7 -> 32.8 ms)" in text
    assert "steps 2 to 15 together would add 0.30 tokens" in "\n".join(first.reasons)


def test_a_page_for_people_and_json_for_programs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    names = [str(path) for path in LOGS]
    cli.app(["explain-log", *names, "--baseline-tok-s", "90", "--accuracy", "0.747"], standalone_mode=False)
    page = capsys.readouterr().out
    for words in ("1.60 (2)", "1.90 (16)", "1.80 (6)", "28.2", "40.7", "32.8", "2.54", "3.66", "2.96", "60%", "3.27"):
        assert words in page
    for words in ("not shown to be improved", "slipstream parity CONFIG", "runbooks/accept-length-low.md"):
        assert words in page
    cli.app(["explain-log", *names, "--json", "--baseline-tok-s", "90"], standalone_mode=False)
    data = json.loads(capsys.readouterr().out)
    assert [run["ceiling"] for run in data["runs"]] == [2, 16, 6]
    assert [made["verdict"] for made in data["comparisons"]] == ["not shown to be improved"] * 2
    assert data["runs"][0]["explanations"][0]["name"] == "flags"


def test_nothing_but_the_decode_lines_is_needed_for_the_width(tmp_path):
    """1.6 / 0.80 = 1.68 / 0.84 = 2.0: the pairs alone give width 2, by the older definition only."""
    lines = [line for line in LOGS[0].read_text().splitlines() if "batch" in line]
    cut = tmp_path / "cut.log"
    cut.write_text("\n".join(lines))
    ((run,), _) = explain_log.explain([cut], baseline=90, version=None, accuracy=None)
    assert (run.num_steps, run.verify_width) == (1, 2)
    assert "printed pairs" in run.width_from
    assert "up to 0.5.10.post1" in run.rate_meaning
    assert f"{run.round_ms:.1f}" == "28.2"

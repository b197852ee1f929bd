"""Every format that the engines print, by release: the figures that come out, and what cannot come out."""

import json

import pytest

from slipstream.engine.acceptance import AcceptanceCounts
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.serving.metrics import Metrics
from slipstream.tasks.explain_log import read
from slipstream.tasks.explain_log.explanations import ranked
from slipstream.tasks.explain_log.run_figures import figures

LENGTHS = [2.10, 2.45, 1.90, 2.30, 2.25, 2.00]
HISTOGRAM = (40, 25, 20, 15)  # K = 3: A_k = .60 .35 .15, length 2.10


def run_of(path, **options):
    return figures(read.read_file(path), **options)


# ---- SGLang's log


@pytest.mark.parametrize(
    ("form", "version", "with_bonus"),
    [
        ("0.5.4", "0.5.4", True),
        ("0.5.9", "0.5.10.post1", True),
        ("0.5.9", "0.5.11", False),
        ("0.5.23", "0.5.23", False),
    ],
)
@pytest.mark.parametrize("style", ["repr", "dict"])
def test_sglang_by_release(logs, tmp_path, form, version, with_bonus, style):
    lines = [
        logs.server_args(3, 4, style=style, decode_log_interval=10),
        *logs.sglang_log(LENGTHS, 4, with_bonus=with_bonus, form=form),
    ]
    run = run_of(logs.write(tmp_path / "a.log", lines), version=version, baseline=40)
    assert (run.engine, run.num_steps, run.verify_width, run.ceiling) == ("sglang", 3, 4, 4)
    mean = (sum(LENGTHS) + LENGTHS[0]) / 7
    assert run.accept_length == pytest.approx(mean)
    assert run.acceptance_rate == pytest.approx((mean - 1) / 3)
    assert run.rounds == 70
    # The line after the prefill says 0.39 tok/s: idle time, left out of the speed and told.
    assert run.tokens_per_second == pytest.approx(50.0)
    assert run.round_ms == pytest.approx(1000 * sum(LENGTHS) / 6 / 50)
    assert run.break_even == pytest.approx(run.round_ms / 25)
    assert any("left out of the speed" in note for note in run.notes)
    assert f"documented for {version}" in run.rate_meaning
    assert run.refused == ()
    assert run.joint is None  # a mean length holds no A_k


def test_sglang_before_it_printed_a_rate(logs, tmp_path):
    lines = [logs.server_args(3, 4), logs.PREFILL, *(logs.decode(x, None, 80, form="0.4.6") for x in LENGTHS)]
    run = run_of(logs.write(tmp_path / "a.log", lines))
    assert run.accept_length == pytest.approx(sum(LENGTHS) / 6)
    assert run.rate_printed is None


@pytest.mark.parametrize("with_bonus", [True, False])
def test_without_start_up_and_version_the_pairs_decide(logs, tmp_path, with_bonus):
    run = run_of(logs.write(tmp_path / "a.log", logs.sglang_log(LENGTHS, 4, with_bonus=with_bonus)))
    assert (run.num_steps, run.version) == (3, None)
    assert "printed pairs" in run.width_from
    assert ("up to 0.5.10.post1" in run.rate_meaning) == with_bonus


def test_several_running_requests(logs, tmp_path):
    lines = [logs.server_args(3, 4), *logs.sglang_log(LENGTHS, 4, with_bonus=True, tok_s=400, running=8)]
    lines += [logs.decode(2.0, 0.5, 90, running=2)]
    run = run_of(logs.write(tmp_path / "a.log", lines), version="0.5.9")
    assert (run.running, run.tokens_per_second) == (8, pytest.approx(50.0))
    assert run.round_ms == pytest.approx(1000 * sum(LENGTHS) / 6 * 8 / 400)
    # A line stands for as many rounds as requests run: 7 lines of 8, one of 2.
    assert run.accept_length == pytest.approx((8 * (sum(LENGTHS) + LENGTHS[0]) + 2 * 2.0) / 58)
    assert run.rounds == 58 * 40
    assert any("length x 8 / tokens/s" in note for note in run.notes)
    assert any("1 with another number are not used" in note for note in run.notes)


def test_ranks_of_data_parallel_servers_have_their_own_prefills(logs, tmp_path):
    lines = [logs.server_args(3, 4)]
    for rank in ("DP0 TP0", "DP1 TP0"):
        lines += [logs.PREFILL.replace("TP0", rank), logs.decode(2.0, 0.5, 0.1, rank=rank)]
    lines += [logs.decode(2.0, 0.5, 50, rank=rank) for rank in ("DP0 TP0", "DP1 TP0") * 3]
    run = run_of(logs.write(tmp_path / "a.log", lines))
    assert run.tokens_per_second == pytest.approx(50)


def test_a_width_that_the_server_changed_is_told_without_the_launch_line(logs, tmp_path):
    warned = "speculative_num_draft_tokens is adjusted to speculative_num_steps + 1 when speculative_eagle_topk == 1"
    run = run_of(
        logs.write(
            tmp_path / "a.log", [warned, logs.server_args(1, 2), *logs.sglang_log([1.6] * 4, 2, with_bonus=True)]
        )
    )
    assert any("set the width to steps + 1" in note for note in run.notes)
    (flags,) = [item for item in ranked(run) if item.name == "flags"]
    assert (flags.proven, flags.told) == (True, "the server changed the width; 2 is in force, asked is not printed")


def test_a_launch_line_alone_gives_the_width_that_topk_1_leaves(logs, tmp_path):
    command = "python3 -m sglang.launch_server --speculative-num-steps=1 --speculative-eagle-topk 1 "
    command += "--speculative-num-draft-tokens 16"
    run = run_of(logs.write(tmp_path / "a.log", [command, logs.PREFILL, logs.decode(1.6, None, 50, form="0.4.6")]))
    assert (run.num_steps, run.asked.verify_width, run.verify_width) == (1, 16, 2)
    assert "steps + 1, whatever tokens are asked" in run.width_from


def test_a_server_that_only_decodes_prints_no_prefill(logs, tmp_path):
    """Disaggregated: its intervals may hold idle time, so a round takes at most what they say."""
    lines = [logs.server_args(3, 4)]
    lines += [
        logs.decode(2.0, 0.5, tok_s).replace("cuda graph", "pre-allocated usage: 0.00, #prealloc-req: 0, cuda graph")
        for tok_s in (0.4, 50, 50)
    ]
    run = run_of(logs.write(tmp_path / "a.log", lines))
    assert any("a round takes at most" in note for note in run.notes)


def test_a_version_may_be_stated_with_its_engine(logs, tmp_path):
    path = logs.write(tmp_path / "a.log", [logs.server_args(3, 4), *logs.sglang_log(LENGTHS, 4, with_bonus=True)])
    for version in ("sglang==0.5.9", "SGLang 0.5.9", "v0.5.9"):
        assert "documented" in run_of(path, version=version).rate_meaning


@pytest.mark.parametrize(
    ("length", "rate", "k"), [(4.40, 0.68, 5), (3.04, 0.68, 3), (1.57, 0.29, 2), (2.47, 0.82, 2), (2.17, 0.54, 3)]
)
def test_single_pairs_seen_in_the_wild(logs, tmp_path, length, rate, k):
    """One printed pair is often enough: lengths are no whole numbers. K as their owners stated it, where they did."""
    assert run_of(logs.write(tmp_path / "a.log", [logs.decode(length, rate, 50)])).num_steps == k


def test_a_pair_that_both_definitions_could_have_made_is_refused(logs, tmp_path):
    run = run_of(logs.write(tmp_path / "a.log", [logs.decode(2.50, 0.50, 50)]))  # 2.5 / 5, or 1.5 / 3
    assert (run.num_steps, run.acceptance_rate) == (None, None)
    assert any("both known definitions fit its pairs" in words for words in run.refused)
    assert run_of(logs.write(tmp_path / "a.log", [logs.decode(2.50, 0.50, 50)]), version="0.5.14").num_steps == 3
    assert run_of(logs.write(tmp_path / "a.log", [logs.decode(2.50, 0.50, 50)]), version="0.5.9").num_steps == 4


def test_a_width_in_force_that_the_pairs_contradict_is_told(logs, tmp_path):
    lines = [logs.server_args(5, 6), *logs.sglang_log(LENGTHS, 4, with_bonus=True)]
    run = run_of(logs.write(tmp_path / "a.log", lines))
    (words,) = run.refused
    assert "no known definition fits its pairs with verify width 6 (but width 4 by that of SGLang up to" in words


def test_a_draft_that_never_works_is_named(logs, tmp_path):
    lines = [logs.server_args(3, 4, algorithm="EAGLE"), *logs.sglang_log([1.0] * 4, 4, with_bonus=False)]
    run = run_of(logs.write(tmp_path / "a.log", lines), accuracy=0.7)
    flags, wiring = ranked(run)[:2]
    assert (flags.name, flags.proven, wiring.name, wiring.proven) == ("flags", True, "wiring", True)
    assert "algorithm EAGLE and accept length 1.00" in flags.told
    assert "next to nothing is ever accepted" in wiring.told


def test_a_length_that_is_no_number_is_no_plain_step(logs, tmp_path):
    broken = logs.decode(1.0, 0.5, 50).replace("accept len: 1.00", "accept len: nan")
    read_file = read.read_file(logs.write(tmp_path / "a.log", [broken, logs.decode(2.0, 0.5, 50)]))
    assert (read_file.section.plain_lines, read_file.section.lengths.lines) == (0, 1)


def test_a_tree_has_a_ceiling_and_no_rate(logs, tmp_path):
    lines = [logs.server_args(5, 64, topk=8), *logs.sglang_log(LENGTHS, 64, with_bonus=True)]
    run = run_of(logs.write(tmp_path / "a.log", lines), version="0.5.9")
    assert (run.num_steps, run.ceiling, run.acceptance_rate) == (5, 6, None)
    assert any("the accept rate of a tree (topk 8) is not converted" in words for words in run.refused)


def test_k_that_changes_has_no_ceiling(logs, tmp_path):
    lines = [logs.server_args(3, 4, speculative_adaptive=True), *logs.sglang_log(LENGTHS, 4, with_bonus=False)]
    lines += ["[2026 TP0] Adaptive spec params updated: steps 3 -> 5 (ema_accept_len=3.10)"]
    run = run_of(logs.write(tmp_path / "a.log", lines), version="0.5.14", baseline=50)
    assert (run.num_steps, run.ceiling, run.acceptance_rate, run.can_win) == (None, None, None, None)
    assert run.break_even is not None  # it needs no K
    assert any("K changed 1 times" in words for words in run.refused)


def test_a_length_above_the_ceiling_refuses_k(logs, tmp_path):
    lines = [logs.server_args(1, 2), *logs.sglang_log([1.5, 2.4, 2.2], 3, with_bonus=True)]
    run = run_of(logs.write(tmp_path / "a.log", lines), version="0.5.9")
    assert run.num_steps is None
    assert any("a length of 2.40 is printed" in words for words in run.refused)


def test_a_length_below_one_is_another_definition(logs, tmp_path):
    lines = [logs.server_args(3, 4), logs.PREFILL, *(logs.decode(x, None, 50) for x in (1.2, 0.8, 1.1))]
    with pytest.raises(SlipstreamError, match="the bonus token is not counted") as error:
        run_of(logs.write(tmp_path / "a.log", lines))
    assert error.value.fault == "F12"


# ---- vLLM's log


@pytest.mark.parametrize("form", ["now", "2025"])
@pytest.mark.parametrize("started", [True, False])
def test_vllm_log(logs, tmp_path, form, started):
    lines = logs.VLLM_START.format(version="0.24.0", k=3).splitlines() if started else []
    for _ in range(4):
        lines += logs.vllm_lines(HISTOGRAM, tok_s=70.0, form=form)
    run = run_of(logs.write(tmp_path / "a.log", lines), baseline=50)
    counts = AcceptanceCounts(3, list(HISTOGRAM))
    assert run.accept_length == pytest.approx(counts.accept_length)
    assert run.joint == pytest.approx([a.rate for a in counts.joint], abs=1e-3)
    assert (run.rounds, run.num_steps or 3) == (400, 3)
    assert run.tokens_per_second == pytest.approx(70)
    assert run.round_ms == pytest.approx(1000 * 2.1 / 70)
    assert run.version == ("0.24.0" if started else None)
    assert run.num_steps == 3


def test_vllm_rounds_that_proposed_fewer_are_taken_from_the_mean(logs, tmp_path):
    line = logs.vllm_lines(HISTOGRAM)[1].replace("Drafted: 300 tokens", "Drafted: 270 tokens")
    run = run_of(logs.write(tmp_path / "a.log", [line]))
    assert run.accept_length == pytest.approx(2.10, abs=0.005)
    assert any("some rounds proposed fewer than 3" in note for note in run.notes)


def test_a_crash_of_vllm_is_no_start(logs, tmp_path):
    start = logs.VLLM_START.format(version="0.24.0", k=3).splitlines()
    dump = "ERROR Dumping input data for V1 LLM engine (v0.24.0) with config: num_spec_tokens=3"
    read_file = read.read_file(logs.write(tmp_path / "a.log", [*start, *logs.vllm_lines(HISTOGRAM), dump]))
    assert read_file.notes == ()


def test_the_line_of_older_vllm_is_refused(logs, tmp_path):
    old = (
        "INFO 10-16 19:05:47 metrics.py:367] Speculative metrics: Draft acceptance rate: 0.642, System efficiency: 0.6"
    )
    with pytest.raises(SlipstreamError, match="definitions are not documented") as error:
        run_of(logs.write(tmp_path / "a.log", [old]))
    assert error.value.fault == "F12"


# ---- pages


@pytest.mark.parametrize("suffix", ["_total", ""])
def test_vllm_page(logs, tmp_path, suffix):
    run = run_of(logs.write(tmp_path / "metrics.txt", logs.vllm_page(HISTOGRAM, suffix)))
    counts = AcceptanceCounts(3, list(HISTOGRAM))
    assert (run.num_steps, run.rounds) == (3, 100)
    assert run.joint == pytest.approx([a.rate for a in counts.joint])
    assert run.accept_length == pytest.approx(counts.accept_length)
    # The error from counts is that of the rounds themselves.
    values = [a for a, n in enumerate(HISTOGRAM) for _ in range(n)]
    mean = sum(values) / 100
    assert run.standard_error == pytest.approx((sum((v - mean) ** 2 for v in values) / 100) ** 0.5 / 10)


def test_a_page_without_its_accepted_drafts_is_refused(logs, tmp_path):
    lines = [line for line in logs.vllm_page(HISTOGRAM) if "accepted" not in line]
    with pytest.raises(SlipstreamError, match="counts 100 rounds, and no accepted drafts"):
        run_of(logs.write(tmp_path / "metrics.txt", lines))


def test_vllm_engines_of_a_page_add_up(logs, tmp_path):
    lines = logs.vllm_page(HISTOGRAM)
    lines += [line.replace('engine="0"', 'engine="1"') for line in lines if not line.startswith("#")]
    assert run_of(logs.write(tmp_path / "metrics.txt", lines)).rounds == 200


@pytest.mark.parametrize(("length", "rate", "steps"), [(3.95, 2.95 / 7, 7), (1.55, 0.55, 1), (2.8, 0.6, 3)])
def test_sglang_page_of_the_newer_definition(logs, tmp_path, length, rate, steps):
    label = 'engine_type="unified",model_name="m",tp_rank="0"'
    lines = [f"sglang:spec_accept_length{{{label}}} {length}", f"sglang:spec_accept_rate{{{label}}} {rate}"]
    lines += ['sglang:spec_accept_length{engine_type="draft",model_name="d",tp_rank="0"} 9.9']
    run = run_of(logs.write(tmp_path / "metrics.txt", lines))
    assert (run.num_steps, run.accept_length) == (steps, pytest.approx(length))
    assert run.standard_error is None
    assert any("last log interval" in note for note in run.notes)


def test_sglang_page_with_its_gauges_of_k(logs, tmp_path):
    lines = ["sglang:spec_accept_length 2.5", "sglang:spec_num_steps 3.0", "sglang:spec_num_draft_tokens 4.0"]
    lines += ["sglang:gen_throughput 100.0", "sglang:num_running_reqs 2.0"]
    run = run_of(logs.write(tmp_path / "metrics.txt", lines), baseline=40)
    assert (run.num_steps, run.running, run.round_ms) == (3, 2, pytest.approx(50.0))


OWN = {"running": 0, "waiting": 0, "free_blocks": 1, "total_blocks": 1, "steps": 3, "seconds": {"draft": 1.0}}
OWN |= {"rounds_by_num_steps": [{"num_steps": 3, "rounds": 104}], "captures_after_ready": 0, "compiles_after_ready": 0}


def test_our_own_page_and_settings(logs, tmp_path):
    counts = AcceptanceCounts(3, list(HISTOGRAM), ended=4)
    stats = {**OWN, "acceptance": [AcceptanceCounts(0, [7]).to_dict(), counts.to_dict()]}
    page = Metrics().text(stats).decode()
    (tmp_path / "page.txt").write_text(page)
    logs.write_json(tmp_path / "settings.json", {"num_steps": 3, "stats": stats})
    for name in ("page.txt", "settings.json"):
        run = run_of(tmp_path / name)
        assert (run.engine, run.num_steps, run.rounds) == ("slipstream", 3, 100)
        assert run.joint == pytest.approx([a.rate for a in counts.joint])


# ---- JSON


@pytest.mark.parametrize("release", ["0.5.9", "0.5.11", "0.5.23"])
@pytest.mark.parametrize("form", ["one", "list", "lines"])
def test_answers_with_meta_info(logs, tmp_path, release, form):
    answers = [logs.request(HISTOGRAM, 3, release), logs.request((10, 0), 3, release)]
    path = tmp_path / "answers.json"
    if form == "lines":
        logs.write(path, [json.dumps(a) for a in answers])
    else:
        logs.write_json(path, answers if form == "list" else answers[0])
    run = run_of(path)
    both = [50, 25, 20, 15] if form != "one" else list(HISTOGRAM)
    counts = AcceptanceCounts(3, both)
    assert (run.num_steps, run.rounds) == (3, sum(both))
    assert run.accept_length == pytest.approx(counts.accept_length)
    assert run.joint == pytest.approx([a.rate for a in counts.joint])
    # The engine's own spec_accept_length counts the token of the prefill: not used, and told.
    assert run.accept_length < answers[0]["meta_info"]["spec_accept_length"]
    assert any("counts the first token" in words for words in run.refused)


def test_a_histogram_that_does_not_fit_gives_no_joint(logs, tmp_path):
    answer = logs.request(HISTOGRAM, 3)
    answer["meta_info"]["spec_correct_drafts_histogram"] = [1, 2, 3]
    run = run_of(logs.write_json(tmp_path / "a.json", answer))
    assert run.joint is None
    assert run.accept_length == pytest.approx(2.1)


def test_unknown_keys_of_meta_info_are_refused(logs, tmp_path):
    info = {"spec_verify_ct": 10, "completion_tokens": 21, "spec_accept_length": 2.1, "spec_news": 1}
    with pytest.raises(SlipstreamError, match="spec_news") as error:
        run_of(logs.write_json(tmp_path / "a.json", {"meta_info": info}))
    assert error.value.fault == "F12"


def test_server_info(logs, tmp_path):
    info = {
        "version": "0.5.23",
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 2,
        "speculative_algorithm": "EAGLE3",
        "launch_command": "launch_server.py --speculative-num-steps 1 --speculative-num-draft-tokens 16",
        "internal_states": [{"avg_spec_accept_length": 1.6}],
    }
    run = run_of(logs.write_json(tmp_path / "info.json", info))
    assert (run.version, run.num_steps, run.verify_width, run.asked.verify_width) == ("0.5.23", 1, 2, 16)
    assert any("warm-up and all traffic" in note for note in run.notes)


# ---- damaged or contradictory figures ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1e5", "1,60", "1.60.2", "99999999999999"])
def test_a_length_is_read_whole_or_not_at_all(logs, tmp_path, text):
    """Its first digit alone would be the length of a draft that never works."""
    broken = logs.decode(1.5, 0.5, 50).replace("accept len: 1.50", f"accept len: {text}")
    found = read.read_file(logs.write(tmp_path / "a.log", [broken, logs.decode(2.0, 0.5, 50)]))
    assert (found.section.lengths.lines, found.section.lengths.mean) == (1, 2.0)


@pytest.mark.parametrize(("text", "into"), [("50.00", "1e30"), ("#running-req: 1", "#running-req: 1.5")])
def test_a_speed_is_read_whole_or_not_at_all(logs, tmp_path, text, into):
    line = logs.decode(2.0, 0.5, 50)
    assert text in line
    found = read.read_file(logs.write(tmp_path / "a.log", [line.replace(text, into), *[line] * 2]))
    assert found.section.lengths.lines == 2


def test_settings_in_force_that_contradict_each_other_give_no_k(logs, tmp_path):
    """Steps 1 with 16 tokens cannot be in force of a chain; the printed pairs tell that 2 rows were verified."""
    lines = [logs.server_args(1, 16), *logs.sglang_log([1.6, 1.7, 1.6], 2, with_bonus=True)]
    run = run_of(logs.write(tmp_path / "a.log", lines))
    assert (run.num_steps, run.ceiling) == (1, 2)
    assert any(
        "steps 1, topk 1, tokens 16: in force, a chain has the width steps + 1" in words for words in run.refused
    )
    alone = [line.replace(", accept rate", ", rate") for line in lines]
    assert run_of(logs.write(tmp_path / "b.log", alone)).num_steps is None
    block = [logs.server_args(1, 16, algorithm="DFLASH"), *logs.sglang_log([1.6, 1.7], 16, with_bonus=True)]
    assert run_of(logs.write(tmp_path / "c.log", block)).num_steps == 15  # its width is not that of a chain of steps
    clean = [logs.server_args(3, 4), *logs.sglang_log(LENGTHS, 4, with_bonus=True)]
    assert not run_of(logs.write(tmp_path / "d.log", clean)).refused


def test_more_accepted_than_drafted_gives_no_k(logs, tmp_path):
    info = {"spec_verify_ct": 10, "spec_num_correct_drafts": 60, "spec_num_proposed_drafts": 10}
    run = run_of(logs.write_json(tmp_path / "a.json", {"meta_info": info}))
    assert (run.num_steps, run.acceptance_rate, run.joint) == (None, None, None)
    assert any("no round accepts more than it drafts" in words for words in run.refused)


def test_a_histogram_that_counts_other_drafts_gives_no_joint(logs, tmp_path):
    info = {"spec_verify_ct": 10, "spec_num_correct_drafts": 7, "spec_correct_drafts_histogram": [4, 6]}
    run = run_of(logs.write_json(tmp_path / "a.json", {"meta_info": info}))
    assert run.joint is None
    assert any("counts other accepted drafts than spec_num_correct_drafts" in words for words in run.refused)


@pytest.mark.parametrize("running", ["0.5", "1.5"])
def test_a_mean_of_running_requests_over_ranks_gives_no_speed(logs, tmp_path, running):
    page = [
        "sglang:spec_accept_length 1.8", "sglang:spec_num_steps 5", "sglang:spec_num_draft_tokens 6",
        "sglang:gen_throughput 54.8", f"sglang:num_running_reqs {running}",
    ]  # fmt: skip
    run = run_of(logs.write(tmp_path / "a.prom", page), baseline=90)
    assert (run.round_ms, run.break_even) == (None, None)
    assert any(f"{running} running, as a mean over ranks" in note for note in run.notes)


def test_counters_below_zero_are_damaged(logs, tmp_path):
    page = ['slipstream_rounds_total{num_steps="3"} -3', *logs.vllm_page([4, 3, 2, 1])]
    run = run_of(logs.write(tmp_path / "a.prom", page))
    assert run.engine == "vllm"
    assert "1 damaged lines are left out" in run.notes


def test_counts_by_position_that_cannot_be_give_no_joint(logs, tmp_path):
    """The first k drafts are accepted at least as often as the first k + 1, and all of them add up."""
    clean = run_of(logs.write(tmp_path / "a.prom", logs.vllm_page([4, 3, 2, 1])))
    assert clean.joint == pytest.approx((0.6, 0.3, 0.1))
    page = "\n".join(logs.vllm_page([4, 3, 2, 1]))
    first = next(line for line in page.splitlines() if "per_pos" in line and 'position="0"' in line)
    for value, words in (
        ("1.0", "rise with the position"),
        ("11.0", "rise with the position"),
        ("7.0", "add up to 11"),
    ):
        broken = page.replace(first, first.rpartition(" ")[0] + f" {value}")
        run = run_of(logs.write(tmp_path / "b.prom", broken.splitlines()))
        assert (run.joint, run.accept_length) == (None, clean.accept_length)
        assert any(words in refused for refused in run.refused)
    some = logs.request([4, 3, 2, 1], 3)  # a request without its histogram beside one that has it
    bare = {"meta_info": {k: v for k, v in some["meta_info"].items() if "histogram" not in k}}
    assert run_of(logs.write_json(tmp_path / "a.json", [some, bare])).joint == pytest.approx((0.6, 0.3, 0.1))
    log = [line.replace("0.600, 0.300, 0.100", "0.100, 0.300, 0.600") for line in logs.vllm_lines([4, 3, 2, 1])]
    assert run_of(logs.write(tmp_path / "a.log", logs.vllm_lines([4, 3, 2, 1]))).joint == pytest.approx((0.6, 0.3, 0.1))
    assert run_of(logs.write(tmp_path / "b.log", log)).joint is None

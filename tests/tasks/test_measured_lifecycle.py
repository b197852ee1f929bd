"""tune -> launch -> benchmark -> report with real servers of a tiny random target and its draft."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import benchmark, cleanup, convert, extract, gates, launch, report, train, tune
from slipstream.tasks.bench_pairs import resume_pairs
from slipstream.tasks.manifest import read_json
from slipstream.tasks.process import STATE_SUFFIX, group_members, read_record
from slipstream.tasks.stage import Stage, run_stage

NUM_STEPS = 2


def write_prompts(path: Path) -> Path:
    """The held-out chats of the tiny pipeline, by the ids that its evaluation knows."""
    lines = [{"id": f"chat-{i}", "category": "words", "turns": [f"tell me about the number {i}"]} for i in (8, 9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def fake_parity(workdir, deployment):
    def run(context):
        found = {
            "slots": [{"slot": 1, "share": 0.01}, {"slot": 2, "share": 0.002}],
            "logits": {"share": 0.0, "error_ratio": 1.0},
            "acceptance": {},
        }
        (context.out / "parity.json").write_text(json.dumps(found))
        return {}

    run_stage(Stage("parity", 1, ("convert",), (), run), deployment, workdir)


@pytest.fixture(scope="module")
def made(pipeline, chats, tiny, tmp_path_factory):
    """The tiny pipeline up to convert, with a deployment that measures little."""
    root = tmp_path_factory.mktemp("measured")
    prompts = write_prompts(root / "prompts.jsonl")
    before = pipeline.make_pipeline(
        root,
        chats,
        tiny,
        data={"prompts": str(prompts), "max_prompt_tokens": 64, "max_new_tokens": 32},
        training={"epochs": 1},
        speculation={"num_steps": NUM_STEPS},
        host={"threads": 1, "workdir": root / "work"},
        gates={"min_speedup": 0.01, "max_tau_gap": 1e6},  # a random draft on a tiny target wins nothing
        benchmark={
            "prompts": str(prompts),
            "num_prompts": 2,
            "max_new_tokens": 12,
            "pairs": 2,
            "warmup_prompts": 1,
            "compare_transformers": True,
        },
    )
    for stage in (extract.STAGE, train.STAGE, convert.STAGE):
        run_stage(stage, before.deployment, before.workdir)
    fake_parity(before.workdir, before.deployment)
    yield before
    cleanup.clean(before.workdir, before.deployment)


def run(made, stage, listener=None):
    return run_stage(stage, made.deployment, made.workdir, listener)


@pytest.fixture(scope="module")
def measured(made, pipeline):
    """Stage name -> result, of tune, launch, benchmark, report; the launched server still runs."""
    listener = pipeline.Listener()
    results = {stage.name: run(made, stage, listener) for stage in (tune.STAGE, launch.STAGE, benchmark.STAGE)}
    results["report"] = run(made, report.STAGE, listener)
    return results


def test_benchmark_measures_both_sides_of_every_pair(measured):
    bench = read_json(measured["benchmark"].dir / benchmark.FIGURES)
    assert (bench["served_num_steps"], bench["num_steps"]) == (NUM_STEPS, NUM_STEPS)
    assert bench["speedup"]["pairs"] == 4  # two prompts, twice
    assert bench["baseline"]["requests"] == bench["speculation"]["requests"] == 4
    assert bench["baseline"]["tokens_per_chunk"] == pytest.approx(1.0)
    assert 1 <= bench["speculation"]["tokens_per_chunk"] <= NUM_STEPS + 1
    for side in ("baseline", "speculation"):
        for name in ("ttft_ms", "itl_ms", "tpot_ms"):
            assert bench[side][name]["count"] > 0
            assert bench[side][name]["p50"] <= bench[side][name]["p95"] <= bench[side][name]["p99"]
    assert bench["settings"]["baseline"]["num_steps"] == 0
    assert bench["settings"]["speculation"]["verify_width"] == NUM_STEPS + 1


def test_answers_are_the_same_with_and_without_speculation(measured):
    bench = read_json(measured["benchmark"].dir / benchmark.FIGURES)
    assert bench["row_invariance"]["invariant"]
    assert bench["differing_prompts"] == []


def test_round_is_split_and_its_terms_give_the_measured_speed(measured):
    bench = read_json(measured["benchmark"].dir / benchmark.FIGURES)
    option, base, spec = bench["round"], bench["baseline"], bench["speculation"]
    assert option["draft_ms"] > 0
    assert option["verify_ms"] > 0
    assert option["draft_ms"] + option["verify_ms"] + option["rest_ms"] == pytest.approx(option["round_ms"])
    assert option["break_even"] == pytest.approx(option["round_ms"] / option["plain_step_ms"])
    assert option["speedup"] == pytest.approx(spec["tokens_per_second"] / base["tokens_per_second"])
    counts = bench["acceptance"]
    assert counts["accept_length"] == pytest.approx(1 + sum(j["rate"] for j in counts["joint"]))


def test_prediction_is_for_the_very_prompts_of_the_benchmark(measured):
    bench = read_json(measured["benchmark"].dir / benchmark.FIGURES)
    assert bench["comparison"]["same_prompts"]
    assert bench["replayed"]["num_steps"] == NUM_STEPS


def test_transformers_was_measured_in_the_same_run(measured):
    assert measured["benchmark"].figures["transformers_ratio"] > 0


def test_second_server_is_gone_and_the_launched_one_is_not(made, measured):
    assert read_record(made.workdir / f"{benchmark.OTHER}{STATE_SUFFIX}") is None
    record = read_record(made.workdir / f"{benchmark.LAUNCHED}{STATE_SUFFIX}")
    assert group_members(record.identity)


def test_report_is_one_page_without_links_out(measured):
    page = (measured["report"].dir / report.PAGE).read_text()
    for link in ("http://", "https://", "<script", "<link", "@import", "url("):
        assert link not in page.replace(f"http://{'127.0.0.1'}", "")
    assert page.count("data:image/png;base64,") >= 4
    body = page[page.index("<body>") :]
    assert body.index('class="verdict') < body.index("<table>")  # the verdict comes first
    for word in ("break-even", "A_1", "Provenance", measured["benchmark"].name):
        assert word in body


def test_report_figures_hold_table_gates_and_markdown(measured):
    figures = measured["report"].figures
    names = [row["figure"] for row in figures["table"]]
    for name in ("tokens/s, one stream", "accept length / ceiling", "joint acceptance", "ms a round", "parity"):
        assert name in names
    judged = {gate["name"]: gate["status"] for gate in figures["gates"]}
    assert judged["speed against no speculation"] == "pass"
    assert judged["same answers with and without speculation"] == "pass"
    gates.require(figures["gates"])
    assert figures["verdict"] in figures["markdown"]


def test_second_run_skips_what_is_measured(made, measured):
    assert [run(made, stage).status for stage in (tune.STAGE, benchmark.STAGE, report.STAGE)] == ["skipped"] * 3


def test_changed_gate_is_judged_without_a_new_measurement(made, measured):
    strict = made.deployment.model_copy(
        update={"gates": made.deployment.gates.model_copy(update={"min_speedup": 1000.0})}
    )
    assert run_stage(benchmark.STAGE, strict, made.workdir).status == "skipped"
    judged = run_stage(report.STAGE, strict, made.workdir)
    assert judged.figures["verdict"].startswith("FAILED (speed")
    with pytest.raises(gates.GatesFailed, match="F18") as error:
        gates.require(judged.figures["gates"])
    assert error.value.exit_code == 3


def test_server_killed_during_the_benchmark_is_named_and_the_next_run_goes_on(made, measured, pipeline):
    bench = made.deployment.benchmark.model_copy(update={"pairs": 6, "compare_transformers": False})
    longer = made.deployment.model_copy(update={"benchmark": bench})
    run_stage(tune.STAGE, longer, made.workdir)
    launched = run_stage(launch.STAGE, longer, made.workdir)
    file = made.workdir / "benchmark.partial" / benchmark.PAIRS

    def kill_after_first_pairs():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if file.exists() and file.read_bytes().count(b"\n") >= 2:
                os.kill(launched.figures["pid"], signal.SIGKILL)
                return
            time.sleep(0.01)

    killer = threading.Thread(target=kill_after_first_pairs)
    killer.start()
    with pytest.raises(SlipstreamError, match="ended during the benchmark") as error:
        run_stage(benchmark.STAGE, longer, made.workdir)
    killer.join()
    assert "run the same command again" in str(error.value)
    assert read_record(made.workdir / f"{benchmark.OTHER}{STATE_SUFFIX}") is None
    kept = list(resume_pairs(file))
    assert len(kept) >= 2

    run_stage(launch.STAGE, longer, made.workdir)
    result = run_stage(benchmark.STAGE, longer, made.workdir)
    assert result.figures["speedup"]["pairs"] == 12
    assert list(resume_pairs(result.dir / benchmark.PAIRS))[: len(kept)] == kept


def test_benchmark_without_its_server_says_what_to_do(made, measured):
    cleanup.clean(made.workdir, made.deployment)
    with pytest.raises(SlipstreamError, match="does not tell its settings"):
        run_stage(benchmark.STAGE, made.deployment, made.workdir, force=True)


def test_auto_measures_every_k_and_turns_speculation_off_for_a_useless_draft(made, measured, pipeline):
    speculation = made.deployment.speculation.model_copy(update={"num_steps": "auto", "max_num_steps": 3})
    auto = made.deployment.model_copy(update={"speculation": speculation})
    listener = pipeline.Listener()
    result = run_stage(tune.STAGE, auto, made.workdir, listener)
    choice = read_json(result.dir / tune.CHOICE)
    assert [option["num_steps"] for option in choice["options"]] == [0, 1, 2, 3]
    assert sorted(probe["num_steps"] for probe in choice["probes"]) == sorted([0, 1, 2, 3] * tune.PROBE_REPEATS)
    best = max(choice["options"], key=lambda option: option["tokens_per_second"])
    assert choice["num_steps"] == best["num_steps"]
    assert tune.chosen_num_steps(result.dir) == choice["num_steps"]

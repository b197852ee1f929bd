"""Building an engine from directories: what is checked, and that the effective settings are read from the engine."""

import json
import shutil

import pytest
import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.serving.engine_build import build_engine, engine_stats
from slipstream.engine.serving.engine_options import EngineOptions
from slipstream.engine.serving.trace_file import pack_trace, unpack_trace


def options(models, num_steps=2, **changes):
    values = {
        "device": "cpu",
        "max_context_tokens": 96,
        "max_running_requests": 2,
        "block_size_tokens": 8,
        "prefill_chunk_tokens": 32,
    }
    draft = str(models.draft) if num_steps else None
    return EngineOptions(str(models.target), draft, num_steps, **{**values, **changes})


def build(*arguments, **keywords):
    phases = []
    engine, settings = build_engine(options(*arguments, **keywords), phases.append)
    return engine, settings, phases


@pytest.fixture
def altered(tiny_server, tiny_models, tmp_path):
    """The models with keys of the draft's config.json changed."""

    def make(**changes):
        shutil.copytree(tiny_models.draft, tmp_path / "draft")
        file = tmp_path / "draft" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        return tiny_server.Models(tiny_models.target, tmp_path / "draft")

    return make


def test_settings_are_those_in_force(tiny_models):
    engine, settings, phases = build(tiny_models, dtype="float32", capture_slots=(3, 1))
    assert phases[0] == "loading the target"
    assert phases[-1] == "warming up"
    assert (settings["num_steps"], settings["verify_width"]) == (2, 3)
    assert settings["slots"] == ["slot_1", "slot_2", "slot_4"]
    assert settings["captured_slots"] == ["slot_1", "slot_2", "slot_4", "slot_3"]
    assert settings["dtype"] == "float32"
    assert settings["max_context_tokens"] == engine.config.max_context_tokens == 96
    told = ("device", "device_name", "graphs", "rounds_in_flight")
    assert [settings[key] for key in told] == ["cpu", "CPU", None, 0]
    assert set(settings["start_seconds"]) == {"load", "allocate and probe", "warm up and capture"}
    assert settings["kv_blocks"] == engine.runner.cache.layers[0].shape[0]
    assert settings["target"]["target"] == TargetIdentity.from_dir(tiny_models.target).target
    assert settings["versions"]["torch"] == torch.__version__
    assert json.loads(json.dumps(settings)) == settings  # plain JSON


def test_without_speculation_there_is_no_draft(tiny_models):
    engine, settings, _ = build(tiny_models, 0)
    assert (settings["num_steps"], settings["verify_width"], settings["slots"], settings["draft"]) == (0, 1, [], None)
    assert engine.runner.proposer is None


def test_fingerprints_tell_drafts_and_settings_apart(tiny_models, altered):
    one, two = build(tiny_models)[1], build(tiny_models, 1)[1]
    other = build(altered(max_position_embeddings=128))[1]
    assert len({one["fingerprint"], two["fingerprint"], other["fingerprint"]}) == 3
    assert one["draft"]["fingerprint"] == two["draft"]["fingerprint"] != other["draft"]["fingerprint"]
    assert build(tiny_models)[1]["fingerprint"] == one["fingerprint"]
    assert one["choose_steps"] is False


def test_files_that_nobody_reads_play_no_part(tiny_server, tiny_models, tmp_path):
    shutil.copytree(tiny_models.target, tmp_path / "target")
    (tmp_path / "target" / "gone.bin").symlink_to("nowhere")
    (tmp_path / "target" / "gone.json").symlink_to("nowhere")
    build(tiny_server.Models(tmp_path / "target", tiny_models.draft))


def test_the_warm_up_leaves_no_trace(tiny_models):
    engine, _, _ = build(tiny_models)
    stats = engine_stats(engine)
    assert stats["captures_after_ready"] == stats["compiles_after_ready"] == 0
    assert stats["steps"] == stats["rounds"] == stats["generated_tokens"] == 0
    assert stats["acceptance"] == stats["rounds_by_num_steps"] == []
    assert stats["free_blocks"] == stats["total_blocks"]
    assert not engine.has_work


@pytest.mark.parametrize("context", [2, 3, 17])
def test_the_smallest_contexts_can_be_warmed_up(tiny_models, context):
    build(tiny_models, max_context_tokens=context)


def test_a_row_that_changes_with_its_company_is_told(tiny_models, monkeypatch):
    from slipstream.engine.serving import engine_build
    from slipstream.kernels.row_invariance import RowInvariance

    monkeypatch.setattr(engine_build, "probe", lambda *_, **__: RowInvariance(False, "linear 3x4 differs at 2 rows"))
    told = build(tiny_models)[1]["row_invariance"]
    assert told == {"invariant": False, "detail": "linear 3x4 differs at 2 rows", "promise": engine_build.BY_GAP}


def test_a_draft_whose_context_is_too_short_is_refused(altered):
    with pytest.raises(SlipstreamError, match="a context of 90 tokens; the engine is to serve 96") as error:
        build(altered(max_position_embeddings=90))
    assert error.value.fault == "F14"


def test_a_draft_of_another_target_is_refused(tiny, tiny_server, tiny_models, tmp_path):
    other = tiny_server.make_models(tmp_path, tiny, seed=1)
    mixed = options(tiny_server.Models(other.target, tiny_models.draft))
    with pytest.raises(SlipstreamError, match="target weights or config") as error:
        build_engine(mixed, lambda _: None)
    assert error.value.fault == "F17"
    build_engine(mixed, lambda _: None, skip={"F17"})  # with the check off it passes: every shape fits


def test_a_draft_of_a_target_of_other_sizes_is_refused(tiny, tiny_server, tiny_models, tmp_path):
    tiny_server.save_tokenizer(tmp_path)
    tiny.save_tiny(tmp_path, vocab_size=259, num_hidden_layers=5)
    with pytest.raises(SlipstreamError, match="layers of the target 4") as error:
        build_engine(options(tiny_server.Models(tmp_path, tiny_models.draft)), lambda _: None, skip={"F17"})
    assert error.value.fault == "F8"


@pytest.mark.parametrize(
    ("num_steps", "draft", "words"),
    [(2, None, "but there is no draft"), (0, "some", "but num_steps is 0"), (9, "some", "num_steps = 9")],
)
def test_contradicting_options_are_refused_before_anything_is_loaded(num_steps, draft, words):
    with pytest.raises(SlipstreamError, match=words):
        build_engine(EngineOptions("/nowhere", draft, num_steps), lambda _: None)


def test_a_trace_survives_the_journey(tiny_models):
    from slipstream.engine.engine import Request
    from slipstream.engine.sampling_params import SamplingParams

    engine, _, _ = build(tiny_models)
    for prompt, limit in (([5, 6, 7, 8], 10), ([5], 1)):  # the second has no round
        engine.add_request(Request("r", prompt, SamplingParams(max_tokens=limit, ignore_eos=True), trace=True))
        trace = None
        while engine.has_work:
            for output in engine.step():
                trace = output.trace or trace
        back = unpack_trace(pack_trace(trace))
        assert back.token_ids == trace.token_ids
        assert torch.equal(back.teacher, trace.teacher)
        assert torch.equal(back.target_argmax, trace.target_argmax)
        assert set(back.states) == set(trace.states) == {"slot_1", "slot_2", "slot_4"}
        assert all(torch.equal(back.states[name], trace.states[name]) for name in trace.states)
        assert bool(trace.rounds) == (limit > 1)
        for mine, theirs in zip(back.rounds, trace.rounds, strict=True):
            assert (mine.start, mine.num_valid, mine.accepted) == (theirs.start, theirs.num_valid, theirs.accepted)
            assert torch.equal(mine.draft_tokens, theirs.draft_tokens)
            assert torch.equal(mine.draft_logits, theirs.draft_logits)

"""Stage extract, on a tiny target: what is stored is what the engine captures, and a killed run goes on."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.hidden_store import HiddenStateStore, StoreWriter
from slipstream.engine.loader import load_target
from slipstream.engine.runner import capture_states
from slipstream.tasks import extract
from slipstream.tasks.stage import run_stage


def test_the_store_holds_what_the_engine_captures_and_transformers_computes(finished):
    made, results, _ = finished
    store = HiddenStateStore(results["extract"].dir / "store")
    assert store.spec.slots == ("slot_1", "slot_2", "slot_3")
    assert (store.spec.teacher_slot, store.spec.prenorm) == ("slot_4", True)
    assert store.spec.identity == TargetIdentity.from_dir(made.model_dir)
    assert store.conversation_ids() == [r.id for r in made.records]
    assert store.conversation_ids("holdout") == ["chat-8", "chat-9"]
    target = load_target(made.model_dir, "float32")
    reference = AutoModelForCausalLM.from_pretrained(made.model_dir, dtype=torch.float32)
    for record in made.records:
        states = store.read(record.id, token_ids=record.token_ids)
        assert states.loss_mask.int().tolist() == record.loss_mask
        assert states.teacher_start == record.prompt_tokens
        captured, last = capture_states(target, record.token_ids, made.deployment.capture.slots)
        assert all(torch.equal(states.slots[name], captured[name]) for name in store.spec.slots)
        assert torch.equal(states.teacher, last[record.prompt_tokens :])
        with torch.no_grad():
            out = reference(torch.tensor([record.token_ids]), output_hidden_states=True)
        for slot in made.deployment.capture.slots:
            torch.testing.assert_close(states.slots[f"slot_{slot}"], out.hidden_states[slot][0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            target.logits(states.teacher), out.logits[0, record.prompt_tokens :], rtol=1e-3, atol=1e-3
        )


def test_many_at_a_time_are_stored_as_one_after_the_other(finished):
    """What a GPU does, here on the CPU: the same states in the same order."""
    made, _, _ = finished
    target = load_target(made.model_dir, "float32")
    plan = extract.capture_plan(made.deployment, 4)
    one_by_one = list(extract.capture_all(target, made.records, plan, 16, None))
    together = list(extract.capture_all(target, made.records, plan, 16, 256))
    for alone, states in zip(one_by_one, together, strict=True):
        assert (states.conversation_id, states.split) == (alone.conversation_id, alone.split)
        assert states.teacher_start == alone.teacher_start
        assert torch.equal(states.teacher, alone.teacher)
        assert all(torch.equal(states.slots[name], alone.slots[name]) for name in alone.slots)


def test_figures_and_words(finished):
    _, results, listeners = finished
    figures = results["extract"].figures
    store = HiddenStateStore(results["extract"].dir / "store")
    assert figures["slots"] == ["slot_1", "slot_2", "slot_3"]
    assert (figures["train"], figures["holdout"], figures["left_out"], figures["resumed"]) == (8, 2, 0, 0)
    assert figures["tokens"] == store.num_tokens()
    assert figures["bytes"] == sum(p.stat().st_size for p in store.directory.glob("*.safetensors"))
    assert figures["teacher"] == {
        "conversations": 4,
        "positions": figures["teacher"]["positions"],
        "logits_error": 0.0,
        "argmax_differences": 0,
        "state_error": 0.0,
    }
    assert listeners["extract"].progressed[-1] == (store.num_tokens(), store.num_tokens())
    assert any("bytes a token" in text for text in listeners["extract"].said)


def test_auto_is_the_default_slots(pipeline, chats, tiny, tmp_path):
    made = pipeline.make_pipeline(tmp_path, chats, tiny, capture={"slots": "auto"})
    assert extract.capture_plan(made.deployment, 30).slots == (2, 15, 27)


def test_a_killed_run_goes_on(pipeline, chats, tiny, tmp_path, monkeypatch):
    made = pipeline.make_pipeline(tmp_path, chats, tiny)
    monkeypatch.setattr(StoreWriter.__init__, "__kwdefaults__", {"shard_bytes": 1, "skip": ()})
    calls: list[str] = []
    capture = extract.capture

    def dies_at_the_sixth(target, record, *rest):
        calls.append(record.id)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return capture(target, record, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(extract, "capture", dies_at_the_sixth)
        with pytest.raises(KeyboardInterrupt):
            run_stage(extract.STAGE, made.deployment, made.workdir)
    (made.workdir / "extract.partial" / "store" / "states-00005.safetensors.partial").write_bytes(b"torn")

    def counts(target, record, *rest):
        calls.append(record.id)
        return capture(target, record, *rest)

    monkeypatch.setattr(extract, "capture", counts)
    listener = pipeline.Listener()
    result = run_stage(extract.STAGE, made.deployment, made.workdir, listener)
    assert result.figures["resumed"] == 5
    assert calls[6:] == [r.id for r in made.records[5:]]
    assert "5 conversations of an interrupted run are kept, 5 remain" in listener.said
    assert len(list(HiddenStateStore(result.dir / "store"))) == 10
    assert not list(result.dir.rglob("*.partial"))
    assert run_stage(extract.STAGE, made.deployment, made.workdir).status == "skipped"


def test_conversations_without_a_supervised_slot_are_left_out_and_counted(pipeline, chats, tiny, tmp_path):
    made = pipeline.make_pipeline(tmp_path, chats, tiny)
    records = list(made.records)
    first, keep = records[0], records[0].prompt_tokens + 1
    records[0] = dataclasses.replace(first, token_ids=first.token_ids[:keep], loss_mask=first.loss_mask[:keep])
    pipeline.run_before_extract(tmp_path / "other", made.deployment, made.model_dir, records)
    listener = pipeline.Listener()
    result = run_stage(extract.STAGE, made.deployment, tmp_path / "other", listener)
    assert (result.figures["left_out"], result.figures["conversations"]) == (1, 9)
    assert listener.warned == ["1 conversations left out: their answers are shorter than two tokens"]


def test_no_supervised_slot_at_all_stops_the_run(pipeline, chats, tiny, tmp_path):
    made = pipeline.make_pipeline(tmp_path, chats, tiny)
    records = [dataclasses.replace(r, loss_mask=[0] * len(r.loss_mask)) for r in made.records]
    pipeline.run_before_extract(tmp_path / "other", made.deployment, made.model_dir, records)
    with pytest.raises(SlipstreamError, match="none of 10 conversations") as caught:
        run_stage(extract.STAGE, made.deployment, tmp_path / "other")
    assert caught.value.fault == "F10"


def test_the_manifest_of_the_stage_is_json(finished):
    made, _, _ = finished
    manifest = json.loads((made.workdir / "extract" / "manifest.json").read_text())
    assert set(manifest["inputs"]) == {"resolve", "regenerate"}
    assert manifest["config"]["capture"] == {"slots": [1, 2, 3]}

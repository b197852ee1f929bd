"""Stage train, on a tiny target: what it reads is checked, a killed run goes on, the prediction is a replay."""

import dataclasses
import json

import pytest
import torch

from slipstream.engine.acceptance import AcceptanceCounts, ConversationRuns, run_lengths_to_tau
from slipstream.engine.drafts.eagle3.vocab import count_tokens, select_draft_vocab
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.hidden_store import HiddenStateStore
from slipstream.engine.training.checkpoint import load_checkpoint, load_network
from slipstream.engine.training.trainer import Trainer
from slipstream.tasks import extract, train
from slipstream.tasks.conversations import ConversationRecord
from slipstream.tasks.stage import run_stage


def evaluation_of(result) -> dict:
    return json.loads((result.dir / "evaluation.json").read_text())


def test_files(finished):
    _, results, _ = finished
    names = {p.relative_to(results["train"].dir).as_posix() for p in results["train"].dir.rglob("*") if p.is_file()}
    assert {"checkpoint/training.pt", "metrics.jsonl", "evaluation.json", "manifest.json"} <= names
    plots = {"plots/loss.png", "plots/joint_acceptance.png", "plots/replayed_tau.png", "plots/run_lengths.png"}
    assert plots <= names
    assert any(name.startswith("tensorboard/events") for name in names)


def test_the_draft_is_the_one_of_the_deployment(finished):
    made, results, _ = finished
    config = load_network(results["train"].dir / "checkpoint").config
    assert config.slots == (1, 2, 3)
    assert (config.draft_vocab_size, config.intermediate_size) == (120, 48)
    assert (config.num_heads, config.num_kv_heads) == (4, 2)  # the target's
    assert config.max_position == made.deployment.server.max_context_tokens
    assert config.target_num_layers == 4


def test_the_draft_vocabulary_comes_from_the_train_split_alone(finished):
    made, results, _ = finished
    network = load_network(results["train"].dir / "checkpoint")

    def chosen(splits):
        own = [(torch.tensor(r.token_ids), r.mask) for r in made.records if r.split in splits]
        return select_draft_vocab(count_tokens(own, network.config.vocab_size), 120).d2t

    assert torch.equal(network.d2t, chosen({"train"}))
    shares = results["train"].figures["outside_vocabulary"]
    assert shares["train"] == 0.0  # 120 tokens hold all that was answered in training
    assert 0.0 <= shares["holdout"] < 1.0


def test_the_prediction_is_a_replay_of_the_run_lengths(finished):
    made, results, _ = finished
    evaluation = evaluation_of(results["train"])
    answers = evaluation["answers"]
    assert [a["conversation"] for a in answers] == ["chat-8", "chat-9"]
    for answer, record in zip(answers, made.records[-2:], strict=True):
        assert len(answer["run_lengths"]) == sum(record.loss_mask) - 1  # each answer token but the first
        assert not answer["ended_by_limit"]
    runs = [ConversationRuns(a["run_lengths"], a["ended_by_limit"]) for a in answers]
    assert [entry["num_steps"] for entry in evaluation["replayed"]] == list(range(9))
    for entry in evaluation["replayed"]:
        again = run_lengths_to_tau(runs, entry["num_steps"], evaluation["num_steps"])
        assert AcceptanceCounts.from_dict(entry) == again
        assert results["train"].figures["replayed"][str(entry["num_steps"])] == again.accept_length
    joint = results["train"].figures["joint_acceptance"]
    assert [j["step"] for j in joint] == [1, 2, 3]  # training.num_steps
    assert all({"hits", "rounds", "rate"} <= set(j) for j in joint)


def test_counts_and_a_coloured_sample_are_shown(finished):
    made, results, listeners = finished
    figures, said = results["train"].figures, listeners["train"].said
    expected = sum(sum(r.loss_mask) for r in made.records if r.split == "train")
    assert figures["supervised_tokens"] == expected
    answers = sum(len(train.answer_owners([r])) for r in made.records if r.split == "train")
    assert figures["supervised_slots"] == expected - 2 * answers + answers  # answer of n tokens: n - 1 slots, a - 1 ..
    assert any(f"{expected:,} of" in text for text in said)
    assert "[bold green]" in figures["sample"]
    assert figures["sample"] in said
    assert figures["teacher"]["logits_error"] < 1e-6
    assert any("K = 3: replayed accept length" in text for text in said)


def test_other_tokens_than_greedy_ones_are_warned_of(finished):
    """The random words of this pipeline are no answers of its target, and the stage notices."""
    _, results, listeners = finished
    assert results["train"].figures["greedy_share"] < 0.5
    assert any("were they made by another target?" in text for text in listeners["train"].warned)


def record(mask: list[int], finish_reason: str) -> ConversationRecord:
    return ConversationRecord("c", "words", "holdout", list(range(len(mask))), mask, 0, finish_reason)


@pytest.mark.parametrize(
    ("mask", "finish_reason", "cut"),
    [
        ([0, 0, 1, 1, 1], "stop", [False]),
        ([0, 0, 1, 1, 1], "length", [True]),
        ([0, 1, 1, 1, 0, 1, 1], "length", [False, True]),
        ([0, 1, 1, 1, 0, 0, 1], "length", [False]),  # the cut answer has one token, and no slot
        ([0, 1, 0, 1, 1], "stop", [False]),
    ],
)
def test_which_answers_a_limit_ended(mask, finish_reason, cut):
    owners = train.answer_owners([record(mask, finish_reason)])
    assert [by_limit for _, by_limit in owners] == cut


def test_a_killed_run_goes_on_to_the_same_draft(pipeline, chats, tiny, tmp_path, monkeypatch):
    once = pipeline.make_pipeline(tmp_path / "once", chats, tiny)
    twice = pipeline.make_pipeline(tmp_path / "twice", chats, tiny)
    for made in (once, twice):
        run_stage(extract.STAGE, made.deployment, made.workdir)
    run_stage(train.STAGE, once.deployment, once.workdir)

    step = Trainer._train_step

    def dies_at_the_fourth(self):
        if self.step == 3:
            self._save()
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", dies_at_the_fourth)
        with pytest.raises(KeyboardInterrupt):
            run_stage(train.STAGE, twice.deployment, twice.workdir)
    listener = pipeline.Listener()
    run_stage(train.STAGE, twice.deployment, twice.workdir, listener)
    assert any(text.startswith("goes on at step 3") for text in listener.said)
    masters = [load_checkpoint(made.workdir / "train" / "checkpoint")["optimizer"]["masters"] for made in (once, twice)]
    assert all(torch.equal(masters[0][name], masters[1][name]) for name in masters[0])
    assert evaluation_of_dir(once) == evaluation_of_dir(twice)


def evaluation_of_dir(made) -> dict:
    return json.loads((made.workdir / "train" / "evaluation.json").read_text())


def test_without_held_out_conversations_there_is_no_prediction(pipeline, chats, tiny, tmp_path):
    made = pipeline.make_pipeline(tmp_path, chats, tiny)
    records = [dataclasses.replace(r, split="train") for r in made.records]
    pipeline.run_before_extract(tmp_path / "other", made.deployment, made.model_dir, records)
    run_stage(extract.STAGE, made.deployment, tmp_path / "other")
    with pytest.raises(SlipstreamError, match="no conversation of the holdout split"):
        run_stage(train.STAGE, made.deployment, tmp_path / "other")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_extract_and_train_on_a_gpu(pipeline, chats, tiny, tmp_path):
    """States and held-out run lengths are the CPU's, but where fp32 in another order decides."""
    results = {}
    for device in ("cpu", "cuda"):
        chosen = {"server": {"device": device}, "training": {"device": device}}
        made = pipeline.make_pipeline(tmp_path / device, chats, tiny, **chosen)
        stored = run_stage(extract.STAGE, made.deployment, made.workdir)
        result = run_stage(train.STAGE, made.deployment, made.workdir)
        assert result.figures["teacher"]["logits_error"] < 1e-3
        results[device] = (HiddenStateStore(stored.dir / "store"), evaluation_of(result), result.figures)
    (cpu, on_cpu, cpu_figures), (gpu, on_gpu, gpu_figures) = results["cpu"], results["cuda"]
    for mine, other in zip(gpu, cpu, strict=True):
        assert (mine.conversation_id, mine.teacher_start) == (other.conversation_id, other.teacher_start)
        torch.testing.assert_close(mine.teacher, other.teacher, rtol=1e-3, atol=1e-3)
        for name, state in other.slots.items():
            torch.testing.assert_close(mine.slots[name], state, rtol=1e-3, atol=1e-3)
    assert gpu_figures["steps"] == cpu_figures["steps"]
    assert gpu_figures["loss"] == pytest.approx(cpu_figures["loss"], rel=0.02)
    lengths = [[length for a in e["answers"] for length in a["run_lengths"]] for e in (on_cpu, on_gpu)]
    assert sum(a != b for a, b in zip(*lengths, strict=True)) <= 0.1 * len(lengths[0])

"""The training run: reaches a known optimum, goes on exactly where it was cut, refuses what cannot be trained."""

import dataclasses
import json
import math

import pytest
import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.training.checkpoint import FILE_NAME, load_checkpoint, load_network
from slipstream.engine.training.data import ConversationList
from slipstream.engine.training.evaluate import Evaluator
from slipstream.engine.training.log import plot_curves, read_metrics
from slipstream.engine.training.settings import TrainingSettings
from slipstream.engine.training.trainer import Trainer

SETTINGS = TrainingSettings(
    num_steps=3,
    epochs=3,
    max_seconds=None,
    learning_rate=1e-2,
    warmup_fraction=0.04,
    weight_decay=0.0,
    grad_clip_norm=1.0,
    batch_tokens=40,
    step_loss_decay=0.8,
    seed=0,
    checkpoint_every_seconds=30.0,
    hits_every_steps=2,
    dtype="float32",
    device="cpu",
)


def make_trainer(draft_tools, out, settings=SETTINGS, **options) -> Trainer:
    network = draft_tools.make_network(dtype=settings.torch_dtype)
    teacher = draft_tools.make_teacher(network)
    source = ConversationList(options.pop("conversations", None) or draft_tools.toy_conversations(12))
    return Trainer(network, teacher, source, settings, out, **options)


def test_loss_reaches_the_teachers_entropy(draft_tools, tmp_path):
    settings = dataclasses.replace(SETTINGS, epochs=200, num_steps=2, batch_tokens=400)
    trainer = make_trainer(draft_tools, tmp_path, settings)
    entropies, unigrams = [], []
    for c in (trainer.source[i] for i in range(len(trainer.source.lengths))):
        p = trainer.teacher.probabilities(c.teacher[1:-1])  # teachers of step 1: positions 3 .. T - 2
        entropies.append(-(p * p.log()).sum(-1))
        unigrams.append(p)
    entropy = float(torch.cat(entropies).mean())
    marginal = torch.cat(unigrams).mean(0)
    without_inputs = float(-(marginal * marginal.log()).sum())
    assert without_inputs - entropy > 0.3  # there is something to learn
    trainer.run()
    steps = [row["step_loss"] for row in read_metrics(tmp_path) if "step_loss" in row]
    assert steps[0][0] > without_inputs
    assert entropy - 1e-3 < steps[-1][0] < entropy + 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interrupted_and_resumed_equals_uninterrupted(draft_tools, tmp_path, dtype):
    settings = dataclasses.replace(SETTINGS, dtype=dtype)
    whole = make_trainer(draft_tools, tmp_path / "whole", settings)
    result = whole.run()
    assert result.finished
    for cut in (1, 4, 5):
        trainer = make_trainer(draft_tools, tmp_path / "cut", settings)
        stopped = trainer.run(should_stop=lambda t=trainer, c=cut: t.step >= c)
        assert not stopped.finished
    resumed = make_trainer(draft_tools, tmp_path / "cut", settings)
    assert resumed.step == 5
    final = resumed.run()
    assert final.steps == result.steps
    assert final.loss == result.loss
    ours, theirs = whole.optimizer.state_dict(), resumed.optimizer.state_dict()
    for name, master in ours["masters"].items():
        assert torch.equal(master, theirs["masters"][name]), name
    for index, moments in ours["adamw"]["state"].items():
        for key, value in moments.items():
            assert torch.equal(value, theirs["adamw"]["state"][index][key])
    for name, tensor in whole.network.state_dict().items():
        assert torch.equal(tensor, resumed.network.state_dict()[name])
    timeless = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(tmp_path / d)]
        for d in ("whole", "cut")
    ]
    assert timeless[0] == timeless[1]


def test_killed_between_checkpoints_loses_only_what_came_after(draft_tools, tmp_path):
    """A kill leaves metrics of steps that the checkpoint does not know, and half a line; the next run drops them."""
    make_trainer(draft_tools, tmp_path).run(should_stop=iter([False, False, True]).__next__)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "loss": 99.0}) + '\n{"step": 5, "lo')
    result = make_trainer(draft_tools, tmp_path).run()
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, result.steps + 1))
    assert all(row["loss"] < 50 for row in rows)


def test_masters_keep_what_bfloat16_would_lose(draft_tools, tmp_path):
    settings = dataclasses.replace(SETTINGS, dtype="bfloat16", learning_rate=1e-5)
    trainer = make_trainer(draft_tools, tmp_path, settings)
    before = {n: p.clone() for n, p in trainer.optimizer.masters.items()}
    trainer.run()
    moved = [n for n, p in trainer.optimizer.masters.items() if not torch.equal(p, before[n])]
    assert len(moved) == len(before)
    for name, parameter in trainer.network.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, trainer.optimizer.masters[name].to(torch.bfloat16))


def test_budget_in_seconds_ends_the_run_and_the_schedule(draft_tools, tmp_path):
    settings = dataclasses.replace(SETTINGS, epochs=10_000, max_seconds=1.0)
    trainer = make_trainer(draft_tools, tmp_path, settings)
    result = trainer.run()
    assert result.finished
    assert result.steps < len(trainer.plan)
    rates = [row["learning_rate"] for row in read_metrics(tmp_path)]
    assert max(rates) > 0.5 * settings.learning_rate
    assert rates[-1] < max(rates)
    again = make_trainer(draft_tools, tmp_path, settings)
    assert again.seconds >= 1.0
    assert again.run().steps == result.steps  # nothing is left to do


def test_rates_rise_then_fall_to_zero():
    settings = dataclasses.replace(SETTINGS, learning_rate=2.0, warmup_fraction=0.1)
    assert settings.rate_at(0.05) == pytest.approx(1.0)
    assert settings.rate_at(0.1) == pytest.approx(2.0)
    assert settings.rate_at(0.55) == pytest.approx(1.0)
    assert settings.rate_at(1.0) == pytest.approx(0.0, abs=1e-12)


def test_all_zero_masks_are_refused(draft_tools, tmp_path):
    blank = [draft_tools.make_conversation(i, 9, []) for i in range(3)]
    with pytest.raises(SlipstreamError, match="F10: no supervised slot in 3 conversations"):
        make_trainer(draft_tools, tmp_path, conversations=blank)
    one = [*blank, draft_tools.make_conversation(4, 9, [(3, 9)])]
    trainer = make_trainer(draft_tools, tmp_path, conversations=one)
    assert trainer.supervised == 5  # slots 2..6
    assert trainer.run().skipped_conversations == 3


def test_features_of_other_width_are_refused(draft_tools, tmp_path):
    c = draft_tools.make_conversation(4, 9, [(3, 9)])
    narrow = dataclasses.replace(c, features=c.features[:, : 2 * draft_tools.HIDDEN])
    with pytest.raises(SlipstreamError, match="features are 32 wide"):
        make_trainer(draft_tools, tmp_path, conversations=[narrow])


def test_checkpoint_of_another_run_is_refused(draft_tools, tmp_path):
    make_trainer(draft_tools, tmp_path).run(should_stop=lambda: True)
    other = dataclasses.replace(SETTINGS, learning_rate=5e-3)
    with pytest.raises(SlipstreamError, match="another settings"):
        make_trainer(draft_tools, tmp_path, other)
    with pytest.raises(SlipstreamError, match="another data"):
        make_trainer(draft_tools, tmp_path, data_fingerprint="other")


def test_damaged_checkpoint_is_named(draft_tools, tmp_path):
    make_trainer(draft_tools, tmp_path).run(should_stop=lambda: True)
    path = tmp_path / "checkpoint" / FILE_NAME
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(SlipstreamError, match="cannot be read"):
        load_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(SlipstreamError, match="no training checkpoint"):
        load_network(tmp_path / "nowhere")


def test_network_of_a_checkpoint_is_the_trained_one(draft_tools, tmp_path):
    trainer = make_trainer(draft_tools, tmp_path, dataclasses.replace(SETTINGS, dtype="bfloat16"))
    trainer.run()
    network = load_network(tmp_path / "checkpoint")
    assert network.config == trainer.network.config
    for name, tensor in trainer.network.state_dict().items():
        assert torch.equal(network.state_dict()[name], tensor), name


def test_a_loss_that_is_no_number_stops_the_run(draft_tools, tmp_path):
    c = draft_tools.make_conversation(4, 9, [(3, 9)])
    c.features[2, 0] = math.nan
    with pytest.raises(SlipstreamError, match="the loss is nan at step 1"):
        make_trainer(draft_tools, tmp_path, conversations=[c]).run()


def test_progress_evaluation_and_files(draft_tools, tmp_path):
    calls = []
    network = draft_tools.make_network()
    teacher = draft_tools.make_teacher(network)
    evaluator = Evaluator(ConversationList(draft_tools.toy_conversations(3)), teacher, num_steps=4)
    trainer = make_trainer(
        draft_tools,
        tmp_path,
        evaluator=evaluator,
        evaluations=2,
        progress=lambda done, total, **fields: calls.append((done, total, fields)),
    )
    result = trainer.run()
    assert len(calls) == result.steps
    assert calls[-1][0] == calls[-1][1] == 1.0
    assert {"step", "loss", "supervised_slots", "learning_rate"} <= calls[0][2].keys()
    rows = read_metrics(tmp_path)
    held_out = [row["heldout_joint_acceptance"] for row in rows if "heldout_joint_acceptance" in row]
    assert [len(h) for h in held_out] == [3, 4]  # in between as trained, at the end the evaluator's K
    assert held_out[-1] == result.evaluation.joint_acceptance
    assert result.supervised_slots == sum(row["supervised_slots"][0] for row in rows[: len(trainer.plan) // 3])
    assert list((tmp_path / "tensorboard").iterdir())
    plots = plot_curves(tmp_path, tmp_path / "plots")
    assert {p.name for p in plots} == {"loss.png", "joint_acceptance.png"}
    assert all(p.stat().st_size > 5000 for p in plots)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_steps": 0}, "num_steps is 0"),
        ({"dtype": "int8"}, "int8"),
        ({"device": "tpu"}, "training.device is 'tpu'"),
        ({"max_seconds": 0.0}, "max_seconds"),
    ],
)
def test_settings_without_meaning_are_refused(changes, words):
    with pytest.raises(SlipstreamError, match=words):
        dataclasses.replace(SETTINGS, **changes)

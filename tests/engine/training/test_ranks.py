"""Training over ranks (gloo): the same draft as one process makes, the same bits on all, whatever each rank holds."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from slipstream.engine.training.checkpoint import load_checkpoint, load_network
from slipstream.engine.training.data import ConversationList, collate, plan_batches, slot_counts
from slipstream.engine.training.evaluate import Evaluator
from slipstream.engine.training.log import read_metrics
from slipstream.engine.training.ranks import cut_batch
from slipstream.engine.training.settings import TrainingSettings

JOBS = Path(__file__).with_name("training_jobs.py")
SETTINGS = TrainingSettings(
    num_steps=3,
    epochs=3,
    max_seconds=None,
    learning_rate=3e-3,
    warmup_fraction=0.1,
    weight_decay=0.01,
    grad_clip_norm=1.0,
    batch_tokens=60,
    step_loss_decay=0.8,
    seed=0,
    checkpoint_every_seconds=1e-9,  # after every step: that is when ranks are compared
    hits_every_steps=2,
    dtype="float32",
    device="cpu",
)


@pytest.fixture(scope="module")
def conversations(draft_tools):
    """Of many lengths: batches of 60 tokens hold one to four of them, the last ones are not full."""
    made = [draft_tools.toy_conversations(13, length)[index] for index, length in enumerate((14, 17, 9, 30, 12) * 2)]
    return [*made, *draft_tools.make_conversations()]


@pytest.fixture(scope="module")
def train(ranks, conversations):
    def run(size, out, settings=SETTINGS, **options):
        return ranks.run(size, JOBS, "train", settings, str(out), conversations, options)

    return run


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    return train(1, out)[0], read_metrics(out)


def same(ours, theirs, bound):
    return all(torch.allclose(ours[name], theirs[name], rtol=0, atol=bound) for name in theirs)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_train_the_draft_of_one_process(train, alone, tmp_path, size):
    one, metrics = alone
    first, *others = train(size, tmp_path / "a")
    assert first["steps"] == one["steps"] >= 15
    assert same(first["masters"], one["masters"], 5e-6)
    rows = read_metrics(tmp_path / "a")
    assert len(rows) == len(metrics)
    for ours, theirs in zip(rows, metrics, strict=True):
        for name, value in theirs.items():
            if name not in ("seconds", "joint_acceptance", "heldout_joint_acceptance"):
                assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (name, theirs["step"])
        assert ours.keys() == theirs.keys()
    for other in others:
        assert other["steps"] == first["steps"]
        assert all(torch.equal(other["masters"][name], first["masters"][name]) for name in first["masters"])
    # the same ranks again: the same bits
    again = train(size, tmp_path / "b")[0]
    assert all(torch.equal(again["masters"][name], first["masters"][name]) for name in first["masters"])
    assert [row["loss"] for row in read_metrics(tmp_path / "b") if "loss" in row] == [
        row["loss"] for row in rows if "loss" in row
    ]


def test_ranks_read_what_their_host_holds_and_nothing_else(train, alone, conversations, tmp_path):
    one, _ = alone
    holders = [(0,) if index % 3 == 0 else (0, 1) for index in range(len(conversations))]
    first, *_ = train(4, tmp_path, nodes=(0, 0, 1, 1), holders=holders)
    assert same(first["masters"], one["masters"], 5e-6)


def test_rank_0_alone_evaluates_and_writes_and_its_figures_are_those_of_its_draft(train, draft_tools, tmp_path):
    first, *others = train(4, tmp_path)
    assert first["evaluations"] == 3
    assert [other["evaluations"] for other in others] == [0, 0, 0]
    network = load_network(tmp_path / "checkpoint")
    source = ConversationList(draft_tools.toy_conversations(3, 20))
    assert first["evaluation"] == Evaluator(source, draft_tools.make_teacher(network), 3).run(network)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "metrics.jsonl", "tensorboard"]


def test_a_run_goes_on_with_another_number_of_ranks(train, alone, tmp_path):
    one, _ = alone
    done = 0
    for size, stop in ((4, 5), (1, 9), (2, 12), (4, None)):
        first = train(size, tmp_path, stop_at=stop)[0]
        done += first["trained"]
        assert load_checkpoint(tmp_path / "checkpoint")["step"] == (stop or one["steps"])
    assert done == one["steps"]  # no step was made twice
    assert same(first["masters"], one["masters"], 5e-6)


def test_rank_0s_clock_ends_all_ranks_after_the_same_step(train, tmp_path):
    settings = dataclasses.replace(SETTINGS, epochs=500, max_seconds=1.0)
    results = train(4, tmp_path, settings, slow=True)
    assert len({result["steps"] for result in results}) == 1
    assert results[0]["steps"] == load_checkpoint(tmp_path / "checkpoint")["step"] < 2500
    rates = [row["learning_rate"] for row in read_metrics(tmp_path) if "learning_rate" in row]
    assert rates[-1] < max(rates)
    assert all(torch.equal(results[3]["masters"][n], master) for n, master in results[0]["masters"].items())


def test_weights_that_differ_are_found_before_they_are_written(train, tmp_path):
    first, second = train(2, tmp_path, harm=True)
    assert first == second
    assert "after step 2 the weights of ranks [1] are not those of rank 0" in first
    assert load_checkpoint(tmp_path / "checkpoint")["step"] == 1


def test_what_is_supervised_is_what_a_batch_holds(draft_tools):
    conversations = [*draft_tools.make_conversations(), draft_tools.make_conversation(9, 8, [(0, 5), (6, 8)])]
    counts = slot_counts(ConversationList(conversations), 5)
    for conversation, row in zip(conversations, counts, strict=True):
        assert row.tolist() == [len(rows) for rows in collate([conversation], 5).rows]


def test_a_batch_is_cut_by_tokens_and_by_who_holds_what():
    drawn = random.Random(0)
    lengths = [drawn.randint(10, 60) for _ in range(400)]
    for size in (1, 2, 3, 8):
        for batch in plan_batches(range(400), lengths, 2048, 0, 0):
            parts = cut_batch(batch, lengths, None, (0,) * size)
            assert sorted(i for part in parts for i in part) == sorted(batch)
            loads = [sum(lengths[i] for i in part) for part in parts]
            assert max(loads) - min(loads) <= max(lengths[i] for i in batch)
            assert all(part == [i for i in batch if i in part] for part in parts)
    # two hosts of two cards, the second holds two thirds: the first makes up for what falls unevenly
    nodes, holders = (0, 0, 1, 1), [(0, 1) if drawn.random() < 2 / 3 else (0,) for _ in lengths]
    worst = 0
    for batch in plan_batches(range(400), lengths, 2048, 0, 0):
        parts = cut_batch(batch, lengths, holders, nodes)
        assert all(1 in holders[i] for part in parts[2:] for i in part)
        loads = [sum(lengths[i] for i in part) for part in parts]
        worst = max(worst, max(loads) / (sum(loads) / 4))
    assert worst < 1.1
    assert cut_batch([5], lengths, None, (0, 0)) == [[5], []]

"""Reading ahead changes neither the order of the batches nor what is in them."""

import dataclasses
import threading

import pytest
import torch

from slipstream.engine.training.data import ConversationList
from slipstream.engine.training.prefetch import BatchStream

CPU = torch.device("cpu")
PLAN = [[i % 4, (i + 1) % 4] for i in range(30)]


class Watched(ConversationList):
    """Notes which threads read."""

    def __init__(self, conversations):
        super().__init__(conversations)
        self.threads = set()

    def __getitem__(self, index):
        self.threads.add(threading.current_thread().name)
        return super().__getitem__(index)


def collect(draft_tools, ahead, plan=PLAN):
    source = Watched(draft_tools.make_conversations())
    with BatchStream(source, plan, 3, CPU, ahead=ahead) as stream:
        return list(stream), source.threads


@pytest.mark.parametrize("ahead", [1, 5, 100])
def test_batches_come_in_the_plans_order(draft_tools, ahead):
    plain, threads = collect(draft_tools, 0)
    assert threads == {threading.current_thread().name}
    early, threads = collect(draft_tools, ahead)
    assert threads
    assert threading.current_thread().name not in threads
    assert len(plain) == len(early) == len(PLAN)
    for a, b in zip(plain, early, strict=True):
        for field in dataclasses.fields(a):
            one, other = getattr(a, field.name), getattr(b, field.name)
            pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
            assert all(torch.equal(x, y) for x, y in pairs), field.name


def test_an_error_while_reading_reaches_the_training(draft_tools):
    plan = [[0], [1], [99], [2]]
    source = ConversationList(draft_tools.make_conversations())
    with BatchStream(source, plan, 3, CPU, ahead=2) as stream:
        batches = iter(stream)
        next(batches), next(batches)
        with pytest.raises(IndexError):
            next(batches)
    assert not [t for t in threading.enumerate() if t.name.startswith("batch")]


def test_rows_are_those_that_the_mask_names(draft_tools):
    for batch in collect(draft_tools, 0)[0]:
        for on, rows in zip(batch.supervised, batch.rows, strict=True):
            assert torch.equal(on.flatten().nonzero().squeeze(1), rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_reach_the_gpu_whole(draft_tools):
    source = ConversationList(draft_tools.make_conversations())
    with BatchStream(source, PLAN, 3, torch.device("cuda")) as stream:
        for plain, batch in zip(collect(draft_tools, 0)[0], stream, strict=True):
            assert batch.features.is_cuda
            assert torch.equal(batch.features.cpu(), plain.features)
            assert torch.equal(batch.teacher_rows.cpu(), plain.teacher_rows)
            assert [r.tolist() for r in batch.rows] == [r.tolist() for r in plain.rows]

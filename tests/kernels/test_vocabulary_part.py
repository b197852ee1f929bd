"""Sampling where each rank has a part of the vocabulary: the tokens of one device, and what is exchanged for them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.kernels.gpu import sampling as gpu
from slipstream.kernels.gpu.tiles import SHARED_BYTES
from slipstream.kernels.sampling import SamplingBatch, propose_tokens, sample
from slipstream.kernels.vocabulary_part import VocabularyPart

EXCHANGES = Path(__file__).with_name("exchanges.py")
WIDTHS = (150, 151)
V = sum(WIDTHS)


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 0


PLAIN = [Params(0.0), Params(0.8, seed=5), Params(1.3, seed=9), Params(0.0, 5, 0.1)]
FILTERED = [Params(0.8, 0, 0.9, seed=-7), Params(1.0, 3, 1.0, seed=2), Params(1.0, 50, 0.8, seed=4)]


class Group:
    """A process group whose ranks are threads; notes how many numbers each has sent to one other."""

    def __init__(self, rank, box, barrier):
        self.rank, self.box, self.barrier, self.sent = rank, box, barrier, []

    def alltoall_base(self, received, sent, _received_counts, sent_counts):
        self.sent.append(sent_counts[0])
        self.box[self.rank] = sent.split(sent_counts)
        self.barrier.wait(30)
        torch.cat([self.box[rank][self.rank] for rank in range(len(self.box))], out=received)
        self.barrier.wait(30)
        return SimpleNamespace(wait=lambda: None)


def on_all_ranks(widths, call):
    """call(part) of each rank, in threads: results, and the groups."""
    box, barrier = [None] * len(widths), threading.Barrier(len(widths))
    groups = [Group(rank, box, barrier) for rank in range(len(widths))]
    with ThreadPoolExecutor(len(widths)) as pool:
        parts = [VocabularyPart(rank, widths, group) for rank, group in enumerate(groups)]
        return list(pool.map(call, parts)), groups


def case(params, rows=2):
    """Logits [B, rows, V] with ties between the ranks, parameters, positions."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(params), rows, V, generator=generator).bfloat16()
    logits[0, 0, [20, 149, 150, 300]] = 9.0  # the lowest of equals is the first rank's
    logits[0, 1, [300, 170]] = 9.0
    positions = torch.randint(0, 500, (len(params), rows), generator=generator)
    return logits, SamplingBatch.from_params(params, list(range(len(params)))), positions


@pytest.mark.parametrize("widths", [WIDTHS, (101, 100, 100), (0, V)])
def test_an_integer_a_row_is_all_that_is_exchanged(widths):
    logits, batch, positions = case(PLAIN)
    expected = sample(logits, batch, positions)
    assert expected[0].tolist() == [20, 170]
    found, groups = on_all_ranks(widths, lambda part: sample(logits[..., part.ids], batch, positions, part=part))
    assert all(torch.equal(one, expected) for one in found)
    assert [group.sent for group in groups] == [[expected.numel()]] * len(widths)


@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
@pytest.mark.parametrize("widths", [(150, 151), (0, V), (V, 0)])
def test_what_is_no_number_wins_on_all_ranks_as_on_one(nan, widths):
    """Whatever its sign; an id behind the vocabulary, of a rank without columns, would end the engine."""
    logits, batch, positions = case(PLAIN)
    logits = logits.float()
    logits[..., [140, 160, 200]] = torch.tensor(nan)
    expected = sample(logits, batch, positions)
    assert set(expected.flatten().tolist()) == {140}
    found, _ = on_all_ranks(widths, lambda part: sample(logits[..., part.ids], batch, positions, part=part))
    assert all(torch.equal(one, expected) for one in found)
    arguments = (batch, positions[:, 0], torch.arange(V))
    found, _ = on_all_ranks(widths, lambda part: propose_tokens(logits[:, 0, part.ids], *arguments, part=part))
    assert all(one.tolist() == [140] * len(logits) for one in found)


def test_filters_count_over_the_whole_vocabulary():
    """Of filtered rows the largest, and of top-k's and top-p's cut eight bits four times; then the best of all rows."""
    logits, batch, positions = case(PLAIN + FILTERED)
    found, groups = on_all_ranks(WIDTHS, lambda part: sample(logits[..., part.ids], batch, positions, part=part))
    assert all(torch.equal(one, sample(logits, batch, positions)) for one in found)
    rows = 2 * len(FILTERED)
    assert groups[0].sent == [rows, *[rows * 2 * 256] * 8, positions.numel()]


def test_drafts_are_those_of_one_device():
    logits, batch, positions = case(PLAIN + FILTERED)
    target_ids = torch.arange(V) * 3 + 1
    arguments = (batch, positions[:, 0], target_ids, 2)
    expected = propose_tokens(logits[:, 0], *arguments)
    assert len(set(expected.tolist())) > 4
    found, groups = on_all_ranks(WIDTHS, lambda part: propose_tokens(logits[:, 0, part.ids], *arguments, part=part))
    assert all(torch.equal(one, expected) for one in found)
    assert groups[1].sent == [len(logits)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter: ranks one after the other")
def test_kernels_of_two_ranks_take_the_twins_tokens(load_test_module, monkeypatch):
    """Of rows without top-k and top-p; those with are in test_filters_of_ranks_kernels.py."""
    monkeypatch.setattr(gpu, "_TILE", 128)
    exchanges = load_test_module(EXCHANGES)
    logits, batch, positions = case(PLAIN)
    peers = exchanges.peers(2, "cpu")
    expected, epochs = sample(logits, batch, positions, 1), peers[0]._epochs.clone()

    def sampled(one, rank):
        part = VocabularyPart(rank, WIDTHS, one)
        return gpu.sample(logits[..., part.ids].contiguous(), batch, positions, 1, part)

    for tokens in exchanges.one_after_the_other(peers, sampled):
        assert torch.equal(tokens, expected)
    assert [one.lost() for one in peers] == [None, None]
    moved = (peers[0]._epochs - epochs).nonzero()[:, 0].tolist()  # one exchange a row, of a (score, id)
    assert moved == list(range(gpu.ITEMS - 1, 2 * len(PLAIN) * gpu.ITEMS, gpu.ITEMS))

    logits, batch, positions = case(PLAIN + FILTERED)  # of drafts all rows are without
    target_ids = torch.arange(V) * 3 + 1
    arguments = (batch, positions[:, 0].contiguous(), target_ids, 2)

    def proposed(one, rank):
        part = VocabularyPart(rank, WIDTHS, one)
        return gpu.propose_tokens(logits[:, 0, part.ids].contiguous(), *arguments, None, part)

    for tokens in exchanges.one_after_the_other(peers, proposed):
        assert torch.equal(tokens, propose_tokens(logits[:, 0], *arguments))


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles_and_the_last_stage_exchanges(capability, cross_compile):
    made = cross_compile(EXCHANGES, "compiled_sampling", capability)
    exchanging = {one["kernel"] for one in made if "st.relaxed.sys.global.b64" in one["ptx"]}
    assert exchanging == {"sum_kernel", "_pick_kernel"}
    assert all(one["shared"] <= SHARED_BYTES[capability] for one in made)

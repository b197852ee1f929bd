"""Top-k and top-p by kernels, each rank with its own columns: the tokens of one rank, and what is exchanged for them.

In the interpreter ranks are processes that share memory; on a card they are two streams.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.kernels.gpu.filters_of_ranks import ITEMS
from slipstream.kernels.gpu.peer_exchange import CAPACITY
from slipstream.kernels.sampling import SamplingBatch, sample

JOBS = Path(__file__).with_name("sampling_jobs.py")
# Exchanges of a row: its histogram's, candidates, range of keys, two searches, ties, the best.
MOST = {torch.bfloat16: 5 + 2 * 4, torch.float32: 5 + 2 * 8}


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 0


MIX = [
    Params(0.0),
    Params(0.8, seed=5),
    Params(0.8, 0, 0.9, seed=-7),
    Params(1.3, 40, 1.0, seed=9),
    Params(1.0, 50, 0.8, seed=2**62),
    Params(0.02, 0, 0.95, seed=3),
    Params(1.0, 1, 1.0, seed=8),
    Params(2.5, 2**63 - 1, 0.99, seed=4),
    Params(1.0, 0, 1e-9, seed=1),
]
Case = tuple[torch.Tensor, SamplingBatch, torch.Tensor]
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks share memory of the host")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exchange")


def agree(ranks: Any, directory: Path, widths: list[int], cases: list[Case], **sizes: int) -> None:
    """Holds the kernels of ranks with these columns against the twin with all."""
    from slipstream_tests_sampling_jobs import Sizes  # loaded by its path below

    found = ranks.run(len(widths), JOBS, "sample_parts", directory, Sizes(**sizes), widths, cases)
    for (logits, batch, positions), *of_ranks in zip(cases, *(tokens for tokens, _, _ in found), strict=True):
        expected = sample(logits, batch, positions, 1)
        for tokens in of_ranks:
            assert tokens.equal(expected)
    for _, moved, is_well in found:
        assert is_well
        assert moved == found[0][1]  # the same turns on all ranks
        assert max(moved) <= MOST[cases[0][0].dtype]


@pytest.fixture(autouse=True)
def _jobs(load_test_module: Any) -> None:
    load_test_module(JOBS)


def mixed(dtype: torch.dtype, vocab: int) -> Case:
    generator = torch.Generator().manual_seed(7)
    logits = (torch.randn(len(MIX), 1, vocab, generator=generator) * 1.5).to(dtype)
    positions = torch.randint(0, 5000, (len(MIX), 1), generator=generator)
    return logits, SamplingBatch.from_params(MIX, list(range(len(MIX)))), positions


@needs_interpreter
@pytest.mark.parametrize(("dtype", "candidates"), [(torch.float32, 8192), (torch.bfloat16, 8192), (torch.bfloat16, 6)])
def test_every_kind_of_row_is_the_twins(ranks: Any, directory: Path, dtype: torch.dtype, candidates: int) -> None:
    """6 candidates: nearly no row's fit, so that the search over all own columns is what decides."""
    case = mixed(dtype, 401)
    agree(ranks, directory, [200, 201], [case, case], candidates=candidates)


@needs_interpreter
def test_a_rank_may_have_nothing(ranks: Any, directory: Path) -> None:
    """No columns, or none near the cut."""
    logits, batch, positions = mixed(torch.bfloat16, 301)
    logits[..., 150:] -= 30
    agree(ranks, directory, [0, 150, 1, 150], [(logits, batch, positions)])


@needs_interpreter
@pytest.mark.parametrize("candidates", [8192, 3])
def test_ties_at_the_cut_are_those_of_the_lowest_ids(ranks: Any, directory: Path, candidates: int) -> None:
    """Few tokens, many draws, ties everywhere, within a rank and between them: one tie too many would soon be drawn."""
    rows, flat = 6 if candidates > 3 else 3, torch.zeros(20)
    steps = torch.tensor([1.0, 0, 1, 0, -0.0, 1, -1, -1, 0, 1] * 2)
    heavy_rest = torch.tensor([0.75] * 30 + [2.0] + [1.0] * 9 + [0.75] * 20)  # top-p is of what top-k leaves
    cases = []
    for logits, params in (
        (flat, Params(1.0, 0, 0.42)),
        (flat, Params(0.7, 3, 0.33)),
        (steps, Params(1.0, 0, 0.75)),
        (steps, Params(1.0, 9, 0.9)),
        (heavy_rest, Params(1.0, 10, 0.3)),
    ):
        batch = SamplingBatch.from_params([replace(params, seed=11)])
        cases.append((logits.expand(1, rows, -1).contiguous(), batch, torch.arange(rows)[None]))
    for vocab, widths in ((20, [9, 11]), (60, [33, 27])):
        of_size = [case for case in cases if case[0].shape[-1] == vocab]
        agree(ranks, directory, widths, of_size, candidates=candidates, tile=16, chunk=16)


@needs_interpreter
def test_a_bin_of_more_than_a_count_holds(ranks: Any, directory: Path) -> None:
    """70,000 logits of a rank in one bin, and a large one."""
    logits = torch.zeros(2, 1, 140_000, dtype=torch.bfloat16)
    logits[..., [5, 139_990]] = 12.0
    params = [Params(1.0, 0, 0.7, seed=3), Params(0.6, 2, 1.0, seed=4)]
    case = (logits, SamplingBatch.from_params(params), torch.zeros(2, 1, dtype=torch.int64))
    agree(ranks, directory, [70_000, 70_000], [case], tile=16_384, chunk=8192)


def test_every_round_of_a_full_batch_has_room() -> None:
    assert 64 * (8 + 1) * ITEMS <= CAPACITY  # 64 requests, K = 8


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("vocab", "scale"), [(49152, 0.5), (128256, 2.0), (163840, 6.0)])
def test_gpu_ranks_draw_what_one_draws(load_test_module: Any, vocab: int, scale: float) -> None:
    """Flat to peaked rows, two ranks in two streams of a card: called, and replayed from graphs."""
    from slipstream.kernels.gpu import sampling as gpu
    from slipstream.kernels.vocabulary_part import VocabularyPart

    pair = load_test_module(Path(__file__).with_name("test_peer_exchange_gpu.py")).Pair(
        load_test_module(Path(__file__).with_name("exchanges.py"))
    )
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(MIX), 4, vocab, generator=generator) * scale).bfloat16()
    batch, positions = SamplingBatch.from_params(MIX), torch.randint(0, 5000, (len(MIX), 4), generator=generator)
    expected = sample(logits, batch, positions, 1).cuda()
    names = ("temperature", "top_k", "top_p", "seed", "choice")
    on_card = replace(batch, **{name: getattr(batch, name).cuda() for name in names})
    widths, where = [vocab // 2, vocab - vocab // 2], positions.cuda()
    parts = [part.contiguous().cuda() for part in logits.split(widths, dim=-1)]
    histograms = [torch.zeros(len(MIX) * 4, gpu.NUM_BINS.value, dtype=torch.int32, device="cuda") for _ in range(2)]
    drawn: list[Any] = [None, None]

    def call(one: Any, rank: int) -> torch.Tensor:
        gpu._histogram = lambda rows, device: histograms[rank]  # both ranks are this process
        drawn[rank] = gpu.sample(parts[rank], on_card, where, 1, VocabularyPart(rank, widths, one))
        return drawn[rank]

    kept = gpu._histogram
    try:
        pair.warm_up(call)
        for one in histograms:
            one.zero_()
        torch.cuda.synchronize()
        assert all(tokens.equal(expected) for tokens in pair.run(call))
        graphs = pair.captured(call)
        for one in drawn:
            one.fill_(-1)
        torch.cuda.synchronize()
        pair.replay(graphs, 50)
    finally:
        gpu._histogram = kept
    assert all(tokens.equal(expected) for tokens in drawn)
    assert [one.lost() for one in pair.ranks] == [None, None]
    assert not any(one.any() for one in histograms)

"""The Triton kernels of sampling against the torch twin: the same noise bits, and token for token the same choice."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import sampling as gpu
from slipstream.kernels.gpu.gumbel_noise import gumbel, row_key
from slipstream.kernels.gpu.tiles import SHARED_BYTES
from slipstream.kernels.sampling import SamplingBatch, gumbel_noise, propose_tokens, sample

LAUNCHES = Path(__file__).with_name("sampling_to_compile.py")


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
    Params(0.0, 5, 0.1),
    Params(0.02, 0, 0.95, seed=3),
    Params(1.0, 1, 1.0, seed=8),
    Params(2.5, 2**63 - 1, 0.99, seed=4),
]


def to(batch: SamplingBatch, device: str) -> SamplingBatch:
    names = ("temperature", "top_k", "top_p", "seed", "choice")
    return replace(batch, **{name: getattr(batch, name).to(device) for name in names})


def kernel_sample(
    logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor, device: str, offset: int = 0
) -> torch.Tensor:
    return gpu.sample(logits.to(device), to(batch, device), positions.to(device), offset).cpu()


def random_positions(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 5000, shape, generator=torch.Generator().manual_seed(seed))


@triton.jit
def _noise_kernel(seed_ptr, choice_ptr, position_ptr, ids_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = row_key(tl.load(seed_ptr), tl.load(choice_ptr), tl.load(position_ptr))
    tl.store(out_ptr + at, gumbel(key, tl.load(ids_ptr + at, at < count, other=0)), at < count)


def kernel_noise(seed: int, choice: int, position: int, ids: torch.Tensor, device: str) -> torch.Tensor:
    row = [torch.tensor([value], device=device) for value in (seed, choice, position)]
    out = torch.empty(len(ids), dtype=torch.float32, device=device)
    grid = (triton.cdiv(len(ids), 1024),)
    _noise_kernel[grid](*row, ids.to(device), out, len(ids), BLOCK=1024, enable_fp_fusion=False)  # as launch.py does
    return out.cpu()


@pytest.mark.parametrize(
    ("seed", "choice", "position"), [(0, 0, 0), (-1, 2, 7), (2**63 - 1, 3, 2**20), (-(2**63), 0, 1)]
)
def test_noise_has_the_twins_bits(seed: int, choice: int, position: int, kernel_device: str) -> None:
    ids = torch.cat((torch.arange(1500), torch.tensor([2**31 - 1, 2**31, 2**32 - 1])))
    want = gumbel_noise(torch.tensor([seed]), torch.tensor([choice]), torch.tensor([[position]]), ids)[0, 0]
    assert torch.equal(kernel_noise(seed, choice, position, ids, kernel_device), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_noise_of_a_million_ids_has_the_cpus_bits() -> None:
    ids = torch.arange(1_000_000)
    for seed in (1, -99):
        want = gumbel_noise(torch.tensor([seed]), torch.tensor([0]), torch.tensor([[77]]), ids)[0, 0]
        assert torch.equal(kernel_noise(seed, 0, 77, ids, "cuda"), want)


@pytest.mark.parametrize(("dtype", "capacity"), [(torch.float32, 8192), (torch.bfloat16, 8192), (torch.bfloat16, 6)])
def test_every_kind_of_row_is_the_twins(
    dtype: torch.dtype, capacity: int, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capacity 6: nearly no row's candidates fit, so that the search over the whole row is what decides."""
    monkeypatch.setattr(gpu, "_TILE", 256)
    monkeypatch.setattr(gpu, "_CHUNK", 512)
    monkeypatch.setattr(gpu, "_MAX_CANDIDATES", capacity)
    generator = torch.Generator().manual_seed(7)
    logits = (torch.randn(len(MIX), 1, 1301, generator=generator) * 1.5).to(dtype)
    batch, positions = SamplingBatch.from_params(MIX, choices=list(range(len(MIX)))), random_positions(len(MIX), 1)
    want = sample(logits, batch, positions, 1)
    assert torch.equal(kernel_sample(logits, batch, positions, kernel_device, 1), want)
    assert (want != logits.float().argmax(-1)).sum() >= 3  # so noise and filters decided
    assert not gpu._standing_histogram(torch.empty(0, device=kernel_device).device).any()


@pytest.mark.parametrize("capacity", [8192, 3])
def test_ties_at_the_cut_are_those_of_the_lowest_ids(
    capacity: int, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens, many draws, ties everywhere: one tie too many or too few would soon be drawn, or missed."""
    monkeypatch.setattr(gpu, "_TILE", 16)
    monkeypatch.setattr(gpu, "_CHUNK", 32)
    monkeypatch.setattr(gpu, "_MAX_CANDIDATES", capacity)
    rows = 10 if capacity > 3 else 5
    flat = torch.zeros(20)
    steps = torch.tensor([1.0, 0, 1, 0, -0.0, 1, -1, -1, 0, 1] * 2)
    heavy_rest = torch.tensor([0.75] * 30 + [2.0] + [1.0] * 9 + [0.75] * 20)  # top-p is of what top-k leaves
    for logits, params in (
        (flat, Params(1.0, 0, 0.42)),
        (flat, Params(0.7, 3, 0.33)),
        (steps, Params(1.0, 0, 0.75)),
        (steps, Params(1.0, 9, 0.9)),
        (steps, Params(2.0, 9, 1.0)),
        (heavy_rest, Params(1.0, 10, 0.3)),
    ):
        batch = SamplingBatch.from_params([replace(params, seed=11)])
        many, positions = logits.expand(1, rows, -1).contiguous(), torch.arange(rows)[None]
        got = kernel_sample(many, batch, positions, kernel_device)
        assert torch.equal(got, sample(many, batch, positions)), params


def test_a_row_does_not_depend_on_its_neighbours(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_TILE", 128)
    monkeypatch.setattr(gpu, "_CHUNK", 256)
    params = [Params(0.9, 0, 0.8, seed=1), Params(0.0), Params(1.1, 5, seed=2)]
    batch, positions = SamplingBatch.from_params(params), random_positions(3, 2)
    logits = torch.randn(3, 2, 300, generator=torch.Generator().manual_seed(3)) * 2
    together = kernel_sample(logits, batch, positions, kernel_device)
    for b in range(3):
        alone = kernel_sample(logits[b : b + 1, 1:], batch.select([b]), positions[b : b + 1, 1:], kernel_device)
        assert alone.item() == together[b, 1]


def test_parameters_by_slot(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_TILE", 128)
    params = [Params(0.9, 0, 0.8, seed=1), Params(0.0), Params(1.1, 5, seed=2), Params(1.0, seed=3)]
    order = [3, 0, 2]
    logits = torch.randn(3, 1, 300, generator=torch.Generator().manual_seed(4)) * 2
    positions, batch = random_positions(3, 1), SamplingBatch.from_params(params, [0, 1, 2, 3])
    want = sample(logits, batch.select(order), positions)
    by_slot = replace(to(batch, kernel_device), slots=torch.tensor(order, device=kernel_device))
    got = gpu.sample(logits.to(kernel_device), by_slot, positions.to(kernel_device), 0)
    assert torch.equal(got.cpu(), want)
    target_ids = torch.arange(300)
    want = propose_tokens(logits[:, 0], batch.select(order), positions[:, 0], target_ids)
    drafts = gpu.propose_tokens(
        logits[:, 0].to(kernel_device),
        by_slot,
        positions[:, 0].to(kernel_device),
        target_ids.to(kernel_device),
        0,
        None,
    )
    assert torch.equal(drafts.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_takes_the_lowest_id_of_equals(
    dtype: torch.dtype, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_TILE", 128)
    logits = torch.randint(0, 3, (3, 2, 409), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 0] = 0
    logits[0, 1] = -torch.inf
    logits[1, 0, :300] = -1.0
    logits[1, 0, 300:] = torch.tensor([-0.0, 0.0] * 55)[:109]  # equal, though their bits differ
    batch = SamplingBatch.from_params([Params(0.0)] * 3)
    tokens = kernel_sample(logits, batch, random_positions(3, 2), kernel_device)
    rows = logits.float().tolist()
    assert tokens.tolist() == [[row.index(max(row)) for row in request] for request in rows]
    assert tokens[1, 0] == 300


def test_a_broken_row_still_gives_an_id(kernel_device: str) -> None:
    """A NaN must not turn into an id outside the vocabulary: the next embedding would read there."""
    logits = torch.full((3, 1, 100), torch.nan)
    logits[1] = -logits[1]
    batch = SamplingBatch.from_params([Params(0.0), Params(0.0), Params(0.7, 0, 0.9, seed=1)])
    tokens = kernel_sample(logits, batch, random_positions(3, 1), kernel_device)
    assert ((tokens >= 0) & (tokens < 100)).all()


def test_proposed_tokens_are_the_twins(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_TILE", 128)
    generator = torch.Generator().manual_seed(9)
    params = [Params(0.0), Params(1.0, 3, 0.2, seed=6), Params(3.0, seed=7), Params(0.5, seed=-8)]
    batch, positions = SamplingBatch.from_params(params), random_positions(4)
    logits = torch.randn(4, 333, generator=generator).bfloat16()
    target_ids = torch.randperm(9000, generator=generator)[:333]
    want = propose_tokens(logits, batch, positions, target_ids, 2)
    drafts = torch.full((4, 3), -1, device=kernel_device)
    arguments = (logits.to(kernel_device), to(batch, kernel_device), positions.to(kernel_device))
    got = gpu.propose_tokens(*arguments, target_ids.to(kernel_device), 2, drafts[:, 1])
    assert torch.equal(got.cpu(), want)
    assert torch.equal(drafts[:, 1].cpu(), want)
    assert (drafts[:, [0, 2]] == -1).all()
    assert torch.equal(gpu.propose_tokens(*arguments, target_ids.to(kernel_device), 2, None).cpu(), want)


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles_for_cards_that_are_not_here(
    capability: int, cross_compile: Callable[..., list[dict[str, Any]]]
) -> None:
    made = cross_compile(LAUNCHES, "samplers", capability)
    assert {m["kernel"] for m in made} == {"_tile_kernel", "_candidate_kernel", "_pick_kernel"}
    for m in made:
        assert m["shared"] <= SHARED_BYTES[capability]
        assert ("griddepcontrol.wait" in m["ptx"]) is (capability >= 90)
        if m["kernel"] != "_pick_kernel" or m["constants"]["FILTER"]:
            assert "div.rn.f32" in m["ptx"]  # logits / T as on the CPU; Triton's plain division is not


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("vocab", "scale"), [(49152, 1.0), (49152, 4.0), (128256, 2.0), (163840, 6.0)])
def test_real_vocabularies(vocab: int, scale: float) -> None:
    """Flat to peaked rows: from far too many candidates to a handful."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(MIX), 4, vocab, generator=generator) * scale).bfloat16()
    batch, positions = SamplingBatch.from_params(MIX), random_positions(len(MIX), 4)
    assert torch.equal(kernel_sample(logits, batch, positions, "cuda", 1), sample(logits, batch, positions, 1))
    target_ids = torch.arange(vocab)
    want = propose_tokens(logits[:, 0], batch, positions[:, 0], target_ids)
    arguments = (logits[:, 0].cuda(), to(batch, "cuda"), positions[:, 0].cuda(), target_ids.cuda(), 0, None)
    assert torch.equal(gpu.propose_tokens(*arguments).cpu(), want)
    assert not gpu._standing_histogram(logits.cuda().device).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_dependent_launch_and_graphs_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(len(MIX), 4, 49152, generator=generator) * 3).bfloat16().cuda()
    batch, positions = to(SamplingBatch.from_params(MIX), "cuda"), random_positions(len(MIX), 4).cuda()
    with torch.inference_mode():
        want = sample(logits, batch, positions, 1)
        monkeypatch.setenv("SLIPSTREAM_PDL", "0")
        assert torch.equal(sample(logits, batch, positions, 1), want)
        monkeypatch.delenv("SLIPSTREAM_PDL")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = sample(logits, batch, positions, 1)
        for _ in range(50):
            captured.fill_(-1)
            graph.replay()
            assert torch.equal(captured, want)
        batch.temperature.zero_()  # the graph reads the parameters when it runs
        graph.replay()
        assert torch.equal(captured, logits.max(-1).indices)

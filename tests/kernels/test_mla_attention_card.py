"""Latent attention on the card, at the sizes of one rank of Kimi-K2.5: as in the interpreter, and in graphs."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.kernels.head_linear import head_linear
from slipstream.kernels.latent_rows import absorb_query, rotate_query, write_latent
from slipstream.kernels.mla_attention import mla_attention, mla_prefill
from slipstream.kernels.paged_attention import plan_rows
from slipstream.kernels.stream import Norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HEADS, RANK, NOPE, ROPE, VALUE, SCALE = 8, 512, 128, 64, 128, 0.14468 / 4  # of unit queries and cells: few spikes
_HERE = Path(__file__)


@pytest.fixture(scope="module")
def latent(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_test_module(_HERE.with_name("mla_case.py"))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def number(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=generator))


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Every head of every row within 2 % of its largest value: of means of many cells, too, which are small."""
    return bool(((found.double() - wanted).abs().amax(-1) <= 0.02 * wanted.abs().amax(-1)).all())


def test_rows_are_the_softmax(latent: ModuleType) -> None:
    """Lengths from 1 to 9000, across the borders at which chunks grow, 1 to 16 rows."""
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        num_rows = number(draw, 1, 17)
        starts = [number(draw, 0, 9000), 2048 - number(draw, 0, 17), number(draw, 0, 200), 0]
        case = latent.LatentCase.of([s + num_rows for s in starts], RANK, ROPE, torch.bfloat16, "cuda", seed, 16)
        positions = latent.rows_at(starts, num_rows, "cuda")
        q = case.randn(4, num_rows, HEADS, RANK + ROPE)
        got = mla_attention(q, case.cache, case.rows(positions), SCALE, RANK)
        want = case.softmax(q, positions, SCALE)
        assert near(got, want), seed


def test_a_row_keeps_its_bits_in_any_company(latent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, among 2 to 16 rows, beside other requests, with padding, without dependent launch."""
    from slipstream.kernels.gpu.mla_attention import mla_attention as on_card

    for seed, start in enumerate((2040, 5000, 100)):
        case = latent.LatentCase.of([start + 16, 4100, 60], RANK, ROPE, torch.bfloat16, "cuda", seed, 16)
        positions = latent.rows_at([start, 4084, 44], 16, "cuda")
        q = case.randn(3, 16, HEADS, RANK + ROPE)

        def attend(b: slice, r: slice, at: torch.Tensor = positions, case: Any = case, q: Any = q, **how: Any) -> Any:
            return on_card(q[b, r], case.cache, case.rows(at[b, r], b), SCALE, RANK, **how)

        everything = slice(None)
        together = attend(everything, everything)
        for b in range(3):
            request = slice(b, b + 1)
            alone = torch.cat([attend(request, slice(r, r + 1)) for r in range(16)], dim=1)
            assert torch.equal(alone, together[request]), (seed, b)
            for count in (2, 3, 4, 5, 8, 9):
                assert torch.equal(attend(request, slice(0, count)), alone[:, :count]), (seed, b, count)
                assert torch.equal(attend(request, slice(16 - count, 16)), alone[:, 16 - count :]), (seed, b, count)
        for programs in (1, 100, 5000):
            assert torch.equal(attend(everything, everything, programs=programs), together), (seed, programs)
        padded = torch.where(
            torch.rand(3, 16, generator=torch.Generator().manual_seed(seed)).cuda() < 0.5, positions, -1
        )
        got = attend(everything, everything, padded)
        assert torch.equal(got[padded >= 0], together[padded >= 0]), seed
        assert not got[padded < 0].any(), seed
        monkeypatch.setenv("SLIPSTREAM_PDL", "0")
        assert torch.equal(attend(everything, everything), together)
        monkeypatch.delenv("SLIPSTREAM_PDL")


class Layer:
    """Everything around attention of one layer, from projections to values of every head."""

    def __init__(self, blocks: int, rows: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).bfloat16().to(device)

        self.cache = torch.zeros(blocks, 16, RANK + ROPE, dtype=torch.bfloat16, device=device)
        self.expand = randn(HEADS * (NOPE + VALUE), RANK, scale=RANK**-0.5)
        parts = self.expand.view(HEADS, NOPE + VALUE, RANK)
        self.key, self.value = parts[:, :NOPE].transpose(1, 2).contiguous(), parts[:, NOPE:].contiguous()
        self.q, self.kv = randn(rows, HEADS, NOPE + ROPE), randn(rows, 40 + RANK + ROPE)[:, 40:]
        self.norm = Norm(randn(RANK).abs() + 0.5, 1e-5)
        angle = torch.outer(torch.arange(rows).float(), 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)).repeat(1, 2)
        self.cos, self.sin = angle.cos().bfloat16().to(device), angle.sin().bfloat16().to(device)

    def prompt(self, table: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        rows = plan_rows(table, torch.arange(start, stop, device=table.device)[None], 16, prefill=True)
        cut, angles = slice(start, stop), (self.cos[start:stop], self.sin[start:stop])
        write_latent(self.kv[cut], self.norm, *angles, self.cache, rows.write_index)
        if not self.q.is_cuda:
            q = rotate_query(self.q[cut], *angles)[None]
            return mla_prefill(q, self.cache, rows, SCALE, self.expand, NOPE, VALUE)[0]
        q = absorb_query(self.q[cut], self.key, *angles)[None]
        return head_linear(mla_attention(q, self.cache, rows, SCALE, RANK)[0], self.value)

    def verify(self, table: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        rows = plan_rows(table, torch.arange(start, stop, device=table.device)[None], 16)
        cut, angles = slice(start, stop), (self.cos[start:stop], self.sin[start:stop])
        write_latent(self.kv[cut], self.norm, *angles, self.cache, rows.write_index)
        q = absorb_query(self.q[cut], self.key, *angles)[None]
        return head_linear(mla_attention(q, self.cache, rows, SCALE, RANK)[0], self.value)


def test_a_layer_is_its_torch_twin() -> None:
    """Prompt, then verify rows; the twin runs on the CPU. A prompt's and a verify row's bits hang on nobody else."""
    length, blocks = 300, 300 // 16 + 2
    card, twin = Layer(blocks, length, "cuda"), Layer(blocks, length, "cpu")
    table = 1 + torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(1))[None]
    got, want = card.prompt(table.cuda(), 0, 290), twin.prompt(table, 0, 290)
    assert (got.cpu().double() - want.double()).abs().max() <= 0.03 * want.abs().max()
    for cuts in ((0, 1, 64, 65, 290), (0, 200, 290)):
        assert torch.equal(torch.cat([card.prompt(table.cuda(), a, b) for a, b in pairwise(cuts)]), got), cuts
    verified, of_twin = card.verify(table.cuda(), 290, 300), twin.verify(table, 290, 300)
    assert (verified.cpu().double() - of_twin.double()).abs().max() <= 0.03 * of_twin.abs().max()
    assert torch.equal(torch.cat([card.verify(table.cuda(), r, r + 1) for r in range(290, 300)]), verified)


def test_a_graph_replays_what_it_captured_at_other_positions(latent: ModuleType) -> None:
    """Lengths are read on the card: a graph of 4 rows, captured at the start, at positions on both sides of borders."""
    case = latent.LatentCase.of([5000], RANK, ROPE, torch.bfloat16, "cuda", 0, 16)
    positions, q = latent.rows_at([0], 4, "cuda"), case.randn(1, 4, HEADS, RANK + ROPE)
    plan = case.rows(positions)
    mla_attention(q, case.cache, plan, SCALE, RANK)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = q
        for _ in range(5):  # one behind the other, so that kernels overlap
            x = mla_attention(q, case.cache, plan, SCALE, RANK)
    for start in (4996, 0, 2046, 31, 4094):
        positions.copy_(latent.rows_at([start], 4, "cuda"))
        graph.replay()
        assert near(x, case.softmax(q, positions, SCALE)), start
        assert torch.equal(mla_attention(q, case.cache, plan, SCALE, RANK), x)

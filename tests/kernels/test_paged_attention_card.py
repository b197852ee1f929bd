"""Attention on the card, at real shapes, for ten seeds: the same properties as in the interpreter, and graphs."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

from slipstream.kernels import paged_attention as op

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SHAPES = ((9, 3, 64), (32, 8, 128), (16, 16, 96), (8, 4, 256))
WINDOWED = SHAPES[:2]  # a kernel of its own, which takes its time to compile
SEEDS = range(10)
_HERE = Path(__file__)


@pytest.fixture(scope="module")
def paged(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_test_module(_HERE.with_name("paged_case.py"))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def number(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=generator))


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_the_softmax(paged: ModuleType, shape: tuple[int, int, int]) -> None:
    """Through the op, by both phases; lengths from 1 to 1500, 1 to 16 rows, with and without a window."""
    heads, kv_heads, head_dim = shape
    for seed in SEEDS:
        draw = torch.Generator().manual_seed(seed)
        num_rows = number(draw, 1, 17)
        starts = [number(draw, 0, 1500), number(draw, 0, 200), 0]
        window = None if seed % 2 or shape not in WINDOWED else number(draw, 1, 300)
        lengths = [s + num_rows for s in starts]
        case = paged.PagedCase.of(lengths, kv_heads, head_dim, torch.bfloat16, "cuda", seed, block_size=16)
        positions = paged.rows_at(starts, num_rows, "cuda")
        q, scale = case.queries(positions, heads), head_dim**-0.5
        want = case.softmax(q, positions, scale, window)
        for prefill in (False, True):
            rows = op.plan_rows(case.table, positions, 16, prefill)
            got = op.paged_attention(q, case.cache, rows, scale, window).double()
            torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2, msg=lambda m, s=seed: f"seed {s}: {m}")


def test_fp32_is_the_softmax(paged: ModuleType) -> None:
    heads, kv_heads, head_dim = SHAPES[0]
    case = paged.PagedCase.of([403, 20], kv_heads, head_dim, torch.float32, "cuda")
    positions = paged.rows_at([399, 16], 4, "cuda")
    q = case.queries(positions, heads)
    want = case.softmax(q, positions, 0.1)
    for prefill in (False, True):
        got = op.paged_attention(q, case.cache, op.plan_rows(case.table, positions, 8, prefill), 0.1)
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_verify_row_keeps_its_bits_in_any_company(
    paged: ModuleType, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, among 2 to 16 rows, beside other requests, with padding, split in other ways, without dependent launch."""
    from slipstream.kernels.gpu.attention_split import Cut, tile_of, usual_cut
    from slipstream.kernels.gpu.paged_attention import paged_attention

    heads, kv_heads, head_dim = shape
    for seed in SEEDS:
        draw = torch.Generator().manual_seed(seed)
        starts = [number(draw, 1, 3000), 1018, number(draw, 1, 100)]
        window = None if seed % 2 or shape not in WINDOWED else number(draw, 1, 2000)
        case = paged.PagedCase.of([s + 16 for s in starts], kv_heads, head_dim, torch.bfloat16, "cuda", seed, 16)
        positions = paged.rows_at(starts, 16, "cuda")
        q = case.queries(positions, heads)

        def attend(b: slice, r: slice, at: torch.Tensor = positions, cut: Cut | None = None, case=case, q=q, w=window):  # type: ignore[no-untyped-def]
            return paged_attention(q[b, r], case.cache, case.table[b], at[b, r], 0.1, w, cut)

        everything = slice(None)
        for b in range(3):
            request = slice(b, b + 1)
            alone = torch.cat([attend(request, slice(r, r + 1)) for r in range(16)], dim=1)
            for count in (2, 4, 5, 6, 8, 9, 16):
                assert torch.equal(attend(request, slice(0, count)), alone[:, :count]), (seed, b, count)
                assert torch.equal(attend(request, slice(16 - count, 16)), alone[:, 16 - count :]), (seed, b, count)
            assert torch.equal(attend(everything, everything)[request], alone), (seed, b)
            assert torch.equal(attend(everything, slice(3, 4))[request], alone[:, 3:4]), (seed, b)
            many = usual_cut(64, 64 * kv_heads, tile_of(head_dim, torch.bfloat16))
            for cut in (Cut(1), Cut(40, whole=8), Cut(5000, whole=0), Cut(early=1), Cut(whole=4, stages=3), many):
                assert torch.equal(attend(request, slice(0, 4), cut=cut), alone[:, :4]), (seed, b, cut)
        together = attend(everything, everything)
        padded = torch.where(torch.rand(3, 16, generator=draw).cuda() < 0.5, positions, -1)
        got = attend(everything, everything, padded)
        assert torch.equal(got[padded >= 0], together[padded >= 0]), seed
        assert not got[padded < 0].any(), seed
        if seed == 1:
            monkeypatch.setenv("SLIPSTREAM_PDL", "0")
            assert torch.equal(attend(everything, everything), together)
            monkeypatch.delenv("SLIPSTREAM_PDL")


def test_a_long_request_keeps_its_bits_however_it_is_split(paged: ModuleType) -> None:
    case = paged.PagedCase.of([70_000], 2, 128, torch.bfloat16, "cuda", block_size=16)
    positions = paged.rows_at([69_996], 4, "cuda")
    q = case.queries(positions, 8)
    from slipstream.kernels.gpu.attention_split import Cut
    from slipstream.kernels.gpu.paged_attention import paged_attention

    want = paged_attention(q, case.cache, case.table, positions, 0.1)
    torch.testing.assert_close(want.double(), case.softmax(q, positions, 0.1), atol=1e-3, rtol=1e-2)
    for programs in (1, 8, 100, 4000):
        assert torch.equal(paged_attention(q, case.cache, case.table, positions, 0.1, None, Cut(programs)), want)
    assert torch.equal(paged_attention(q[:, 2:3], case.cache, case.table, positions[:, 2:3], 0.1), want[:, 2:3])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_row_keeps_its_bits_however_the_prompt_is_cut(paged: ModuleType, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, head_dim = shape
    for seed in SEEDS:
        draw = torch.Generator().manual_seed(seed)
        length = number(draw, 300, 700)
        window = None if seed % 2 or shape not in WINDOWED else number(draw, 1, 200)
        case = paged.PagedCase.of([length, 150], kv_heads, head_dim, torch.bfloat16, "cuda", seed, block_size=16)
        positions = paged.rows_at([0, 0], length, "cuda")
        positions[1, 150:] = -1
        q = case.queries(positions, heads)

        def attend(requests: slice, start: int, stop: int, padding: int, case=case, q=q, at=positions, w=window):  # type: ignore[no-untyped-def]
            at = torch.nn.functional.pad(at[requests, start:stop], (0, padding), value=-1)
            rows = torch.nn.functional.pad(q[requests, start:stop], (0, 0, 0, 0, 0, padding), value=9.0)
            plan = op.plan_rows(case.table[requests], at, 16, prefill=True)
            got = op.paged_attention(rows, case.cache, plan, 0.1, w)
            assert not got[at < 0].any()
            return got[:, : stop - start]

        first = slice(0, 1)
        whole = attend(first, 0, length, 0)
        want = case.softmax(q[:1, -20:], positions[:1, -20:], 0.1, window)
        torch.testing.assert_close(whole[:, -20:].double(), want, atol=1e-2, rtol=1e-2)
        cuts = sorted({0, length, *(number(draw, 1, length) for _ in range(4))})
        pieces = [attend(first, a, b, number(draw, 0, 60)) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(pieces, dim=1), whole), (seed, cuts)
        assert torch.equal(attend(slice(0, 2), 0, length, 9)[:1], whole), seed


@pytest.mark.parametrize("pdl", ["0", "1"])
def test_a_chain_in_a_graph_is_the_chain_without(paged: ModuleType, monkeypatch: pytest.MonkeyPatch, pdl: str) -> None:
    """32 dependent calls with cache writes between them, replayed for inputs A, B, A: 50 times the same bits."""
    monkeypatch.setenv("SLIPSTREAM_PDL", pdl)
    case = paged.PagedCase.of([410, 150, 1700], 3, 64, torch.bfloat16, "cuda", block_size=16)
    positions = torch.zeros(3, 4, dtype=torch.int64, device="cuda")
    x = torch.zeros(3, 4, 9, 64, dtype=torch.bfloat16, device="cuda")

    def chain() -> torch.Tensor:
        rows = op.plan_rows(case.table, positions, 16)
        out = x
        for _ in range(32):
            op.write_kv(out[:, :, :3], out[:, :, 3:6], case.cache, rows)
            out = op.paged_attention(out * 3, case.cache, rows, 0.125)
        return out

    clean, inputs = case.cache.clone(), []
    for starts in ([406, 30, 1696], [200, 146, 127]):
        at = paged.rows_at(starts, 4, "cuda")
        inputs.append((at, case.queries(at, 9)))
    wants = []
    for at, values in inputs:
        positions.copy_(at)
        x.copy_(values)
        case.cache.copy_(clean)
        wants.append(chain().clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for turn in range(50):
        for which in (0, 1, 0):
            positions.copy_(inputs[which][0])
            x.copy_(inputs[which][1])
            case.cache.copy_(clean)
            graph.replay()
            assert torch.equal(out, wants[which]), (turn, which)
    assert wants[0].isfinite().all()
    assert not torch.equal(*wants)


@pytest.mark.parametrize("product", ["triton", "cuda"])
@pytest.mark.parametrize("starts", [[120, 406, 30, 0], [1018, 252, 2500, 510]])
def test_keys_read_before_the_wait_are_those_read_after_it(
    paged: ModuleType, monkeypatch: pytest.MonkeyPatch, starts: list[int], product: str
) -> None:
    """Behind the kernel that writes q, k and v, attention reads older keys early: 32 layers over one cache, whose
    newest cells each layer overwrites, replayed, give the bits of launches that wait for each other."""
    from slipstream.kernels.cuda import build, pack, products
    from slipstream.kernels.gpu import launch
    from slipstream.kernels.gpu.norm_qkv import norm_qkv
    from slipstream.kernels.norm_qkv import Heads, KVSink
    from slipstream.kernels.stream import Norm, Stream

    case = paged.PagedCase.of([s + 4 for s in starts], 3, 64, torch.bfloat16, "cuda", block_size=16)
    positions = paged.rows_at(starts, 4, "cuda")
    draw = torch.Generator("cuda").manual_seed(1)
    x, angles = (torch.randn(16, n, generator=draw, device="cuda").bfloat16() for n in (576, 64))
    weight = (torch.randn(15 * 64, 576, generator=draw, device="cuda") / 24).bfloat16()
    norm = Norm(torch.ones(576, dtype=torch.bfloat16, device="cuda"), 1e-5)
    project: Callable[..., tuple[torch.Tensor, ...]] = norm_qkv
    if product == "cuda":
        if not build.available(launch.capability()):
            pytest.skip("needs nvcc")
        project, weight = products.norm_qkv, pack.pack(weight, pack.RowOrder.HEADS, 64)  # type: ignore[assignment]

    def chain() -> torch.Tensor:
        rows, out = op.plan_rows(case.table, positions, 16), x
        sink = KVSink(case.cache, rows.write_index)
        for _ in range(32):
            q, *_ = project(Stream(out), norm, weight, Heads(9, 3, 64), angles, angles, None, None, sink)
            assert launch.settled()
            out = op.paged_attention(q.view(4, 4, 9, 64), case.cache, rows, 0.125).view(16, 576)
        return out

    monkeypatch.setenv("SLIPSTREAM_PDL", "0")
    want = chain().clone()
    monkeypatch.delenv("SLIPSTREAM_PDL")
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for turn in range(50):
        graph.replay()
        assert torch.equal(out, want), turn
    assert want.isfinite().all()
    assert len(want.unique()) > 1000


def test_a_capture_that_lacks_room_is_refused(paged: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.kernels.gpu import attention_split
    from slipstream.kernels.gpu import paged_attention as gpu

    case = paged.PagedCase.of([1700], 3, 64, torch.bfloat16, "cuda", block_size=16)
    positions = paged.rows_at([1690], 4, "cuda")
    q = case.queries(positions, 9)
    want = gpu.paged_attention(q, case.cache, case.table, positions, 0.1)  # compiled
    monkeypatch.setattr(attention_split, "_WORKSPACES", {})
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="launch this size once"), torch.cuda.graph(graph):
        gpu.paged_attention(q, case.cache, case.table, positions, 0.1)
    gpu.paged_attention(q, case.cache, case.table, positions, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gpu.paged_attention(q, case.cache, case.table, positions, 0.1)
    graph.replay()
    assert torch.equal(got, want)


def test_a_plan_is_the_plan_of_the_cpu() -> None:
    table = torch.randperm(400, generator=torch.Generator().manual_seed(0)).view(4, 100)
    positions = torch.randint(0, 1600, (4, 90), generator=torch.Generator().manual_seed(1))
    got = op.plan_rows(table.cuda(), positions.cuda(), 16)
    assert torch.equal(got.write_index.cpu(), op.plan_rows(table, positions, 16).write_index)

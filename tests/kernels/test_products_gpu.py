"""The matrix products on a GPU at real sizes: rows keep their bits, results are right, PDL changes nothing."""

from collections.abc import Callable

import pytest
import torch

from slipstream.kernels.gpu import linear_add as gpu_add
from slipstream.kernels.gpu import norm_gate_up as gpu_gate_up
from slipstream.kernels.gpu import norm_qkv as gpu_qkv
from slipstream.kernels.gpu.tiles import Tile
from slipstream.kernels.linear_add import linear_add
from slipstream.kernels.norm_gate_up import norm_gate_up
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.norm_qkv import Heads, KVSink, norm_qkv
from slipstream.kernels.stream import Norm, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MOST = 130
ROW_COUNTS = (1, 2, 3, 8, 9, 16, 17, 31, 32, 33, 64, 65, 127, 128, 130)
Run = Callable[[int], dict[str, torch.Tensor]]


def cancelling(*shape: int, order: torch.Tensor, sign: int) -> torch.Tensor:
    """Rows whose second half undoes the first in another order: what is left of a sum is rounding, so that another
    order of summation shows."""
    half = shape[-1] // 2
    x = torch.randn(shape, device="cuda")
    x[..., half : 2 * half] = sign * x[..., order]
    return x.to(torch.bfloat16)


class Inputs:
    """Random inputs of MOST rows for a weight [n, k]."""

    def __init__(self, n: int, k: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        order = torch.randperm(k // 2, device="cuda")
        self.rows = cancelling(MOST, k, order=order, sign=1)
        self.weight = cancelling(n, k, order=order, sign=-1) / k**0.5
        self.plain = torch.randn(MOST, k, device="cuda").to(torch.bfloat16)
        scale = 1 + 0.1 * torch.randn(k // 2, device="cuda")
        # The norm's weight must not break the pairs that undo each other.
        self.norm = Norm(torch.cat((scale, scale[order])).to(torch.bfloat16), 1e-5)

    def stream(self, m: int, parts: int, plain: bool = False) -> Stream:
        rows = (self.plain if plain else self.rows)[:m]
        if not parts:
            return Stream(rows)
        return Stream(rows, rows.float().square().unflatten(1, (parts, -1)).sum(-1))  # [M, K] -> [M, P]


def run_linear(n: int, k: int, parts: int) -> Run:
    inputs = Inputs(n, k)
    return lambda m, plain=False: {"y": norm_linear(inputs.stream(m, parts, plain), inputs.norm, inputs.weight)}


def run_gate_up(n: int, k: int, parts: int) -> Run:
    inputs = Inputs(n, k)
    return lambda m, plain=False: {"y": norm_gate_up(inputs.stream(m, parts, plain), inputs.norm, inputs.weight)}


def run_add(n: int, k: int) -> Run:
    inputs = Inputs(n, k)
    before = torch.randn(MOST, n, device="cuda").to(torch.bfloat16)

    def run(m: int, plain: bool = False) -> dict[str, torch.Tensor]:
        after = linear_add(inputs.stream(m, 0, plain).rows, inputs.weight, Stream(before[:m]))
        return {"rows": after.rows} | ({} if after.sumsq is None else {"sumsq": after.sumsq})

    return run


def run_qkv(k: int, heads: Heads, parts: int, head_norms: bool) -> Run:
    inputs = Inputs((heads.q + 2 * heads.kv) * heads.dim, k)
    angle = 100 * torch.randn(MOST, heads.dim // 2, device="cuda")
    angle = torch.cat((angle, angle), dim=1)  # 2 x [M, d / 2] -> [M, d]
    cos, sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
    constants = Norm((1 + 0.1 * torch.randn(heads.dim, device="cuda")).to(torch.bfloat16), 1e-6)
    norm = constants if head_norms else None
    cells = torch.randperm(16 * 16, device="cuda")

    def run(m: int, plain: bool = False) -> dict[str, torch.Tensor]:
        cache = torch.zeros(16, 16, 2, heads.kv, heads.dim, dtype=torch.bfloat16, device="cuda")
        stream = inputs.stream(m, parts, plain)
        sink = KVSink(cache, cells[:m])
        q, _, _ = norm_qkv(stream, inputs.norm, inputs.weight, heads, cos[:m], sin[:m], norm, norm, sink)
        return {"q": q, "kv": cache.flatten(0, 1)[cells[:m]]}

    return run


CASES: dict[str, Callable[[], Run]] = {
    "smollm2 qkv": lambda: run_qkv(576, Heads(9, 3, 64), 0, False),
    "smollm2 o": lambda: run_add(576, 576),
    "smollm2 gate_up": lambda: run_gate_up(3072, 576, 0),
    "smollm2 down": lambda: run_add(576, 1536),
    "smollm2 head": lambda: run_linear(49152, 576, 0),
    "8b qkv": lambda: run_qkv(4096, Heads(32, 8, 128), 128, False),
    "8b qkv of whole rows": lambda: run_qkv(4096, Heads(32, 8, 128), 0, False),
    "8b o": lambda: run_add(4096, 4096),
    "8b gate_up": lambda: run_gate_up(28672, 4096, 128),
    "8b down": lambda: run_add(4096, 14336),
    "8b head": lambda: run_linear(128256, 4096, 128),
    "qwen3 qkv": lambda: run_qkv(4096, Heads(32, 8, 128), 128, True),
    "small qwen3 qkv": lambda: run_qkv(1024, Heads(16, 8, 128), 0, True),
    "heads of 96": lambda: run_qkv(2304, Heads(8, 4, 96), 1, True),
    "heads of 256": lambda: run_qkv(2560, Heads(8, 4, 256), 0, True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_keeps_its_bits_whatever_travels_with_it(name: str) -> None:
    with torch.no_grad():
        run = CASES[name]()
        together = run(MOST)
        for m in ROW_COUNTS:
            for what, found in run(m).items():
                assert torch.equal(found, together[what][:m]), (name, what, m)
        torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["smollm2 qkv", "smollm2 gate_up", "smollm2 down"])
def test_rows_one_after_the_other_keep_their_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles without the matrix unit."""
    for module in (gpu_qkv, gpu_gate_up, gpu_add):
        monkeypatch.setattr(module, "tile_for", lambda *shape, paired=False: Tile(block_n=4, split=0))
    test_a_row_keeps_its_bits_whatever_travels_with_it(name)
    test_equals_the_twin(name)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_twin(name: str) -> None:
    """The twin runs on the GPU, too, where gradients may be recorded. Its products are cuBLAS's."""
    run = CASES[name]()
    for m in (3, 100):
        with torch.no_grad():
            found = run(m, plain=True)
        with torch.enable_grad():
            expected = run(m, plain=True)
        for what, tensor in expected.items():
            torch.testing.assert_close(found[what], tensor, rtol=0.016, atol=0.03, msg=lambda s, w=what: f"{w}: {s}")


def test_the_sum_itself_is_that_of_fp64() -> None:
    """Rounding of the output aside: two sums that undo each other to 1e-4 are right to fp32."""
    with torch.no_grad():
        for n, k in ((576, 1536), (4096, 4096)):
            inputs = Inputs(n, k)
            found = norm_linear(Stream(inputs.rows), None, inputs.weight)
            exact = inputs.rows.double() @ inputs.weight.double().T
            torch.testing.assert_close(found.double(), exact, rtol=0.005, atol=2e-5)


def layer(heads: Heads, hidden: int, inner: int) -> Callable[[], list[torch.Tensor]]:
    """Two layers' products in a chain, as in a model."""
    torch.manual_seed(0)

    def weight(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, device="cuda") / k**0.5).to(torch.bfloat16)

    norm = Norm(torch.ones(hidden, dtype=torch.bfloat16, device="cuda"), 1e-5)
    qkv = weight((heads.q + 2 * heads.kv) * heads.dim, hidden)
    o, gate_up, down = weight(hidden, heads.q * heads.dim), weight(2 * inner, hidden), weight(hidden, inner)
    rows = torch.randn(5, hidden, device="cuda").to(torch.bfloat16)
    ones = torch.ones(5, heads.dim, dtype=torch.bfloat16, device="cuda")
    cells = torch.arange(5, device="cuda")

    def run() -> list[torch.Tensor]:
        stream = Stream(rows)
        cache = torch.zeros(1, 16, 2, heads.kv, heads.dim, dtype=torch.bfloat16, device="cuda")
        for _ in range(2):
            q, _, _ = norm_qkv(stream, norm, qkv, heads, ones, ones, None, None, KVSink(cache, cells))
            stream = linear_add(q.flatten(1), o, stream)  # [M, q, d] -> [M, q * d]
            stream = linear_add(norm_gate_up(stream, norm, gate_up), down, stream)
        return [stream.rows, cache]

    return run


@pytest.mark.parametrize("sizes", [(Heads(9, 3, 64), 576, 1536), (Heads(32, 8, 128), 4096, 14336)], ids=["small", "8b"])
def test_dependent_launch_changes_no_bit(sizes: tuple[Heads, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        run = layer(*sizes)
        monkeypatch.setenv("SLIPSTREAM_PDL", "0")
        expected = run()
        monkeypatch.setenv("SLIPSTREAM_PDL", "1")
        run()  # compiled before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for _ in range(50):
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

"""Several products in one kernel give the bits of one by one: on an emulated GPU, with the marker gpu on a card."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.kernels.cuda import chain_launch, launch, skinny_gemm
from slipstream.kernels.cuda import pack as packing
from slipstream.kernels.cuda.chain_launch import Joining, joined
from slipstream.kernels.cuda.pack import PackedWeight, RowOrder
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Norm, Stream

LASTS = ("qkv", "head", "none")


class Layer:
    """The products behind one layer's attention, and what comes next, on random inputs.

    Args:
        hidden, inner: widths, each of 8 parts.
        last: queries, keys and values; a head of 96; or nothing.
    """

    def __init__(self, hidden: int, inner: int, heads: Heads, rows: int, last: str, device: str) -> None:
        made = torch.Generator(device).manual_seed(hidden + rows)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=made, device=device) * scale).bfloat16()

        def weight(n: int, k: int, order: RowOrder, dim: int = 0) -> PackedWeight:
            return packing.pack(random(n, k, scale=k**-0.5), order, dim)

        self.last, self.heads, self.hidden = last, heads, hidden
        self.out, self.down = weight(hidden, hidden, RowOrder.ROWS), weight(hidden, inner, RowOrder.ROWS)
        self.gate_up = weight(2 * inner, hidden, RowOrder.GATE_UP)
        self.qkv = weight((heads.q + 2 * heads.kv) * heads.dim, hidden, RowOrder.HEADS, heads.dim)
        self.head = weight(96, hidden, RowOrder.ROWS)
        self.norms = [Norm(1 + random(hidden, scale=0.1), 1e-5) for _ in range(2)]
        self.x, self.stream = random(rows, hidden), random(rows, hidden)
        angles = 6 * torch.rand(rows, heads.dim // 2, generator=made, device=device).repeat(1, 2)  # -> [rows, dim]
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.cells = torch.randperm(64, generator=made, device=device)[:rows]
        self.cache = random(4, 16, 2, heads.kv, heads.dim)

    @property
    def weights(self) -> list[PackedWeight]:
        fourth = {"qkv": [self.qkv], "head": [self.head], "none": []}[self.last]
        return [self.out, self.gate_up, self.down, *fourth]

    def run(self, head_sums: bool = False) -> list[torch.Tensor]:
        """Every tensor that the products make."""
        cache = self.cache.clone()
        with joined():
            first = skinny_gemm.linear_add(self.x, self.out, Stream(self.stream))
            inner = skinny_gemm.norm_gate_up(first, self.norms[0], self.gate_up)
            second = skinny_gemm.linear_add(inner, self.down, first)
            made = []
            if self.last == "qkv":
                sink = KVSink(cache, self.cells)
                q, _, _ = skinny_gemm.norm_qkv(
                    second, self.norms[1], self.qkv, self.heads, self.cos, self.sin, sink=sink
                )
                made = [q]
            elif self.last == "head":
                made = [skinny_gemm.norm_linear(second if head_sums else Stream(second.rows), self.norms[1], self.head)]
        assert first.sumsq is not None
        assert second.sumsq is not None
        return [first.rows, first.sumsq, inner, second.rows, second.sumsq, cache, *made]


@pytest.fixture(scope="module")
def libraries(load_test_module: Callable[[Path], ModuleType], run_dir: Path) -> Any:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    module = load_test_module(Path(__file__).parent / "cuda_on_cpu" / "emulator.py")
    return module, module.compile_all(run_dir), module.compile_chain(run_dir)


@pytest.fixture
def nan_where_unwritten() -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


JOININGS = {
    "qkv": Joining(on=True, left=64, fixed=9),
    "head": Joining(on=True, shared=70, left=0, ahead=24, fixed=1),
    "none": Joining(on=True, shared=100, left=1 << 10, fixed=2),
}


@pytest.mark.parametrize(("last", "rows"), [("qkv", 3), ("head", 8), ("none", 1)])
def test_products_in_one_kernel_give_the_bits_of_each_alone(
    libraries: Any, monkeypatch: pytest.MonkeyPatch, nan_where_unwritten: None, last: str, rows: int
) -> None:
    """With units dealt out and handed out by counters, which are zero again behind it; each weight is read once."""
    module, alone, chain = libraries
    monkeypatch.setattr(launch, "IN_L2", 0)
    layer = Layer(480, 1600, Heads(2, 1, 64), rows, last, "cpu")
    one_by_one = module.Emulator(alone)
    one_by_one.install(monkeypatch)
    expected = layer.run()
    assert one_by_one.faults == 0

    weights = torch.cat([one.data.flatten() for one in layer.weights]).view(torch.uint8)
    begin = 0
    for one in layer.weights:  # one behind the other, so that the emulator sees all reads
        one.data = weights.view(torch.bfloat16)[begin : begin + one.data.numel()].view(one.data.shape)
        begin += one.data.numel()
    emulator = module.ChainEmulator(chain, weights, [norm.weight for norm in layer.norms])
    emulator.install(monkeypatch, sms=3)
    monkeypatch.setattr(chain_launch, "joining", JOININGS[last])
    for _ in range(2):  # counters are as the next launch wants them
        found = layer.run()
        assert emulator.faults == 0
        assert (emulator.reads == 1).all()
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
        assert not emulator.arrived.any()
        assert not any(int(one.counter) for one in layer.weights)
    assert emulator.names == [{"qkv": "chain_3", "head": "chain_0", "none": "chain_n"}[last]] * 2
    assert emulator.grid == 3
    assert not emulator.flows[0, 2]  # the next kernel starts behind the wait


def test_what_does_not_belong_together_is_launched_by_itself(
    libraries: Any, monkeypatch: pytest.MonkeyPatch, nan_where_unwritten: None
) -> None:
    """A product that reads something else than the one before made ends the chain, as any other kernel does."""
    module, alone, _ = libraries
    monkeypatch.setattr(launch, "IN_L2", 0)
    layer = Layer(480, 1600, Heads(2, 1, 64), 1, "none", "cpu")
    emulator = module.Emulator(alone)
    emulator.install(monkeypatch, large_bytes=140 << 10)
    monkeypatch.setattr(chain_launch, "joining", Joining(on=True))
    with joined():
        first = skinny_gemm.linear_add(layer.x, layer.out, Stream(layer.stream))
        assert emulator.names == []
        skinny_gemm.norm_gate_up(Stream(layer.x), layer.norms[0], layer.gate_up)
        assert emulator.names == ["bulk_1_0_1_1_1_16", "bulk_2_1_1_1_1_16"]
        second = skinny_gemm.linear_add(layer.x, layer.out, first)
        chain_launch.gpu_launch._flush()  # as before every Triton kernel
        assert len(emulator.names) == 3
    assert not first.rows.isnan().any()
    assert not second.rows.isnan().any()

    def step_that_fails() -> None:
        with joined():
            skinny_gemm.linear_add(layer.x, layer.out, Stream(layer.stream))
            skinny_gemm.linear_add(layer.x, layer.out, Stream(layer.stream.repeat(2, 1)))

    with pytest.raises(ValueError, match="stream"):
        step_that_fails()
    chain_launch.flush()
    assert len(emulator.names) == 3  # what was noted is gone


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [1, 4, 6, 8])
@pytest.mark.parametrize("last", LASTS)
def test_gpu_products_in_one_kernel_give_the_bits_of_each_alone(
    monkeypatch: pytest.MonkeyPatch, last: str, rows: int
) -> None:
    """8B sizes, many times in one graph, so that counters and rings of one launch meet the next one's."""
    layer = Layer(4096, 14336, Heads(32, 8, 128), rows, last, "cuda")
    launch.load(torch.cuda.current_device())
    expected = layer.run()
    monkeypatch.setattr(chain_launch, "joining", Joining(on=True))
    layer.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [layer.run() for _ in range(20)]
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert all(a.equal(b) for made in found for a, b in zip(made, expected, strict=True))
    assert not any(int(one.counter) for one in layer.weights)

"""The two kernels in front of routed experts: on an emulated GPU; with the marker gpu on a card."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.kernels import route as route_op
from slipstream.kernels.cuda import gate, gate_launch, route_launch
from slipstream.kernels.cuda.pack import PackedWeight, RowOrder, pack
from slipstream.kernels.expert_lists import sorted_lists
from slipstream.kernels.rms_norm import rms_norm
from slipstream.kernels.route import Routing
from slipstream.kernels.stream import Norm, Stream


@pytest.fixture(scope="module")
def libraries(cuda_on_cpu: ModuleType, run_dir: Path) -> Any:
    return cuda_on_cpu, cuda_on_cpu.compile_front(run_dir)


@pytest.fixture
def emulator(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module, compiled = libraries
    made = module.ExpertEmulator(compiled)
    made.install(monkeypatch)
    return made


@dataclass
class Case:
    """Rows and what they go through, plain and packed."""

    stream: Stream
    norm: Norm
    router: torch.Tensor
    bias: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    routing: Routing

    @staticmethod
    def of(
        rows: int, width: int, experts: int, inner: int, routing: Routing, parts: int | None = None, device: str = "cpu"
    ) -> "Case":
        made = torch.Generator().manual_seed(experts + width)

        def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=made) * scale).bfloat16().to(device)

        x = randn(rows, width)
        sumsq = None
        if parts is not None:
            sumsq = torch.stack([part.square().sum(1) for part in x.float().tensor_split(parts, 1)], 1)
        norm = Norm((torch.rand(width, generator=made) + 0.5).bfloat16().to(device), 1e-5)
        bias = (torch.randn(experts, generator=made) * 0.3).to(device)
        router, up = randn(experts, width, scale=width**-0.5), randn(2 * inner, width, scale=width**-0.5)
        return Case(Stream(x, sumsq), norm, router, bias, up, randn(width, inner, scale=inner**-0.5), routing)

    def run(self, rows: slice = slice(None), normed: bool = True, shared: bool = True, **more: Any) -> Any:
        stream = Stream(self.stream.rows[rows], None if self.stream.sumsq is None else self.stream.sumsq[rows])
        weights: tuple[PackedWeight, PackedWeight] | None = None
        if shared:
            weights = pack(self.up, RowOrder.GATE_UP), pack(self.down)
        with torch.no_grad():
            return gate.gate_experts(
                stream, self.norm if normed else None, pack(self.router), self.bias, self.routing, weights, **more
            )

    def check(self, found: Any, normed: bool = True) -> None:
        """Against torch, in fp64 from the normed rows on."""
        x, choice, out = found
        with torch.enable_grad():  # the twins, on a card, too
            want_x = rms_norm(self.stream.rows, self.norm.weight, self.norm.eps) if normed else self.stream.rows
        want_x = want_x.detach()
        assert float((x != want_x).float().mean()) < 0.01
        torch.testing.assert_close(x.float(), want_x.float(), rtol=2**-6, atol=2**-9)
        logits = (x.double() @ self.router.double().T).float()
        with torch.enable_grad():
            ids, gates = route_op.route(logits, self.bias, self.routing)
        same = (choice.ids == ids).all(1)
        assert float(same.float().mean()) > 0.97
        torch.testing.assert_close(choice.gates[same], gates[same], rtol=1e-4, atol=1e-5)
        g, u = (x.double() @ self.up.double().T).chunk(2, dim=1)
        inner = torch.nn.functional.silu(g) * u
        want = inner @ self.down.double().T
        sizes = inner.abs() @ self.down.double().abs().T
        assert ((out.double() - want).abs() <= 2**-7 * want.abs() + 2**-6 * sizes).all()
        # Rounding errors of the inner rows are independent: on the whole they are far below that bound.
        assert float((out.double() - want).norm() / want.norm()) < 0.01
        lists = sorted_lists(choice.ids, len(self.router), choice.lists.tile)
        count = int(lists.count[0])
        assert int(choice.lists.count[0]) == count
        assert choice.lists.place.equal(lists.place)
        assert choice.lists.order.equal(lists.order)
        assert choice.lists.entries[:count].equal(lists.entries[:count])


ROUTINGS = {
    "kimi": (64, Routing(8, scaling=2.827)),
    "groups": (32, Routing(3, 4, 2, scaling=2.5)),
    "plain weights": (40, Routing(4, 2, 1, normalise=False)),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_two_kernels_are_torchs(emulator: Any, name: str) -> None:
    experts, routing = ROUTINGS[name]
    one = Case.of(19, 320, experts, 64, routing, parts=None if name == "groups" else 20)
    whole = one.run()
    assert emulator.faults == 0
    one.check(whole)
    for rows in (slice(0, 1), slice(4, 13)):
        some = one.run(rows)
        assert some[0].equal(whole[0][rows])
        assert some[1].ids.equal(whole[1].ids[rows])
        assert some[1].gates.equal(whole[1].gates[rows])
        assert some[2].equal(whole[2][rows])
    without = one.run(normed=False, shared=False)
    assert without[2] is None
    assert without[0].data_ptr() == one.stream.rows.data_ptr()
    assert emulator.faults == 0


def test_a_cluster_adds_its_parts(emulator: Any) -> None:
    """K over several CTAs, more chunks a warp than are held at once, and weights read once each."""
    one = Case.of(9, 2400, 16, 32, Routing(2), parts=150)
    assert gate_launch.split_k(2400) == (3, 4)
    found = one.run()
    assert emulator.faults == 0
    assert (emulator.reads["gate"] == 1).all()
    one.check(found)
    # More chunks of the shared expert's width than are held at once.
    wide = Case.of(9, 64, 16, 320, Routing(2), parts=7)
    whole = wide.run()
    wide.check(whole)
    for rows in (slice(0, 1), slice(0, 4), slice(8, 9)):
        assert wide.run(rows)[2].equal(whole[2][rows])
    long = Case.of(2, 8992, 8, 32, Routing(2), parts=1)
    assert gate_launch.split_k(8992) == (8, 5)
    long.check(long.run())
    assert emulator.faults == 0


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_lists_hold_every_pair_once(emulator: Any, rows: int) -> None:
    """Of experts that many rows chose and of ones that none did; both ways to make them."""
    made = torch.Generator().manual_seed(rows)
    ids = torch.stack(
        [torch.rand(300, generator=made).square().mul(30 if m % 3 else 300).topk(5).indices for m in range(rows)]
    ).int()
    for tile in (8, 16):
        lists, other = gate.expert_lists(ids, 300, tile), sorted_lists(ids, 300, tile)
        assert emulator.faults == 0
        count = int(other.count[0])
        assert int(lists.count[0]) == count
        assert lists.entries[:count].equal(other.entries[:count])
        assert lists.order.equal(other.order)
        assert lists.place.equal(other.place)


def test_of_equal_experts_the_lower_id_comes_first(emulator: Any) -> None:
    bias = torch.tensor([0.0] * 5 + [1.0] + [0.0] * 34)
    ids, gates = gate.route(torch.zeros(2, 40), bias, Routing(4))
    assert ids.tolist() == [[5, 0, 1, 2]] * 2
    assert gates.equal(torch.full((2, 4), 0.25))
    assert emulator.faults == 0


def test_logits_are_cut_as_in_the_other_kernel() -> None:
    """One cut of K, one order: the same bits whichever of the two kernels a card runs."""
    assert gate_launch.split_k(7168) == route_launch.split_k(384, 7168)


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


SMALL = [  # rows, width, experts, width of the shared expert, sums of squares of a row
    *((19, 320, *ROUTINGS[name], 64, 20) for name in ROUTINGS),
    (9, 2400, 16, Routing(2), 32, 150),
    (9, 64, 16, Routing(2), 320, None),
    (2, 8992, 8, Routing(2), 32, 1),
]


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("rows", "width", "experts", "routing", "inner", "parts"), SMALL)
def test_gpu_every_branch(rows: int, width: int, experts: int, routing: Routing, inner: int, parts: int | None) -> None:
    """Small enough for the sanitizer: clusters of 1, 3 and 8, more chunks than are held at once, with and without norm
    and shared expert. Torch's part on the CPU."""
    here = Case.of(rows, width, experts, inner, routing, parts)
    there = Case.of(rows, width, experts, inner, routing, parts, device="cuda")
    x, choice, out = there.run()
    lists = choice.lists
    assert lists is not None
    moved = replace(lists, **{name: getattr(lists, name).cpu() for name in ("count", "entries", "order", "place")})
    here.check((x.cpu(), replace(choice, ids=choice.ids.cpu(), gates=choice.gates.cpu(), lists=moved), out.cpu()))
    first = there.run(slice(0, 1))
    assert first[1].ids.equal(choice.ids[:1])
    assert first[2].equal(out[:1])
    there.run(normed=False, shared=False)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", ROUTINGS)
def test_gpu_the_two_kernels_are_torchs(name: str) -> None:
    experts, routing = ROUTINGS[name]
    experts = 384 if name == "kimi" else experts
    for width, inner, parts in ((320, 256, 20), (7168, 256, 448), (7168, 256, None), (7168, 1024, 7)):
        one = Case.of(128, width, experts, inner, routing, parts, device="cuda")
        whole = one.run()
        one.check(whole)
        for rows in (1, 2, 5, 8, 9, 16, 17, 33, 100):
            for pdl in (None, False):
                x, choice, out = one.run(slice(0, rows), pdl=pdl)
                assert x.equal(whole[0][:rows]), rows
                assert choice.ids.equal(whole[1].ids[:rows]), rows
                assert choice.gates.equal(whole[1].gates[:rows]), rows
                assert out.equal(whole[2][:rows]), rows
                lists = sorted_lists(choice.ids, experts, choice.lists.tile)
                assert choice.lists.place.equal(lists.place), rows
                assert choice.lists.order.equal(lists.order), rows

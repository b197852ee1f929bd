"""The routed experts' CUDA C++ kernels, behind the router, too: on an emulated GPU; with the marker gpu on a card."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.kernels.cuda import expert_launch, expert_stream_launch, int4_launch, route_launch, router
from slipstream.kernels.cuda import experts as on_card
from slipstream.kernels.cuda.expert_launch import AS_PLANNED, DOWN, GATE_UP, Plan
from slipstream.kernels.expert_lists import empty_lists, sorted_lists
from slipstream.kernels.expert_mlp import ExpertWeights, expert_mlp
from slipstream.kernels.gpu import launch as gpu_launch
from slipstream.kernels.int4 import Int4Weight, arrange, dequantise, pack
from slipstream.kernels.route import Routing

GROUP = 32
STREAM = Plan(stream=True)  # of any number of rows


@pytest.fixture(scope="module")
def libraries(cuda_on_cpu: ModuleType, run_dir: Path) -> Any:
    return cuda_on_cpu, cuda_on_cpu.compile_experts(run_dir)


@pytest.fixture
def emulator(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module, compiled = libraries
    made = module.ExpertEmulator(compiled)
    made.install(monkeypatch)
    return made


@dataclass
class Case:
    """Experts with all the awkward weights, and rows that go to them."""

    weights: ExpertWeights
    exact: list[tuple[torch.Tensor, torch.Tensor]]  # (gate_up, down) of each expert, fp64
    x: torch.Tensor
    ids: torch.Tensor
    gates: torch.Tensor
    add: torch.Tensor

    def run(self, rows: slice = slice(None), **more: Any) -> torch.Tensor:
        inputs = (self.ids[rows], self.gates[rows], self.add[rows])
        with torch.no_grad():
            return on_card.expert_mlp(self.x[rows], self.weights, *inputs, **more)

    def twin(self) -> torch.Tensor:
        """On a card, too: ops run it while gradients are recorded."""
        with torch.enable_grad():
            return expert_mlp(self.x, self.weights, self.ids, self.gates, self.add)


def stack(made: torch.Generator, experts: int, rows: int, columns: int, half: int, device: str) -> Any:
    integers = torch.randint(-8, 8, (experts * rows, columns), generator=made, dtype=torch.int8).to(device)
    integers[0] = -8
    scale = ((0.5 + torch.rand(experts * rows, columns // GROUP, generator=made)) * columns**-0.5 / 2).bfloat16()
    scale = scale.to(device)
    scale[1, 0], scale[2, 0], scale[3] = 0.0, -0.0, 2.0**-133
    weight = arrange(pack(integers), scale, half)
    exact = dequantise(pack(integers), scale).double().unflatten(0, (experts, rows))
    return replace(weight, cuda=True), exact


def case(rows: int, experts: int, hidden: int, width: int, per_token: int, device: str = "cpu") -> Case:
    made = torch.Generator().manual_seed(1000 * experts + hidden)
    gate_up, up64 = stack(made, experts, 2 * width, hidden, width, device)
    down, down64 = stack(made, experts, hidden, width, 16, device)
    x = torch.randn(rows, hidden, generator=made).bfloat16().to(device)
    ids = torch.stack([torch.randperm(experts, generator=made)[:per_token] for _ in range(rows)]).int().to(device)
    gates = torch.rand(rows, per_token, generator=made).to(device)
    add = torch.randn(rows, hidden, generator=made).bfloat16().to(device)
    weights = ExpertWeights(gate_up, down, experts)
    return Case(weights, list(zip(up64, down64, strict=True)), x, ids, gates, add)


def products_within_the_bound(one: Case, tile: int | None = None) -> None:
    """Of the kernels' single products: |y - y64| <= 2^-8 |y64| + 2^-16 sum |a w|.

    down: with a gate of 1 for one expert of each row and 0 for the rest. gate and up: what silu(gate) * up may be where
    both are anywhere within their bounds, and rounded.
    """
    lists = router.expert_lists(one.ids, one.weights.num_experts, tile)
    num, device = one.weights.num_experts, one.x.get_device()
    assert isinstance(one.weights.gate_up, Int4Weight)
    assert isinstance(one.weights.down, Int4Weight)
    with torch.no_grad():
        inner = expert_launch.gate_up(one.x, one.weights.gate_up, lists, num, device)
        places = lists.place.view(one.ids.shape).tolist()
        ids = one.ids.tolist()
        for m in range(len(ids)):
            for j, expert in enumerate(ids[m]):
                up64, _ = one.exact[expert]
                x = one.x[m].double()
                (gate, up), (gate_sizes, up_sizes) = (up64 @ x).chunk(2), (up64.abs() @ x.abs()).chunk(2)
                gate_off = 2**-8 * gate.abs() + 2**-16 * gate_sizes + 2**-134
                up_off = 2**-8 * up.abs() + 2**-16 * up_sizes + 2**-134
                want = torch.nn.functional.silu(gate) * up
                # silu's slope is below 1.1; its value and the product are rounded once each.
                off = 1.1 * gate_off * (up.abs() + up_off) + torch.nn.functional.silu(gate).abs() * up_off
                off = off * (1 + 2**-7) + 2**-7 * want.abs() + 2**-130
                assert ((inner[places[m][j]].double() - want).abs() <= off).all(), (m, j)
        for j in range(one.ids.shape[1]):
            gates = torch.zeros_like(one.gates)
            gates[:, j] = 1
            y = expert_launch.down(inner, one.weights.down, lists, num, gates, None, device)
            for m in range(len(ids)):
                _, down64 = one.exact[ids[m][j]]
                a = inner[places[m][j]].double()
                want = down64 @ a
                bound = 2**-8 * want.abs() + 2**-16 * (down64.abs() @ a.abs()) + 2**-134
                assert ((y[m].double() - want).abs() <= bound).all(), (m, j)


def close_to_the_twin(found: torch.Tensor, want: torch.Tensor) -> None:
    typical = float(want.float().abs().mean())
    torch.testing.assert_close(found.float(), want.float(), rtol=2**-6, atol=typical * 2**-5)
    assert float((found != want).float().mean()) < 0.05


def test_products_are_within_the_bound_and_the_whole_is_the_twins(emulator: Any) -> None:
    one = case(5, 6, 96, 64, 3)
    emulator.num_experts = 6
    products_within_the_bound(one)
    close_to_the_twin(one.run(), one.twin())
    assert emulator.faults == 0


@pytest.mark.parametrize("rows", [1, 7])
def test_each_weight_of_a_chosen_expert_is_read_once_and_no_other(emulator: Any, rows: int) -> None:
    one = case(rows, 8, 128, 32, 2)
    emulator.num_experts = 8
    one.run(plan=Plan(stream=False))
    # In one piece of memory, so that the one kernel's reads of both are counted.
    gate_up, down = one.weights.gate_up, one.weights.down
    assert isinstance(gate_up, Int4Weight)
    assert isinstance(down, Int4Weight)
    words = torch.cat((gate_up.words.flatten(), down.words.flatten()))
    whole = [
        part.view(of.words.shape)
        for part, of in zip(words.split((gate_up.words.numel(), down.words.numel())), (gate_up, down), strict=True)
    ]
    one.weights = ExpertWeights(replace(gate_up, words=whole[0]), replace(down, words=whole[1]), 8)
    one.run(plan=STREAM)
    assert emulator.faults == 0
    assert emulator.names[-1] == "experts_stream"
    chosen = set(one.ids.flatten().tolist())
    streamed = emulator.reads["stream"]
    split = len(emulator.reads["gate"])
    for reads in (emulator.reads["gate"], emulator.reads["down"], streamed[:split], streamed[split:]):
        assert len(reads)
        by_expert = reads.reshape(8, -1)
        for expert in range(8):
            assert (by_expert[expert] == (expert in chosen)).all(), expert


@pytest.mark.parametrize("gate_up", GATE_UP, ids=lambda v: v.name("gate_up"))
def test_every_gate_up_kernel_gives_the_same_bits(
    emulator: Any, monkeypatch: pytest.MonkeyPatch, gate_up: expert_launch.Variant
) -> None:
    """A warp with no chunk of K, with one and with seven: whole rounds and not, several units a CTA and one each."""
    emulator.num_experts = 4
    for hidden in (64, 16 * 32 * 7):
        one = case(11, 4, hidden, 32, 2)
        tile = 8 * gate_up.row_tiles
        base = one.run(plan=Plan(stream=False))
        lists = sorted_lists(one.ids, 4, tile)
        for ctas in (0, 1):
            found = one.run(lists=lists, plan=Plan(False, gate_up, _down_of(tile), ctas))
            assert found.equal(base), (hidden, ctas)
    monkeypatch.setattr(expert_launch, "shared_limit", lambda arch: 0)  # one place for sums, not two
    plan = Plan(False, gate_up, _down_of(tile))
    assert one.run(lists=lists, plan=plan).equal(base)
    assert emulator.faults == 0


def _down_of(tile: int) -> expert_launch.Variant:
    return expert_launch.variant_of(DOWN, tile)


@pytest.mark.parametrize("down", DOWN, ids=lambda v: v.name("down"))
def test_every_down_kernel_gives_the_same_bits(
    emulator: Any, monkeypatch: pytest.MonkeyPatch, down: expert_launch.Variant
) -> None:
    """More entries than warps, K of whole rounds and not; sums of pairs in shared memory and in memory."""
    emulator.num_experts = 10
    for width in (256, 32):
        one = case(11, 10, 32, width, 4)
        base = one.run(plan=Plan(stream=False))
        lists = sorted_lists(one.ids, 10, 8 * down.row_tiles)
        plan = Plan(False, expert_launch.variant_of(GATE_UP, lists.tile), down)
        assert one.run(lists=lists, plan=plan).equal(base), width
    monkeypatch.setattr(expert_launch, "_MOST_SUMS", 0)
    assert one.run(lists=lists, plan=plan).equal(base)
    assert emulator.names[-1] == "experts_combine"
    assert emulator.faults == 0


STREAMED = (  # rows, experts, hidden, width, a row's experts; slots; multiprocessors
    ((1, 3, 32, 32, 2), 4, 3),
    ((1, 3, 32, 32, 2), 8, 2),
    ((5, 4, 1056, 96, 2), 4, 3),
    ((5, 4, 1056, 96, 2), 8, 2),
    ((1, 2, 7168, 256, 1), 4, 2),
)


@pytest.mark.parametrize(("sizes", "slots", "sms"), STREAMED)
def test_the_one_kernel_gives_the_bits_of_the_two(
    emulator: Any, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], slots: int, sms: int
) -> None:
    """K of one chunk and of whole slots, blocks of `down` that are no multiple of 4, shares of 2 and of 3 CTAs."""
    monkeypatch.setattr(expert_stream_launch, "_MOST_SLOTS", slots)
    monkeypatch.setattr(expert_stream_launch, "_sms", lambda device: sms)
    emulator.num_experts = sizes[1]
    one = case(*sizes)
    base = one.run(plan=Plan(stream=False))
    emulator.names.clear()
    for _ in range(2):  # counters are as they were behind each
        assert one.run(plan=STREAM).equal(base)
    assert emulator.names == ["route_rows", "experts_stream"] * 2
    assert emulator.faults == 0


def test_a_slot_of_the_ring_is_always_the_same_warps() -> None:
    """Or some wait for a phase without having seen the one before: 6 slots gave other bits at times."""
    rings = [expert_stream_launch.slots_of(limit, 8, 8) for limit in range(0, 256 << 10, 1 << 10)]
    assert set(rings) == {0, 4, 8}
    assert rings == sorted(rings)


def test_of_few_rows_two_kernels_are_taken(emulator: Any) -> None:
    emulator.num_experts = 8
    least = expert_stream_launch.FEWEST_ROWS
    one = case(least, 8, 128, 32, 2)
    for rows, stream in ((least - 1, False), (least, True)):
        emulator.names.clear()
        one.run(slice(0, rows))
        assert ("experts_stream" in emulator.names) == (stream and rows > 0)


def test_bits_of_a_row_do_not_depend_on_the_others(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.num_experts = 4
    one = case(130, 4, 32, 32, 2)
    whole = one.run()
    for rows in (slice(0, 1), slice(3, 5), slice(0, 17), slice(2, 130)):
        assert one.run(rows).equal(whole[rows]), rows
    assert emulator.faults == 0
    monkeypatch.setattr(expert_launch, "_STAGED_PAIRS", 0)
    assert one.run(slice(0, 9)).equal(whole[:9])
    assert emulator.faults == 0


def test_lists_of_kernels_agree() -> None:
    """expert_launch.py and expert_gemm.cu name the same kernels."""
    source = (Path(expert_launch.__file__).parent / "expert_gemm.cu").read_text()
    lines = re.findall(r"EXPERTS\((gate_up|down), (\d), (\d), (\d+), (\d)\)", source)
    compiled = [(kind, expert_launch.Variant(*map(int, rest))) for kind, *rest in lines]
    assert compiled == [("gate_up", v) for v in GATE_UP] + [("down", v) for v in DOWN]


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_shared_memory_of_every_launch_fits(emulator: Any, monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    """Sizes of Kimi's; weights are not touched."""
    asked: list[int] = []

    class Functions(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            return SimpleNamespace(launch=lambda grid, threads, shared, *_, **__: asked.append(shared))

    for module in (expert_launch, expert_stream_launch, route_launch):
        monkeypatch.setattr(module, "_module", lambda device: SimpleNamespace(functions=Functions()))
        monkeypatch.setattr(module, "capability", lambda: arch)
    words = torch.empty(16, 224, 8, 16, dtype=torch.int32), torch.empty(224, 8, 8, 16, dtype=torch.int32)
    gate_up = Int4Weight(words[0], torch.empty(16, 224, 8, 4, dtype=torch.bfloat16), 512, 256, cuda=True)
    down = Int4Weight(words[1], torch.empty(224, 8, 8, 4, dtype=torch.bfloat16), 7168, cuda=True)
    weights = ExpertWeights(gate_up, down, 1)
    for rows in (1, 8, 16, 17, 64, 128, 129, 2048):
        x, ids = torch.zeros(rows, 7168, dtype=torch.bfloat16), torch.zeros(rows, 8, dtype=torch.int32)
        lists = empty_lists(ids, 384)
        with torch.no_grad():
            on_card.expert_mlp(x, weights, ids, torch.zeros(rows, 8), None, lists)
            if rows <= 128:
                router.choose_experts(x, torch.zeros(384, 7168).bfloat16(), torch.zeros(384), Routing(8))
    assert len(asked) > 20
    assert max(asked) <= int4_launch.shared_limit(arch)


def test_down_may_read_the_lists_early_only_behind_gate_up(emulator: Any) -> None:
    """What it does before its wait hangs on it; the kernels' source has the same order."""
    emulator.num_experts = 4
    one = case(2, 4, 32, 32, 2)
    lists = sorted_lists(one.ids, 4, 8)
    assert isinstance(one.weights.gate_up, Int4Weight)
    with torch.no_grad():
        expert_launch.gate_up(one.x, one.weights.gate_up, lists, 4, -1)
    assert gpu_launch.settled()
    one.run(plan=Plan(stream=False))
    assert not gpu_launch.settled()


def test_lists_that_are_not_copied_are_not_read_early(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go through L1, which may hold what lay there before: only the wait empties it."""
    emulator.num_experts = 4
    one = case(2, 4, 32, 32, 2)
    seen: list[int] = []
    run = emulator.run
    monkeypatch.setattr(emulator, "run", lambda *launch: (seen.append(launch[-1].settled), run(*launch))[1])
    lists = sorted_lists(one.ids, 4, 8)
    for pairs, early in ((1024, 1), (0, 0)):
        monkeypatch.setattr(expert_launch, "_STAGED_PAIRS", pairs)
        one.run(lists=lists, plan=Plan(stream=False))
        assert seen[-1] == early


def test_gate_up_has_more_in_flight_while_each_unit_has_a_multiprocessor() -> None:
    of = expert_launch.gate_up_of
    assert of(8, 128, 132) == GATE_UP[0] != of(8, 133, 132)
    for tile in (8, 16, 32):
        for units in (1, 10_000):
            assert 8 * of(tile, units, 132).row_tiles == tile


CHAINED = Routing(
    3, scaling=0.05
)  # without a norm between layers, more grows until it is not finite, and equals nothing


def layers(one: Case, gate: torch.Tensor, count: int, routing: Routing, plan: Plan = AS_PLANNED) -> torch.Tensor:
    """Router and experts on the output of the layer before; memory of one layer is taken again by the next."""
    x, bias = one.x, torch.zeros(len(gate), device=one.x.device)
    with torch.no_grad():
        for _ in range(count):
            choice = router.choose_experts(x, gate, bias, routing)
            x = on_card.expert_mlp(x, one.weights, choice.ids, choice.gates, one.add, choice.lists, plan)
    return x


def test_layers_read_nothing_that_no_kernel_wrote(emulator: Any) -> None:
    """New memory is NaN and 2^31 - 1 in one of two chains, and what the chain before left in the other."""
    emulator.num_experts = 6
    one = case(5, 6, 96, 64, 3)
    gate = torch.randn(6, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    base = layers(one, gate, 2, CHAINED, STREAM)
    assert base.isfinite().all()
    assert not base.equal(one.add)
    torch.use_deterministic_algorithms(True)  # fills what is new
    try:
        assert torch.empty(1).isnan().all()
        assert layers(one, gate, 2, CHAINED, STREAM).equal(base)
    finally:
        torch.use_deterministic_algorithms(False)
    assert emulator.faults == 0


# ---- on a GPU ----

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("rows", [3, 11])
def test_gpu_every_kernel_over_few_chunks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Small enough for the sanitizer: every kernel, rings that go round, both places of sums. The twin on the CPU."""
    here, one = case(rows, 4, 1056, 96, 2), case(rows, 4, 1056, 96, 2, "cuda")
    base = one.run(plan=Plan(stream=False))
    close_to_the_twin(base.cpu(), here.twin())
    lists = {tile: router.expert_lists(one.ids, 4, tile) for tile in (8, 16, 32)}
    for gate_up in GATE_UP:
        tile = 8 * gate_up.row_tiles
        for ctas in (0, 1):
            assert one.run(lists=lists[tile], plan=Plan(False, gate_up, _down_of(tile), ctas)).equal(base), gate_up
    for slots, sms in ((4, 3), (8, 2)):
        monkeypatch.setattr(expert_stream_launch, "_MOST_SLOTS", slots)
        monkeypatch.setattr(expert_stream_launch, "_sms", lambda device, sms=sms: sms)
        for _ in range(2):  # counters are as they were behind each
            assert one.run(plan=STREAM).equal(base), slots
    monkeypatch.setattr(expert_launch, "_MOST_SUMS", 0)
    monkeypatch.setattr(expert_launch, "shared_limit", lambda arch: 0)  # one place for sums, not two
    assert one.run(plan=Plan(stream=False)).equal(base)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("rows", [1, 5, 33, 200])
def test_gpu_products_are_within_the_bound(rows: int) -> None:
    one = case(rows, 16, 512, 256, 4, "cuda")
    products_within_the_bound(one)
    close_to_the_twin(one.run(), one.twin())


@pytest.mark.gpu
@GPU
def test_gpu_rows_have_the_same_bits_in_any_company() -> None:
    one = case(160, 12, 7168, 256, 8, "cuda")
    whole = one.run()
    for count in (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 128):
        assert one.run(slice(0, count)).equal(whole[:count]), count
        assert one.run(slice(40, 40 + count)).equal(whole[40 : 40 + count]), count


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("rows", [1, 4, 16, 128])
def test_gpu_every_kernel_gives_the_same_bits(rows: int) -> None:
    one = case(rows, 24, 1792, 256, 8, "cuda")
    base = one.run(plan=Plan(stream=False))
    for tile in (8, 16, 32):
        lists = router.expert_lists(one.ids, 24, tile)
        for gate_up in (v for v in GATE_UP if 8 * v.row_tiles >= tile):
            for down in (v for v in DOWN if 8 * v.row_tiles >= tile):
                for more in ({}, {"pdl": False}, {"settled": False}, {"ctas": 0}):
                    plan = Plan(False, gate_up, down, **more)
                    assert one.run(lists=lists, plan=plan).equal(base), plan
        for _ in range(20):
            assert one.run(lists=lists, plan=STREAM).equal(base), tile  # in one kernel, where entries are of 8 rows


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_gpu_layers_have_the_same_bits_with_and_without_pdl_and_in_a_graph(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Twenty layers, so that kernels of neighbours overlap and memory is taken again."""
    one = case(rows, 24, 1792, 256, 8, "cuda")
    gate = (torch.randn(24, 1792, generator=torch.Generator().manual_seed(3)) * 1792**-0.5).bfloat16().cuda()
    routing = replace(CHAINED, per_token=8, scaling=0.004)  # twenty layers stay finite; 0.05 of them did not
    with monkeypatch.context() as context:
        context.setenv("SLIPSTREAM_PDL", "0")
        base = layers(one, gate, 20, routing, Plan(stream=False, settled=False))
    assert base.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = layers(one, gate, 20, routing, STREAM)
    for _ in range(5):
        assert layers(one, gate, 20, routing, STREAM).equal(base)
        graph.replay()
        assert x.equal(base)

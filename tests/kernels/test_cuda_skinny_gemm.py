"""The CUDA C++ matrix products against the torch twins: here on an emulated GPU, on a real one with the marker gpu."""

import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.kernels import linear_add, norm_gate_up, norm_linear, norm_qkv
from slipstream.kernels.cuda import build, launch, skinny_gemm
from slipstream.kernels.cuda import pack as packing
from slipstream.kernels.cuda.launch import Epilogue, Flow, Override, Variant
from slipstream.kernels.cuda.pack import RowOrder
from slipstream.kernels.gpu import launch as gpu_launch
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Norm, Stream

Make = Callable[..., Any]
HEADS = Heads(q=2, kv=1, dim=64)
BULK_BYTES = 84 << 10  # of a CTA on the emulated card


@pytest.fixture(scope="module")
def libraries(cuda_on_cpu: ModuleType, run_dir: Path) -> Any:
    return cuda_on_cpu, cuda_on_cpu.compile_all(run_dir)


@pytest.fixture
def emulator(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module, compiled = libraries
    made = module.Emulator(compiled)
    made.install(monkeypatch)
    return made


@pytest.fixture(autouse=True)
def unwritten_is_nan() -> Iterator[None]:
    """What torch.empty hands out is NaN, so that an output nobody wrote shows; the twin sums in fp32 on a GPU, too."""
    before = torch.are_deterministic_algorithms_enabled()
    matmul = torch.backends.cuda.matmul
    reduced = matmul.allow_bf16_reduced_precision_reduction
    torch.use_deterministic_algorithms(True, warn_only=True)
    matmul.allow_bf16_reduced_precision_reduction = False
    yield
    torch.use_deterministic_algorithms(before)
    matmul.allow_bf16_reduced_precision_reduction = reduced


class Case:
    """One op on random inputs: run by the kernel and by the twin."""

    def __init__(self, op: str, rows: int, n: int, k: int, device: str = "cpu", *, norm: bool, sums: bool) -> None:
        self.op, self.sums = op, sums
        made = torch.Generator().manual_seed(1000 * n + k)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=made) * scale).bfloat16().to(device)

        weight_rows = {"gate_up": 2 * n, "qkv": (HEADS.q + 2 * HEADS.kv) * HEADS.dim}.get(op, n)
        self.weight = random(weight_rows, k, scale=k**-0.5)
        order = {"gate_up": RowOrder.GATE_UP, "qkv": RowOrder.HEADS}.get(op, RowOrder.ROWS)
        self.packed = packing.pack(self.weight, order, HEADS.dim if op == "qkv" else 0)
        self.norm = Norm(1 + random(k, scale=0.1), 1e-5) if norm else None
        self.x, self.residual = random(rows, k, scale=2.0), random(rows, n)
        angles = 6 * torch.rand(rows, HEADS.dim // 2, generator=made).repeat(1, 2)  # -> [rows, dim]
        self.cos, self.sin = angles.cos().bfloat16().to(device), angles.sin().bfloat16().to(device)
        self.cells = torch.randperm(5 * 32, generator=made)[:rows].to(device)
        self.cache = random(5, 32, 2, HEADS.kv, HEADS.dim)

    def first(self, rows: int) -> "Case":
        """The case of the first rows alone."""
        part = copy.copy(self)
        for name in ("x", "residual", "cos", "sin", "cells"):
            setattr(part, name, getattr(self, name)[:rows])
        return part

    def run(self, ops: Any, **more: Any) -> dict[str, torch.Tensor]:
        """Every tensor that the op makes or changes."""
        x, weight = self.x, self.weight if ops is TWIN else self.packed
        sums = x.float().square().unflatten(-1, (-1, 16)).sum(-1) if self.sums else None  # [M, K] -> [M, K / 16]
        stream = Stream(x, sums)
        if self.op == "store":
            return {"y": ops["norm_linear"](stream, self.norm, weight, **more)}
        if self.op == "add":
            out = ops["linear_add"](x, weight, Stream(self.residual), **more)
            return {"rows": out.rows, **({} if out.sumsq is None else {"sumsq": out.sumsq})}
        if self.op == "gate_up":
            return {"y": ops["norm_gate_up"](stream, self.norm, weight, **more)}
        cache = self.cache.clone()
        arguments = (stream, self.norm, weight, HEADS, self.cos, self.sin)
        q, _, _ = ops["norm_qkv"](*arguments, sink=KVSink(cache, self.cells), **more)
        q2, k, v = ops["norm_qkv"](*arguments, **more)
        assert q.equal(q2)
        return {"q": q, "k": k, "v": v, "cache": cache}


TWIN = {
    "norm_linear": norm_linear.norm_linear,
    "linear_add": linear_add.linear_add,
    "norm_gate_up": norm_gate_up.norm_gate_up,
    "norm_qkv": norm_qkv.norm_qkv,
}
KERNEL = {name: getattr(skinny_gemm, name) for name in TWIN}
EPILOGUES = {"store": Epilogue.STORE, "add": Epilogue.ADD, "gate_up": Epilogue.GATE_UP, "qkv": Epilogue.QKV}
CASES = [("store", False), ("store", True), ("add", False), ("gate_up", True), ("qkv", False), ("qkv", True)]
EVERY_KERNEL = [(op, norm, v) for op, norm in CASES for v in launch.VARIANTS]


EVERY_N, EVERY_K = 80, 1184  # 5 tiles of 16 rows or 10 of pairs; 37 chunks: five parts of five, three of four


def same_but_for_rounding(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal up to the order of fp32 sums: nearly every bf16 the same, the others few ulps away.

    More than one where a rounding that fell otherwise goes through silu or a rotation. Where a small value is the
    difference of large ones its own ulp says little, so ulps of the typical value are allowed as well.
    """
    for name, want in expected.items():
        got = found[name]
        assert got.shape == want.shape, name
        typical = float(want.float().abs().mean())
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-6, atol=typical * 2**-6, msg=message)
        assert float((got != want).float().mean()) < 0.03, name


def sums_are_of_what_was_written(found: dict[str, torch.Tensor]) -> None:
    if "sumsq" in found:
        padded = torch.nn.functional.pad(found["rows"].float(), (0, -found["rows"].shape[1] % 16))
        torch.testing.assert_close(found["sumsq"], padded.square().unflatten(-1, (-1, 16)).sum(-1))


@pytest.mark.parametrize(("op", "norm", "variant"), EVERY_KERNEL)
def test_every_kernel_reads_each_weight_once_and_gives_the_product(
    emulator: Any, op: str, norm: bool, variant: Variant
) -> None:
    """The rings are shorter than what goes through them."""
    rows = 8 * variant.row_tiles - 3
    case = Case(op, rows, EVERY_N, EVERY_K, norm=norm, sums=True)
    found = case.run(KERNEL, override=Override(variant=variant, parts=8))
    assert emulator.names[-1] == variant.name(EPILOGUES[op], norm)
    assert emulator.faults == 0
    assert (emulator.reads == emulator.groups).all()
    assert emulator.reads.shape[1:] == (EVERY_K // 32, 64)
    same_but_for_rounding(found, case.run(TWIN))
    sums_are_of_what_was_written(found)


FLOWS = [
    Flow(left=0, fixed=9),
    Flow(left=16, fixed=2),
    Flow(left=1 << 10, fixed=1),
    Flow(left=1 << 10, fixed=9),
]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(
    ("op", "norm", "variant"),
    [
        ("add", False, launch.BULK),
        ("add", False, launch.BULK_LONG_K),
        ("qkv", True, launch.BULK),
        ("qkv", True, launch.BULK_ONE),
    ],
)
def test_bulk_copies_hand_the_memory_over(
    emulator: Any, monkeypatch: pytest.MonkeyPatch, op: str, norm: bool, variant: Variant, flow: Flow
) -> None:
    """Which CTA has which units, and when the next kernel may start.

    CTAs run one after another here: the first has all units that are handed out.
    """
    case = Case(op, 5, EVERY_N, EVERY_K, norm=norm, sums=True)
    override = Override(variant=variant, parts=8)
    expected = case.run(KERNEL, override=override)
    monkeypatch.setattr(launch, "FLOW", flow)
    monkeypatch.setattr(launch, "ONE_FLOW", flow)
    found = case.run(KERNEL, override=override)
    assert emulator.faults == 0
    assert (emulator.reads == 1).all()
    assert all(value.equal(expected[name]) for name, value in found.items())
    assert int(case.packed.counter) == 0  # as the next launch wants it
    assert gpu_launch.settled()

    slot_kb, tiles = 8 * variant.weight_tiles, variant.weight_tiles
    unit_slots = 5  # of 37 chunks, 8 of each tile in a slot
    units, grid = emulator.reads.shape[0] // tiles, emulator.grid
    assert grid == 2
    for cta, (copies, at_start, unwaited) in enumerate(emulator.flows.tolist()):
        own = list(range(cta, units, grid))[: flow.fixed]
        handed_out = [] if cta else list(range(grid * flow.fixed, units))
        slots = [(unit, slot) for unit in own + handed_out for slot in range(unit_slots)]
        filled = min(variant.slots(8, BULK_BYTES), len(own) * unit_slots)
        lets_go = (i for i, (u, s) in enumerate(slots) if u + grid >= units and unit_slots - s <= flow.left // slot_kb)
        assert copies == len(slots) * tiles
        assert not unwaited
        assert at_start == next((i for i in lets_go if i >= filled), len(slots)) * tiles


def test_sums_that_a_cta_reads_together_give_the_bits_of_those_a_warp_reads(emulator: Any) -> None:
    case = Case("store", 5, 48, 2048, norm=True, sums=True)  # 128 sums a row: a multiple of four
    found = case.run(KERNEL, override=Override(variant=launch.BULK))
    assert emulator.faults == 0
    assert found["y"].equal(case.run(KERNEL, override=Override(variant=launch.ONE_TILE))["y"])


def test_large_and_small_rings_take_turns(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An SM has no room for two large ones; attention finds the same one in front of it at every capture."""
    module, compiled = libraries
    emulator = module.Emulator(compiled)
    emulator.install(monkeypatch, 80 << 10, 140 << 10)
    monkeypatch.setattr(launch, "IN_L2", 0)
    layer = [Case(op, 3, 48, 512, norm=op != "add", sums=True) for op in ("qkv", "add", "gate_up", "add")]
    head = Case("store", 3, 48, 512, norm=True, sums=True)
    for before in (0, 1):
        for _ in range(before):
            head.run(KERNEL)
        for _ in range(2):
            shared = []
            for case in (*layer, *layer, head):
                case.run(KERNEL, override=Override(variant=launch.BULK))
                assert emulator.faults == 0
                shared.append(emulator.shared[-1] >> 10)
            assert shared == [140, 80, 140, 80, 140, 80, 140, 80, 140]


def test_rings_fit_on_an_sm_as_they_should() -> None:
    """sm_90 has 228 KB, of which the system takes 1 for each CTA; attention needs at most 74."""
    large, small, sm = launch.LARGE_BULK_BYTES, launch.MOST_BULK_BYTES, 228 << 10
    assert 2 * (large + 1024) > sm
    assert large + small + 2048 <= sm
    assert large + (74 << 10) + 2048 <= sm


@pytest.mark.parametrize(("op", "norm"), CASES)
@pytest.mark.parametrize("k", [288, 2080])
def test_bits_of_a_row_do_not_depend_on_the_others(
    emulator: Any, monkeypatch: pytest.MonkeyPatch, op: str, norm: bool, k: int
) -> None:
    """k = 2080: 65 chunks, so each warp reloads its slots several times and the last warp has fewer."""
    if k == 2080:
        monkeypatch.setattr(launch, "IN_L2", 0)  # few rows: bulk copies
    case = Case(op, 70, 16, k, norm=norm, sums=False)
    whole = case.run(KERNEL)
    assert emulator.groups >= 2
    same_but_for_rounding(whole, case.run(TWIN))
    for rows in (1, 2, 7, 9, 17, 33):
        part = case.first(rows).run(KERNEL)
        assert emulator.faults == 0
        for name, value in part.items():
            if name != "cache":
                assert value.equal(whole[name][:rows]), (name, rows)
    assert len(set(emulator.names)) >= 3  # kernels
    assert any(name.startswith("bulk") for name in emulator.names) == (k == 2080)


@pytest.mark.parametrize("most", [launch.MAX_ROWS, 64])
@pytest.mark.parametrize(("op", "norm"), CASES)
def test_prompts_of_several_requests_go_in_one_launch_or_in_groups(
    emulator: Any, monkeypatch: pytest.MonkeyPatch, op: str, norm: bool, most: int
) -> None:
    monkeypatch.setattr(skinny_gemm, "MAX_ROWS", most)
    case = Case(op, 150, 16, 64, norm=norm, sums=norm)
    whole = case.run(KERNEL)
    launches = (1 if most > 150 else 3) * (2 if op == "qkv" else 1)  # with a sink and without
    assert len(emulator.names) == launches
    assert emulator.faults == 0
    same_but_for_rounding(whole, case.run(TWIN))
    for name, value in case.first(5).run(KERNEL).items():
        assert name == "cache" or value.equal(whole[name][:5]), name


@pytest.mark.parametrize("variant", launch.VARIANTS)
def test_bits_do_not_depend_on_the_variant(emulator: Any, variant: Variant) -> None:
    case = Case("add", 5, 88, 3104, norm=False, sums=False)
    a, b = case.run(KERNEL), case.run(KERNEL, override=Override(variant=variant))
    assert a["rows"].equal(b["rows"])
    assert a["sumsq"].equal(b["sumsq"])
    same_but_for_rounding(a, case.run(TWIN))
    sums_are_of_what_was_written(a)


def test_rows_of_a_wider_tensor(emulator: Any) -> None:
    case = Case("store", 3, 16, 64, norm=True, sums=False)
    wide = torch.full((3, 96), float("nan")).bfloat16()
    wide[:, 16:80] = case.x
    expected = case.run(KERNEL)
    case.x = wide[:, 16:80]
    assert case.run(KERNEL)["y"].equal(expected["y"])


def test_what_is_not_done_is_refused() -> None:
    weight = packing.pack(torch.zeros(16, 64).bfloat16())
    rows = torch.zeros(2, 64).bfloat16()
    for x, words in (
        (rows.float(), "expected bf16"),
        (rows[:, :32], r"expected \[M, K\] and \[N, K\]"),
        (torch.zeros(64, 2).bfloat16().t(), "not aligned"),
        (torch.zeros(2, 72).bfloat16()[:, 4:68], "not aligned"),
    ):
        with pytest.raises(ValueError, match=words):
            skinny_gemm.norm_linear(Stream(x), None, weight)
    norm = Norm(rows[0], 1e-5)
    with pytest.raises(ValueError, match="norm of single heads"):
        skinny_gemm.norm_qkv(Stream(rows), None, weight, HEADS, rows, rows, q_norm=norm)
    with pytest.raises(ValueError, match="in order rows; expected gate_up"):
        skinny_gemm.norm_gate_up(Stream(rows), norm, weight)


def test_lists_of_kernels_agree() -> None:
    """launch.py and skinny_gemm.cu name the same kernels, and the registers of none are promised to too many warps."""
    source = (Path(launch.__file__).parent / "skinny_gemm.cu").read_text()
    kernels = re.findall(r"(SKINNY|BULK)\(EPILOGUE, NORM, (\d), (\d), (\d), (\d+), (\d+), ([^)\s]+)", source)
    compiled = {(kind == "BULK", *map(int, numbers), last == "true") for kind, *numbers, last in kernels}
    listed = {
        (v.bulk, v.row_tiles, v.weight_tiles, v.depth, v.x_depth, v.max_warps, v.resident) for v in launch.VARIANTS
    }
    assert len(kernels) == len(launch.VARIANTS)
    assert compiled == listed


@pytest.mark.parametrize("k", [32, 64, 576, 960, 1536, 2048, 4096, 14336])
@pytest.mark.parametrize("norm", [False, True])
def test_parts_cover_k(k: int, norm: bool) -> None:
    parts, per_part = launch.split_k(k, norm)
    assert (parts - 1) * per_part < k // 32 <= parts * per_part
    for rows in (1, 8, 9, 16, 17, 33, 128):
        for bulk_bytes in (0, 50176, launch.MOST_BULK_BYTES):  # sm_80, sm_120, sm_90
            for tiles in (3, 60, 192, 8016):
                device = launch.Device(132, bulk_bytes)
                variant = launch.choose(rows, tiles, k, parts, per_part, device)
                assert parts <= variant.max_warps
                assert variant.shared_bytes(parts, bulk_bytes) <= max(99 << 10, bulk_bytes)
                assert variant.shared_bytes(parts, bulk_bytes) <= launch.most_shared_bytes(variant, bulk_bytes)
                assert bulk_bytes or not variant.bulk
                assert per_part <= variant.x_depth or not variant.resident
                assert rows <= 8 or not variant.bulk


def test_large_weights_of_few_rows_come_by_bulk_copies() -> None:
    """The products of Llama-3.1-8B on an H200: how many tiles the busiest CTA takes says how even the work is."""
    device = launch.Device(132, launch.MOST_BULK_BYTES)
    for n, k, busiest in ((6144, 4096, 3), (4096, 4096, 2), (28672, 4096, 14), (4096, 14336, 2), (128256, 4096, 61)):
        for rows in (1, 8):
            variant = launch.choose(rows, n // 16, k, *launch.split_k(k, True), device)
            assert variant.bulk
            units = -(-n // 16 // variant.weight_tiles)
            assert -(-units // 132) * variant.weight_tiles <= busiest + 1
            assert variant.slots(8, device.bulk_bytes) >= 4


@pytest.mark.parametrize(
    ("rows", "qkv", "o", "gate_up", "down"),  # rows of x in a CTA; timed to be the fastest, or within 2 %, on an H200
    [(8, 8, 8, 8, 8), (16, 8, 8, 8, 8), (32, 8, 8, 16, 8), (64, 8, 16, 32, 16), (128, 16, 32, 32, 32)],
)
def test_a_short_k_takes_the_lowest_ctas_that_are_all_on_the_card(
    rows: int, qkv: int, o: int, gate_up: int, down: int
) -> None:
    """The products of SmolLM2-135M on an H200."""
    device = launch.Device(132, launch.MOST_BULK_BYTES)
    shapes = ((960, 576, True, qkv), (576, 576, False, o), (3072, 576, True, gate_up), (576, 1536, False, down))
    for n, k, norm, high in shapes:
        variant = launch.choose(rows, n // 16, k, *launch.split_k(k, norm), device)
        assert 8 * variant.row_tiles == high, (n, k)
        assert variant.weight_tiles == 2


def test_a_host_without_nvcc_says_so_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    monkeypatch.setattr(build, "nvcc", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.available.cache_clear()
    assert not build.available(90)
    assert not build.available(90)
    assert caplog.text.count("no nvcc on this host") == 1
    with pytest.raises(RuntimeError, match="looked on PATH"):
        build.cubins(90)
    build.available.cache_clear()


# ---- on a GPU ----

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("op", "norm", "variant"), EVERY_KERNEL)
def test_gpu_every_kernel(op: str, norm: bool, variant: Variant) -> None:
    rows = 8 * variant.row_tiles - 3
    case = Case(op, rows, EVERY_N, EVERY_K, "cuda", norm=norm, sums=True)
    found = case.run(KERNEL, override=Override(variant=variant, parts=8))
    # The twin on the CPU: the sanitizer does not see what a library's product writes by a bulk copy.
    twin = Case(op, rows, EVERY_N, EVERY_K, norm=norm, sums=True).run(TWIN)
    same_but_for_rounding(found, {name: value.cuda() for name, value in twin.items()})
    sums_are_of_what_was_written(found)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("op", "norm"), CASES)
@pytest.mark.parametrize(("n", "k"), [(576, 576), (1536, 576), (576, 1536), (3600, 4096), (4304, 14336)])
def test_gpu_rows_and_twin(monkeypatch: pytest.MonkeyPatch, op: str, norm: bool, n: int, k: int) -> None:
    if k >= 4096:
        monkeypatch.setattr(launch, "IN_L2", 0)  # few rows: bulk copies
    case = Case(op, 128, n, k, "cuda", norm=norm, sums=True)
    whole = case.run(KERNEL)
    same_but_for_rounding(whole, case.run(TWIN))
    sums_are_of_what_was_written(whole)
    for rows in (1, 2, 3, 7, 8, 16, 17, 33, 65):
        for pdl in (False, True):
            part = case.first(rows).run(KERNEL, override=Override(pdl=pdl))
            for name, value in part.items():
                if name != "cache":
                    assert value.equal(whole[name][:rows]), (name, rows, pdl)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("hidden", "inner"), [(576, 1536), (2048, 8192)])
def test_gpu_chain_in_a_graph_is_the_same_with_dependent_launch(hidden: int, inner: int) -> None:
    """Ten dependent layers: a wait that is missing shows as other bits sooner or later."""
    torch.use_deterministic_algorithms(False)  # it would put a kernel that fills with NaN between ours
    made = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=made, device="cuda") * scale).bfloat16()

    layers = [
        (
            packing.pack(random(2 * inner, hidden, scale=hidden**-0.5), RowOrder.GATE_UP),
            packing.pack(random(hidden, inner, scale=inner**-0.5)),
            random(hidden, scale=0.1) + 1,
        )
        for _ in range(10)
    ]
    x = random(4, hidden, scale=1.0)

    def forward(pdl: bool) -> Stream:
        stream = Stream(x)
        for gate_up, down, norm in layers:
            inner_rows = skinny_gemm.norm_gate_up(stream, Norm(norm, 1e-5), gate_up, override=Override(pdl=pdl))
            stream = skinny_gemm.linear_add(inner_rows, down, stream, override=Override(pdl=pdl))
        return stream

    launch.load(torch.cuda.current_device())
    with torch.no_grad():
        expected = forward(False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = forward(True)
        for _ in range(200):
            found.rows.fill_(float("nan"))
            graph.replay()
            assert found.rows.equal(expected.rows)
            assert found.sumsq is not None
            assert expected.sumsq is not None
            assert found.sumsq.equal(expected.sumsq)

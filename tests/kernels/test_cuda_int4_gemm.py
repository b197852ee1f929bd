"""The CUDA C++ kernels over INT4 weights against the torch twins: on an emulated GPU; with the marker gpu on a card."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.kernels import dispatch, linear_add, norm_gate_up, norm_linear, norm_qkv
from slipstream.kernels.cuda import int4_launch, skinny_gemm
from slipstream.kernels.cuda.int4_launch import Variant
from slipstream.kernels.cuda.launch import Epilogue, Override
from slipstream.kernels.gpu import launch as gpu_launch
from slipstream.kernels.int4 import Int4Weight, arrange, dequantise, pack
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Norm, Stream

HEADS = Heads(q=2, kv=1, dim=64)
OPS = {"store": Epilogue.STORE, "add": Epilogue.ADD, "gate_up": Epilogue.GATE_UP, "qkv": Epilogue.QKV}
TWIN = {
    "norm_linear": norm_linear.norm_linear,
    "linear_add": linear_add.linear_add,
    "norm_gate_up": norm_gate_up.norm_gate_up,
    "norm_qkv": norm_qkv.norm_qkv,
}
KERNEL = {name: getattr(skinny_gemm, name) for name in TWIN}


@pytest.fixture(scope="module")
def libraries(cuda_on_cpu: ModuleType, run_dir: Path) -> Any:
    return cuda_on_cpu, {group: cuda_on_cpu.compile_int4(run_dir, group) for group in (32, 128)}


@pytest.fixture
def emulators(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An emulator of the kernels of one group."""
    module, compiled = libraries

    def of(group: int, arch: int = 90) -> Any:
        made = module.Int4Emulator(compiled[group])
        made.install(monkeypatch, arch)
        return made

    return of


class Case:
    """One op on random inputs: run by the kernel and by the twin."""

    def __init__(self, op: str, rows: int, n: int, k: int, group: int, device: str = "cpu") -> None:
        self.op = op
        made = torch.Generator().manual_seed(1000 * n + k)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=made) * scale).bfloat16().to(device)

        weight_rows = {"gate_up": 2 * n, "qkv": (HEADS.q + 2 * HEADS.kv) * HEADS.dim}.get(op, n)
        integers = torch.randint(-8, 8, (weight_rows, k), generator=made, dtype=torch.int8)
        integers[0] = -8
        scale = ((0.5 + torch.rand(weight_rows, k // group, generator=made)) * k**-0.5 / 4).bfloat16()
        scale[1, 0], scale[2, 0], scale[3] = 0.0, -0.0, 2.0**-133
        half = {"gate_up": n, "qkv": HEADS.dim // 2}.get(op, 16)
        made_weight = arrange(pack(integers), scale, half)
        words, scales = made_weight.words.to(device), made_weight.scales.to(device)
        self.weight = Int4Weight(words, scales, weight_rows, half, cuda=True)
        self.exact = dequantise(pack(integers), scale).double().to(device)  # [N, K]
        self.norm = Norm(1 + random(k, scale=0.1), 1e-5)
        self.x, self.residual = random(rows, k, scale=2.0), random(rows, n)
        self.sums: int | None = 16  # columns that a sum of squares is of; None: there are none
        angles = 6 * torch.rand(rows, HEADS.dim // 2, generator=made).repeat(1, 2)  # -> [rows, dim]
        self.cos, self.sin = angles.cos().bfloat16().to(device), angles.sin().bfloat16().to(device)
        self.cells = torch.randperm(9 * 32, generator=made)[:rows].to(device)
        self.cache = random(9, 32, 2, HEADS.kv, HEADS.dim)

    def twin(self) -> dict[str, torch.Tensor]:
        """As `run`, by the torch twins: on a card, too, since ops run them while gradients are recorded."""
        with torch.enable_grad():
            return self._run(TWIN, slice(None))

    def run(self, rows: slice = slice(None), **more: Any) -> dict[str, torch.Tensor]:
        """Every tensor that the op makes or changes, for these rows, by the kernels."""
        with torch.no_grad():
            return self._run(KERNEL, rows, **more)

    def _run(self, ops: Any, rows: slice, **more: Any) -> dict[str, torch.Tensor]:
        x = self.x[rows]
        stream = Stream(x, x.float().square().unflatten(-1, (-1, self.sums)).sum(-1) if self.sums else None)
        if self.op == "store":
            return {"y": ops["norm_linear"](Stream(x), None, self.weight, **more)}
        if self.op == "add":
            out = ops["linear_add"](x, self.weight, Stream(self.residual[rows]), **more)
            return {"rows": out.rows, **({} if out.sumsq is None else {"sumsq": out.sumsq})}
        if self.op == "gate_up":
            return {"y": ops["norm_gate_up"](stream, self.norm, self.weight, **more)}
        cache = self.cache.clone()
        arguments = (stream, self.norm, self.weight, HEADS, self.cos[rows], self.sin[rows])
        q, _, _ = ops["norm_qkv"](*arguments, sink=KVSink(cache, self.cells[rows]), **more)
        q2, k, v = ops["norm_qkv"](*arguments, **more)
        assert q.equal(q2)
        return {"q": q, "k": k, "v": v, "cache": cache}


def same_but_for_rounding(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """As in test_cuda_skinny_gemm.py: nearly every bf16 the same, the others few ulps away."""
    for name, want in expected.items():
        got = found[name]
        assert got.shape == want.shape, name
        typical = float(want.float().abs().mean())
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-6, atol=typical * 2**-6, msg=message)
        assert float((got != want).float().mean()) < 0.03, name


def within_the_bound(case: Case, y: torch.Tensor) -> None:
    """|y - y64| <= 2^-8 |y64| + 2^-16 sum |x w|, and half of bf16's smallest number."""
    x = case.x.double()
    want = x @ case.exact.T
    bound = 2**-8 * want.abs() + 2**-16 * (x.abs() @ case.exact.abs().T) + 2**-134
    assert ((y.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("name", ["NARROW", "WIDE_16", "DIRECT", "DIRECT_16"])
@pytest.mark.parametrize("columns", [384, 128])
def test_sums_of_squares_in_any_number_of_parts_are_read_of_every_row(
    emulators: Callable[..., Any], name: str, columns: int
) -> None:
    """One a row, as the embedding leaves them, or three."""
    emulators(128)
    variant = getattr(int4_launch, name)
    case = Case("gate_up", 8 * variant.row_tiles, 48, 384, 128)
    case.sums = columns
    same_but_for_rounding(case.run(override=Override(variant=variant)), case.twin())


@pytest.mark.parametrize("variant", int4_launch.VARIANTS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group", [32, 128])
def test_every_kernel_reads_each_weight_once_and_gives_the_product(
    emulators: Callable[..., Any], op: str, group: int, variant: Variant
) -> None:
    emulator = emulators(group)
    case = Case(op, 8 * variant.row_tiles - 3, 48, 384, group)  # three quads, a warp each
    found = case.run(override=Override(variant=variant))
    assert emulator.names[-1] == variant.name(OPS[op], group)
    assert emulator.faults == 0
    assert (emulator.reads == emulator.groups).all()
    same_but_for_rounding(found, case.twin())
    if op == "store":
        within_the_bound(case, found["y"])
        assert (found["y"][:, 3].abs() < 1e-30).all()  # subnormal scales
    if "sumsq" in found:
        padded = found["rows"].float().square().unflatten(-1, (-1, 16)).sum(-1)
        torch.testing.assert_close(found["sumsq"], padded)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group", [32, 128])
def test_bits_of_a_row_do_not_depend_on_the_others(emulators: Callable[..., Any], op: str, group: int) -> None:
    """17 parts of K's 33 quads make two for each warp and one for the last; rows of every variant."""
    emulator = emulators(group)
    case = Case(op, 34, 32, 33 * 128, group)
    whole = case.run()
    assert emulator.faults == 0
    assert emulator.groups == 2
    same_but_for_rounding(whole, case.twin())
    for rows in (slice(0, 1), slice(2, 10), slice(20, 34)):
        part = case.run(rows)
        assert emulator.faults == 0
        for name, value in part.items():
            if name != "cache":
                assert value.equal(whole[name][rows]), (name, rows)
    assert {name.split("_")[4] for name in emulator.names} == {"1", "2", "4"}  # tiles of 8 rows


def test_a_norm_reads_the_rows_where_no_sums_were_left(emulators: Callable[..., Any]) -> None:
    emulator = emulators(32)
    case = Case("gate_up", 5, 32, 256, 32)
    case.sums = None
    same_but_for_rounding(case.run(), case.twin())
    assert emulator.faults == 0


@pytest.mark.parametrize("variant", [v for v in int4_launch.VARIANTS if v.staged])
@pytest.mark.parametrize("op", OPS)
def test_a_cta_takes_several_blocks_in_turn(
    emulators: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, op: str, variant: Variant
) -> None:
    """The emulated card has one multiprocessor. Parts of as many quads as are in flight, and more; a CTA less busy."""
    emulator = emulators(32)
    blocks = 2 * variant.ctas + 1
    monkeypatch.setattr(int4_launch, "_FEW_BLOCKS", 128 if variant.max_warps == 16 else 0)
    case = Case(op, 3, (16 if op == "gate_up" else 32) * blocks, 128 * variant.max_warps * variant.depth, 32)
    found = case.run(override=Override(variant=variant))
    assert emulator.faults == 0
    assert (emulator.reads == 1).all()
    assert emulator.grid < emulator.reads.shape[0]
    same_but_for_rounding(found, case.twin())


def test_rows_that_do_not_fit_are_not_staged(emulators: Callable[..., Any]) -> None:
    """A card of 99 KB: other kernels, the same bits."""
    case = Case("add", 6, 32, 128 * 80, 128)
    emulator = emulators(128, 90)
    staged = case.run()
    assert emulator.names[-1].split("_")[6] == "1"
    emulator = emulators(128, 120)
    direct = case.run()
    assert emulator.names[-1].split("_")[6] == "0"
    assert emulator.faults == 0
    assert staged["rows"].equal(direct["rows"])


@pytest.mark.parametrize("op", OPS)
def test_ops_run_the_kernels_where_there_is_a_card(
    emulators: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    emulator = emulators(128)
    monkeypatch.setattr(dispatch, "on_gpu", lambda x: True)
    case = Case(op, 3, 32, 256, 128)
    by_ops = case._run(TWIN, slice(None))
    assert emulator.names
    by_kernels = case.run()
    assert by_ops.keys() == by_kernels.keys()
    for name, value in by_ops.items():
        assert value.equal(by_kernels[name]), name


@pytest.mark.parametrize("op", ["store", "add"])
def test_many_rows_go_in_groups(emulators: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """More than a launch takes, through the op."""
    emulator = emulators(128)
    monkeypatch.setattr(dispatch, "on_gpu", lambda x: True)
    monkeypatch.setattr(skinny_gemm, "MAX_ROWS", 128)
    case = Case(op, 130, 32, 256, 128)
    whole = case._run(TWIN, slice(None))
    assert len(emulator.names) == 2
    for rows in (slice(0, 3), slice(125, 130)):
        for name, value in case.run(rows).items():
            assert value.equal(whole[name][rows]), (name, rows)


def test_only_the_product_of_q_k_and_v_settles(emulators: Callable[..., Any]) -> None:
    """What attention may read before it waits hangs on it; the kernel's source has the same condition."""
    emulators(128)
    for op in OPS:
        Case(op, 1, 32, 256, 128).run()
        assert gpu_launch.settled() == (op == "qkv")


def test_lists_of_kernels_agree() -> None:
    """int4_launch.py and int4_gemm.cu name the same kernels, and the registers of none are promised to more warps."""
    source = (Path(int4_launch.__file__).parent / "int4_gemm.cu").read_text()
    lines = re.findall(r"INT4\(EPILOGUE, NORM, GROUP, (\d), (\d), (\d), (\d+), (\d)\)", source)
    compiled = {
        Variant(int(tiles), int(depth), staged == "1", int(threads) // 32, int(ctas))
        for tiles, depth, staged, threads, ctas in lines
    }
    assert compiled == set(int4_launch.VARIANTS)
    assert len(lines) == len(compiled)
    for epilogue in Epilogue:
        assert f"FOR_ALL({int(epilogue)}, {int(int4_launch.has_norm(epilogue))}, SLIPSTREAM_GROUP)" in source


@pytest.mark.parametrize(
    "shape",
    [(128, 128), (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (32, 28672), (5120, 13824)],
)
def test_warps_cover_k(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    quads, blocks = shape[1] // 128, -(-shape[0] // 32)
    parts, per_part = int4_launch.split_k(*shape)
    assert (parts - 1) * per_part < quads <= parts * per_part
    for arch in (80, 90, 120):
        limit = int4_launch.shared_limit(arch)
        monkeypatch.setattr(int4_launch, "capability", lambda arch=arch: arch)
        for rows in (1, 4, 6, 7, 8, 9, 16, 17, 128):
            for epilogue in Epilogue:
                variant = int4_launch.choose(epilogue, rows, shape[1], parts, limit)
                assert parts <= variant.max_warps
                staged, sums = variant.staged_bytes(rows, shape[1]), variant.sums_bytes(parts)
                in_turn = int4_launch.turns(variant, blocks, quads, per_part, 108, staged + 2 * sums)
                assert staged + sums * min(2, in_turn) <= limit
                assert not variant.staged or rows <= 8 * variant.row_tiles


def test_what_is_not_done_is_refused() -> None:
    case = Case("gate_up", 2, 32, 128, 32)
    rows = Stream(case.x)
    plain = arrange(torch.zeros(64, 16, dtype=torch.int32), torch.ones(64, 4).bfloat16())
    with pytest.raises(ValueError, match="blocks of rows 16 apart; expected 32"):
        skinny_gemm.norm_gate_up(rows, case.norm, plain)
    with pytest.raises(ValueError, match="behind a norm"):
        skinny_gemm.norm_linear(rows, case.norm, plain)
    narrow = arrange(torch.zeros(64, 12, dtype=torch.int32), torch.ones(64, 3).bfloat16())
    with pytest.raises(ValueError, match="expected K a multiple of"):
        skinny_gemm.norm_linear(Stream(case.x[:, :96].contiguous()), None, narrow)


# ---- on a GPU ----

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("variant", int4_launch.VARIANTS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group", [32, 128])
def test_gpu_every_kernel(op: str, group: int, variant: Variant) -> None:
    case = Case(op, 8 * variant.row_tiles - 3, 48, 384, group, "cuda")
    found = case.run(override=Override(variant=variant))
    same_but_for_rounding(found, case.twin())
    if op == "store":
        within_the_bound(case, found["y"])


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("n", "k"), [(576, 640), (1008, 4096), (1008, 14336), (6144, 4096)])
def test_gpu_rows_and_twin(op: str, group: int, n: int, k: int) -> None:
    if op == "gate_up":
        n = 32 * (n // 32)
    case = Case(op, 128, n, k, group, "cuda")
    whole = case.run()
    same_but_for_rounding(whole, case.twin())
    if op == "store":
        within_the_bound(case, whole["y"])
    for rows in (1, 2, 3, 7, 8, 9, 16, 17, 33, 65):
        for pdl in (False, True):
            part = case.run(slice(0, rows), override=Override(pdl=pdl))
            for name, value in part.items():
                if name != "cache":
                    assert value.equal(whole[name][:rows]), (name, rows, pdl)

"""The CUDA C++ products of 9 and more rows give the bits of those for few: on an emulated GPU, or on a real one."""

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.kernels.cuda import launch, wide_launch
from slipstream.kernels.cuda.launch import Epilogue, Override
from slipstream.kernels.cuda.wide_launch import ROWS_16, ROWS_32, ROWS_64, ROWS_128, Cut, Device, Variant
from slipstream.kernels.norm_qkv import Heads

Load = Callable[[Path], ModuleType]
CASES = [("store", False), ("store", True), ("add", False), ("gate_up", True), ("qkv", False), ("qkv", True)]
EPILOGUES = {"store": Epilogue.STORE, "add": Epilogue.ADD, "gate_up": Epilogue.GATE_UP, "qkv": Epilogue.QKV}
OLD = Override(wide=False)


@pytest.fixture(scope="module")
def libraries(load_test_module: Load, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    module = load_test_module(Path(__file__).parent / "cuda_on_cpu" / "emulator.py")
    directory = tmp_path_factory.mktemp("emulator")
    return module, module.compile_all(directory), module.compile_wide(directory)


@pytest.fixture
def emulator(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launches of the new kernels; those of the old ones go to an emulator of their own."""
    module, compiled, wide = libraries
    module.Emulator(compiled).install(monkeypatch)
    made = module.WideEmulator(wide)
    made.install(monkeypatch)
    return made


@pytest.fixture(scope="module")
def products(load_test_module: Load) -> ModuleType:
    """Cases of the other kernels' tests."""
    return load_test_module(Path(__file__).with_name("test_cuda_skinny_gemm.py"))


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert found[name].equal(value), name


def test_lists_of_kernels_agree() -> None:
    source = (Path(launch.__file__).parent / "wide_gemm.cu").read_text()
    compiled = re.findall(r"WIDE\(EPILOGUE, (\d+), (\d+), (\d+)\)", source)
    listed = [(v.row_tiles, v.groups, v.min_ctas) for v in wide_launch.VARIANTS]
    assert [tuple(map(int, numbers)) for numbers in compiled] == listed


def card(sms: int = 132) -> Device:
    return Device(sms, (227 << 10, 113 << 10), lambda size: {1: sms, 2: sms // 2}.get(size, sms // 4 - 3))


EVERY_KERNEL = [  # op, norm, kernel, chunks of K, pairs side by side (0: all), CTAs of a cluster
    *(("add", False, variant, 37, 1, 2) for variant in wide_launch.VARIANTS),
    *(("store", norm, ROWS_16, k, 0, 1) for norm in (False, True) for k in (1, 5, 18)),
    ("gate_up", True, ROWS_32, 18, 0, 4),
    ("qkv", False, ROWS_16, 9, 1, 1),
    ("qkv", True, ROWS_32, 37, 0, 2),
    ("store", True, ROWS_128, 3, 0, 1),
    ("gate_up", True, ROWS_64, 9, 1, 4),
]


@pytest.mark.parametrize(("op", "norm", "variant", "chunks", "split", "cluster"), EVERY_KERNEL)
def test_every_kernel_gives_the_bits_of_the_others(
    emulator: Any, products: ModuleType, op: str, norm: bool, variant: Variant, chunks: int, split: int, cluster: int
) -> None:
    """Parts of unequal length, a last pair of one part (9 chunks without a norm), one part in all; several units a
    CTA, the last one short, CTAs of a cluster without one; rows and outputs that are no multiple of 8; two groups of
    rows (ROWS_16)."""
    rows = 29 if variant is ROWS_16 else variant.columns - 3
    case = products.Case(op, rows, 70, 32 * chunks, norm=norm, sums=norm and chunks > 5)
    pairs = -(-launch.split_k(32 * chunks, norm)[0] // 2)
    cut = Cut(variant, 4 if split == 1 else 2, split or pairs, cluster)
    found = case.run(products.KERNEL, override=Override(wide=cut))
    assert emulator.names[-2:] == [f"order_{int(norm)}", variant.name(EPILOGUES[op])]
    assert emulator.faults == 0
    assert (emulator.reads == emulator.groups).all()
    same(found, case.run(products.KERNEL, override=OLD))


@pytest.mark.parametrize("tiles", [3, 60, 256, 1792, 8016])
def test_a_cut_fits_the_card_and_its_ctas_share_the_work(tiles: int) -> None:
    device = card()
    for k, norm in ((576, True), (1536, False), (4096, True), (14336, False)):
        parts, _ = launch.split_k(k, norm)
        for rows in (9, 16, 17, 33, 64, 65, 128, 130, 1000):
            for cut in wide_launch.cuts(rows, parts, device):
                there = wide_launch.grid(cut, rows, tiles, device)
                work = -(-math.ceil(tiles / cut.unit_tiles) // cut.cluster)
                assert (there.turns - 1) * there.walk < work <= there.turns * there.walk
                assert there.groups * cut.variant.columns >= rows
                assert there.groups * there.walk <= max(device.clusters(cut.cluster), there.groups)
                assert wide_launch.shared_bytes(cut, device) <= device.shared_bytes[int(cut.half)]
                assert cut.warps <= wide_launch.MAX_WARPS


def test_it_is_chosen_for_weights_in_dram_where_the_card_has_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wide_launch.choose(16, 256, 4096, 8, card()) is None  # not timed yet
    monkeypatch.setattr(wide_launch, "FROM_ROWS", 9)
    for rows in (9, 64, 128, 1000):  # 4096 weight rows: many SMs have work only if a CTA takes few
        chosen = wide_launch.choose(rows, 256, 4096, 8, card())
        assert chosen is not None
        there = wide_launch.grid(chosen, rows, 256, card())
        assert there.groups * there.walk * chosen.cluster >= 60
    without = Device(132, (), lambda size: 132)
    for rows, tiles, device in ((8, 256, card()), (16, 16, card()), (16, 256, without)):
        assert wide_launch.choose(rows, tiles, 4096, 8, device) is None


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("op", "norm"), CASES)
@pytest.mark.parametrize(("n", "k"), [(560, 576), (3600, 4096), (1048, 14336)])
def test_gpu_rows_keep_their_bits_in_every_cut(
    monkeypatch: pytest.MonkeyPatch, products: ModuleType, op: str, norm: bool, n: int, k: int
) -> None:
    """Rows 1 to 8 by the old kernels, more by every cut, up to three groups; the whole against the twin."""
    device = wide_launch._device(torch.cuda.current_device())
    if not device.shared_bytes:
        pytest.skip("needs clusters")
    monkeypatch.setattr(products, "HEADS", Heads(q=12, kv=4, dim=64))
    case = products.Case(op, 150, n, k, "cuda", norm=norm, sums=True)
    whole = case.run(products.KERNEL, override=OLD)
    products.same_but_for_rounding(whole, case.run(products.TWIN))
    parts, _ = launch.split_k(k, norm)
    for rows in (1, 2, 3, 8, 9, 15, 16, 17, 32, 33, 63, 64, 65, 100, 127, 128, 129, 150):
        overrides = [OLD, *(Override(wide=cut, pdl=rows % 2 == 0) for cut in wide_launch.cuts(rows, parts, device))]
        for override in overrides:
            part = case.first(rows).run(products.KERNEL, override=override)
            for name, value in part.items():
                if name != "cache":
                    assert value.equal(whole[name][:rows]), (name, rows, override)

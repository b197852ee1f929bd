"""The CUDA C++ products of 9 and more rows give the bits of those for few: on an emulated GPU, or on a real one."""

import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.kernels.cuda import launch, skinny_gemm, wide_launch
from slipstream.kernels.cuda.launch import Epilogue, Override
from slipstream.kernels.cuda.wide_launch import ROWS_16, ROWS_32, ROWS_64, ROWS_128, Cut, Device, Variant
from slipstream.kernels.norm_qkv import Heads

CASES = [("store", False), ("store", True), ("add", False), ("gate_up", True), ("qkv", False), ("qkv", True)]
EPILOGUES = {"store": Epilogue.STORE, "add": Epilogue.ADD, "gate_up": Epilogue.GATE_UP, "qkv": Epilogue.QKV}
OLD = Override(wide=False)


@pytest.fixture(scope="module")
def libraries(cuda_on_cpu: ModuleType, run_dir: Path) -> Any:
    return cuda_on_cpu, cuda_on_cpu.compile_all(run_dir), cuda_on_cpu.compile_wide(run_dir)


@pytest.fixture
def emulator(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launches of the new kernels; those of the old ones go to an emulator of their own."""
    module, compiled, wide = libraries
    module.Emulator(compiled).install(monkeypatch)
    made = module.WideEmulator(wide)
    made.install(monkeypatch)
    return made


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert found[name].equal(value), name


def test_lists_of_kernels_agree() -> None:
    source = (Path(launch.__file__).parent / "wide_gemm.cu").read_text()
    compiled = re.findall(r"WIDE\(EPILOGUE, (\d+), (\d+)\)", source)
    listed = [(v.row_tiles, v.groups) for v in wide_launch.VARIANTS]
    assert [tuple(map(int, numbers)) for numbers in compiled] == listed


def card(sms: int = 132) -> Device:
    return Device(sms, 227 << 10, lambda size: {1: sms, 2: sms // 2}.get(size, sms // 4 - 3))


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
                assert wide_launch.shared_bytes(cut, device) <= device.shared_bytes
                assert cut.warps <= wide_launch.MAX_WARPS


# The fastest on an H200, or within 5 % of it: rows of x, N, parts of K and K; what a CTA takes of both, side by side.
CHOSEN = [
    (16, 6144, 8, 4096, 16, 64, 4, 2),
    (16, 4096, 8, 4096, 16, 32, 4, 2),
    (32, 4096, 8, 14336, 32, 32, 4, 2),
    (32, 28672, 8, 4096, 32, 64, 4, 2),
    (64, 4096, 8, 14336, 64, 32, 4, 2),
    (64, 6144, 8, 4096, 64, 64, 4, 2),
    (64, 28672, 8, 4096, 64, 224, 1, 1),
    (64, 128256, 8, 4096, 64, 256, 1, 1),
    (64, 49152, 6, 576, 64, 224, 1, 1),
    (9, 49152, 6, 576, 16, 192, 1, 1),
    (32, 49152, 6, 576, 32, 192, 1, 1),
    (128, 4096, 8, 4096, 64, 64, 4, 2),
    (128, 28672, 8, 4096, 128, 128, 1, 2),
    (256, 128256, 8, 4096, 128, 128, 1, 2),
]


@pytest.mark.parametrize(("rows", "n", "parts", "k", "columns", "height", "split", "cluster"), CHOSEN)
def test_what_was_fastest_is_chosen(
    rows: int, n: int, parts: int, k: int, columns: int, height: int, split: int, cluster: int
) -> None:
    assert launch.split_k(k, True)[0] == parts
    cut = wide_launch.choose(rows, n // 16, k, parts, card())
    assert cut is not None
    assert (cut.variant.columns, 16 * cut.unit_tiles, cut.split, cut.cluster) == (columns, height, split, cluster)


def test_it_is_chosen_for_weights_in_dram_where_the_card_has_clusters() -> None:
    without = Device(132, 0, lambda size: 132)
    for rows, tiles, device in ((8, 256, card()), (16, 16, card()), (16, 256, without)):
        assert wide_launch.choose(rows, tiles, 4096, 8, device) is None


@pytest.mark.parametrize("width", [352, 576, 960, 1536, 2048, 2304, 4096, 14336])
@pytest.mark.parametrize("norm", [False, True])
def test_whatever_is_chosen_can_be_launched(width: int, norm: bool) -> None:
    parts, _ = launch.split_k(width, norm)
    fewest = launch.IN_L2 // (32 * width) + 1
    for tiles in (fewest, fewest + 300, 1792, 8016):
        for rows in (9, 16, 17, 33, 65, 129, 1000):
            cut = wide_launch.choose(rows, tiles, width, parts, card())
            assert cut in wide_launch.cuts(rows, parts, card()), (tiles, rows)


def test_more_rows_than_a_launch_takes_are_cut(
    emulator: Any, products: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """29 rows at 20 a launch: 20 and 9; at 24: 24 and 5, which are too few for these kernels."""
    monkeypatch.setattr(wide_launch, "IN_L2", 0)
    case = products.Case("add", 29, 70, 32 * 5, norm=False, sums=False)
    expected = case.run(products.KERNEL, override=OLD)
    for most, launches in ((20, 4), (24, 2)):
        monkeypatch.setattr(skinny_gemm, "MAX_ROWS", most)
        emulator.names.clear()
        same(case.run(products.KERNEL), expected)
        assert emulator.faults == 0
        assert len(emulator.names) == launches


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("variant", range(len(wide_launch.VARIANTS)))
@pytest.mark.parametrize("op", range(len(CASES)))
def test_gpu_every_kernel(monkeypatch: pytest.MonkeyPatch, products: ModuleType, op: int, variant: int) -> None:
    """Small enough for the sanitizer: a card of one cluster and a ring of three slots, which goes round; two groups of
    rows (ROWS_16); a last unit that is short, CTAs without one. Each kernel with clusters of 1, 2 and 4, one pair of
    parts after the other and side by side."""
    device = torch.cuda.current_device()
    if not wide_launch._device(device).shared_bytes:
        pytest.skip("needs clusters")
    wide_launch.load(device)  # with all the shared memory of a real card
    (name, norm), kernel = CASES[op], wide_launch.VARIANTS[variant]
    case = products.Case(name, 29 if kernel is ROWS_16 else kernel.columns - 3, 70, 576, "cuda", norm=norm, sums=norm)
    pairs = -(-launch.split_k(576, norm)[0] // 2)
    side_by_side = (op // 3 + variant) % 2 and pairs * kernel.groups <= wide_launch.MAX_WARPS
    cut = Cut(kernel, 2 if side_by_side else 4, pairs if side_by_side else 1, (1, 2, 4)[(op + variant) % 3])
    card = Device(4, launch.BARRIER_BYTES + cut.sum_bytes + 3 * cut.slot_bytes, lambda size: 1)
    expected = case.run(products.KERNEL, override=OLD)
    monkeypatch.setattr(wide_launch, "_device", lambda device: card)
    same(case.run(products.KERNEL, override=Override(wide=cut)), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("op", "norm"), CASES)
@pytest.mark.parametrize(("n", "k"), [(560, 576), (3600, 4096), (1048, 14336)])
def test_gpu_rows_keep_their_bits_in_every_cut(
    monkeypatch: pytest.MonkeyPatch, products: ModuleType, op: str, norm: bool, n: int, k: int
) -> None:
    """Rows 1 to 8 by the old kernels, more by cuts, up to three groups: every cut at least once;
    the whole against the twin."""
    device = wide_launch._device(torch.cuda.current_device())
    if not device.shared_bytes:
        pytest.skip("needs clusters")
    monkeypatch.setattr(products, "HEADS", Heads(q=12, kv=4, dim=64))
    case = products.Case(op, 150, n, k, "cuda", norm=norm, sums=True)
    whole = case.run(products.KERNEL, override=OLD)
    products.same_but_for_rounding(whole, case.run(products.TWIN))
    parts, _ = launch.split_k(k, norm)
    for i, rows in enumerate((1, 3, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 100, 129, 150)):
        cuts = wide_launch.cuts(rows, parts, device)[i % 3 :: 3] if rows > 8 else []
        overrides = [OLD, *(Override(wide=cut, pdl=rows % 2 == 0) for cut in cuts)]
        for override in overrides:
            part = case.first(rows).run(products.KERNEL, override=override)
            for name, value in part.items():
                if name != "cache":
                    assert value.equal(whole[name][:rows]), (name, rows, override)

"""The CUDA C++ products of prompts give the bits of those for few: on an emulated GPU, or on a real one."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.kernels.cuda import launch, tiled_launch
from slipstream.kernels.cuda.launch import Epilogue, Override
from slipstream.kernels.norm_qkv import Heads

Load = Callable[[Path], ModuleType]
CASES = [("store", False), ("store", True), ("add", False), ("gate_up", True), ("qkv", False), ("qkv", True)]
EPILOGUES = {"store": Epilogue.STORE, "add": Epilogue.ADD, "gate_up": Epilogue.GATE_UP, "qkv": Epilogue.QKV}
OLD = Override(wide=False, tiled=False)


@pytest.fixture(scope="module")
def libraries(load_test_module: Load, run_dir: Path) -> Any:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    module = load_test_module(Path(__file__).parent / "cuda_on_cpu" / "emulator.py")
    return module, module.compile_all(run_dir), module.compile_tiled(run_dir)


@pytest.fixture
def emulator(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launches of the new kernels; those of the old ones go to an emulator of their own."""
    module, compiled, tiled = libraries
    module.Emulator(compiled).install(monkeypatch)
    made = module.TiledEmulator(tiled)
    made.install(monkeypatch)
    return made


@pytest.fixture(scope="module")
def products(load_test_module: Load) -> ModuleType:
    """Cases of the other kernels' tests."""
    return load_test_module(Path(__file__).with_name("test_cuda_skinny_gemm.py"))


def test_the_source_has_the_same_sizes() -> None:
    source = (Path(launch.__file__).parent / "tiled_gemm.cuh").read_text()
    (line,) = re.findall(r"constexpr int TILED_COLUMNS = (\d+), TILED_TILES = (\d+), TILED_THREADS = (\d+);", source)
    assert tuple(map(int, line)) == (tiled_launch.COLUMNS, tiled_launch.TILES, tiled_launch.THREADS)
    assert tiled_launch.THREADS == 32 * (tiled_launch.TILES // 2) * (tiled_launch.COLUMNS // 64)


def test_two_ctas_fit_an_sm() -> None:
    assert tiled_launch.ON_AN_SM * (tiled_launch.SHARED_BYTES + 1024) <= 228 << 10


@pytest.mark.parametrize(
    ("n", "k", "norm", "first"),
    [  # of SmolLM2-135M and Llama-3.1-8B, the fewest rows
        (3072, 576, True, 1024),
        (960, 576, True, 2304),
        (576, 576, False, 3840),
        (576, 1536, False, 3840),
        (49152, 576, True, None),  # larger than the L2 holds
        (960, 2048, True, None),  # a long K
        (28672, 4096, True, None),
    ],
)
def test_it_takes_what_gives_every_sm_two_ctas(n: int, k: int, norm: bool, first: int | None) -> None:
    per_part = launch.split_k(k, norm)[1]
    taken = [rows for rows in range(128, 4097, 128) if tiled_launch.choose(rows, n // 16, k, per_part, 132)]
    assert taken == ([] if first is None else list(range(first, 4097, 128)))


EVERY_KERNEL = [  # op, norm, rows, chunks of K
    ("add", False, 131, 37),
    ("add", False, 20, 18),
    ("store", True, 20, 1),
    ("store", False, 130, 5),
    ("gate_up", True, 20, 18),
    ("qkv", True, 20, 9),
    ("qkv", False, 20, 9),
]


@pytest.mark.parametrize(("op", "norm", "rows", "chunks"), EVERY_KERNEL)
def test_every_kernel_gives_the_bits_of_the_others(
    emulator: Any, products: ModuleType, op: str, norm: bool, rows: int, chunks: int
) -> None:
    """Parts of unequal length, a last part without a pair, one part in all, fewer chunks than the ring has slots; a
    last unit of fewer tiles than a CTA takes; rows and outputs that are no multiple of 8; two groups of rows."""
    case = products.Case(op, rows, 70, 32 * chunks, norm=norm, sums=norm and chunks > 5)
    found = case.run(products.KERNEL, override=Override(tiled=True))
    assert emulator.names[-2:] == [f"order_{int(norm)}", tiled_launch.name(EPILOGUES[op])]
    assert emulator.faults == 0
    assert (emulator.reads == emulator.groups).all()
    for name, value in case.run(products.KERNEL, override=OLD).items():
        assert found[name].equal(value), name


def test_many_rows_take_it(emulator: Any, products: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_launch, "FROM_ROWS", 20)
    monkeypatch.setattr(tiled_launch, "ON_AN_SM", 1)
    for rows, launches in ((19, 0), (20, 2)):
        emulator.names.clear()
        products.Case("add", rows, 70, 64, norm=False, sums=False).run(products.KERNEL)
        assert len(emulator.names) == launches


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("op", "norm"), CASES)
@pytest.mark.parametrize(("n", "k"), [(560, 576), (576, 1536), (1048, 4096)])
def test_gpu_rows_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch, products: ModuleType, op: str, norm: bool, n: int, k: int
) -> None:
    """Any number of rows, with and without dependent launch; the whole against the twin."""
    if not tiled_launch._copies(torch.cuda.current_device()):
        pytest.skip("needs sm_90")
    monkeypatch.setattr(products, "HEADS", Heads(q=9, kv=3, dim=64))
    case = products.Case(op, 150, n, k, "cuda", norm=norm, sums=True)
    whole = case.run(products.KERNEL, override=OLD)
    products.same_but_for_rounding(whole, case.run(products.TWIN))
    for rows in (1, 8, 17, 64, 127, 128, 129, 150):
        part = case.first(rows).run(products.KERNEL, override=Override(tiled=True, pdl=rows % 2 == 0))
        for name, value in part.items():
            if name != "cache":
                assert value.equal(whole[name][:rows]), (name, rows)

"""The CUDA C++ products of prompts by wgmma give the bits of those for few: on an emulated GPU, or on a real one."""

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.kernels.cuda import build, launch, prompt_launch
from slipstream.kernels.cuda.launch import Epilogue, Override, Params
from slipstream.kernels.cuda.prompt_launch import Device, Sharing
from slipstream.kernels.norm_qkv import Heads

CASES = [("store", False), ("store", True), ("add", False), ("gate_up", True), ("qkv", False), ("qkv", True)]
EPILOGUES = {"store": Epilogue.STORE, "add": Epilogue.ADD, "gate_up": Epilogue.GATE_UP, "qkv": Epilogue.QKV}
OLD = Override(wide=False, prompt=False)
SHARINGS = (Sharing(), Sharing(weights=2))
CARD = Device(True, lambda size: 132 // size)


@pytest.fixture(scope="module")
def libraries(cuda_on_cpu: ModuleType, run_dir: Path) -> Any:
    return cuda_on_cpu, cuda_on_cpu.compile_all(run_dir), cuda_on_cpu.compile_prompt(run_dir)


@pytest.fixture
def emulator(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launches of the new kernels; those of the old ones go to an emulator of their own."""
    module, compiled, prompt = libraries
    module.Emulator(compiled).install(monkeypatch)
    made = module.PromptEmulator(prompt)
    made.install(monkeypatch)
    return made


def test_the_source_has_the_same_sizes() -> None:
    source = (Path(launch.__file__).parent / "prompt_gemm.cuh").read_text()
    pattern = r"constexpr int PROMPT_COLUMNS = (\d+), PROMPT_TILES = (\d+), PROMPT_THREADS = (\d+);"
    (line,) = re.findall(pattern, source)
    assert tuple(map(int, line)) == (prompt_launch.COLUMNS, prompt_launch.TILES, prompt_launch.THREADS)
    source = (Path(launch.__file__).parent / "order_rows.cuh").read_text()
    (line,) = re.findall(r"constexpr int ORDER_WARPS = (\d+), ORDER_CHUNKS = (\d+);", source)
    assert tuple(map(int, line)) == (prompt_launch.ORDER_WARPS, prompt_launch.ORDER_CHUNKS)
    assert prompt_launch.SHARED_BYTES <= 227 << 10
    assert prompt_launch.THREADS * 168 <= 65536


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("tiles", [5, 60, 256, 1792])
@pytest.mark.parametrize("rows", [100, 257, 1000, 2048])
def test_ctas_share_the_work(sharing: Sharing, tiles: int, rows: int) -> None:
    there = prompt_launch.grid(sharing, rows, tiles, CARD)
    units = -(-tiles // prompt_launch.TILES)
    turns = -(-units // there.walk)
    assert there.groups * sharing.weights * prompt_launch.COLUMNS >= rows
    assert there.groups * there.walk <= max(CARD.clusters(sharing.weights), there.groups)
    assert there.walk * (turns - 1) < units <= there.walk * turns


EVERY_KERNEL = [  # op, norm, rows, outputs, chunks of K, how CTAs share
    ("add", False, 131, 70, 37, Sharing()),
    ("add", False, 20, 150, 18, Sharing(weights=2)),
    ("store", True, 20, 150, 1, Sharing()),
    ("store", False, 130, 70, 5, Sharing(weights=2)),
    ("gate_up", True, 20, 150, 18, Sharing()),
    ("gate_up", True, 131, 70, 9, Sharing(weights=2)),
    ("qkv", True, 20, 70, 9, Sharing()),
    ("qkv", False, 131, 70, 17, Sharing(weights=2)),
    ("gate_up", True, 20, 270, 9, Sharing(weights=2)),
    ("add", False, 131, 150, 9, Sharing(weights=2)),
]


@pytest.mark.parametrize(("op", "norm", "rows", "n", "chunks", "sharing"), EVERY_KERNEL)
def test_every_kernel_gives_the_bits_of_the_others(
    emulator: Any, products: ModuleType, op: str, norm: bool, rows: int, n: int, chunks: int, sharing: Sharing
) -> None:
    """Parts of unequal length, a last part without a pair, one part in all, fewer chunks than the ring has slots; a
    last unit of fewer tiles than a CTA takes, or of none; rows and outputs that are no multiple of 8; two groups of
    rows."""
    case = products.Case(op, rows, n, 32 * chunks, norm=norm, sums=norm and chunks > 9)
    found = case.run(products.KERNEL, override=Override(prompt=sharing))
    assert emulator.names[-2:] == [f"order_{int(norm)}", prompt_launch.name(EPILOGUES[op])]
    assert emulator.faults == 0
    assert (emulator.reads == emulator.groups // sharing.weights).all()
    for name, value in case.run(products.KERNEL, override=OLD).items():
        assert found[name].equal(value), name


def test_many_rows_take_it(emulator: Any, products: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_launch, "FROM_ROWS", 20)
    monkeypatch.setattr(prompt_launch, "FROM_WORK", 1)
    for rows, launches in ((19, 0), (20, 2)):
        emulator.names.clear()
        products.Case("add", rows, 70, 64, norm=False, sums=False).run(products.KERNEL)
        assert len(emulator.names) == launches


LLAMA, SMOL = (
    {"qkv": 384, "o": 256, "gate_up": 3584 // 2, "down": 256},
    {"qkv": 60, "o": 36, "gate_up": 192, "down": 36},
)


@pytest.mark.parametrize(
    ("tiles", "rows", "taken"),
    [
        (LLAMA, 128, ""),
        (LLAMA, 256, "qkv o gate_up down"),
        (LLAMA, 2048, "qkv o gate_up down"),
        (SMOL, 256, "gate_up"),
        (SMOL, 512, "gate_up"),
        (SMOL, 1024, "qkv o gate_up down"),
        (SMOL, 2048, "qkv o gate_up down"),
    ],
)
def test_a_card_takes_it_where_it_was_faster(tiles: dict[str, int], rows: int, taken: str) -> None:
    found = {name: prompt_launch.choose(rows, count, CARD) for name, count in tiles.items()}
    assert [name for name, sharing in found.items() if sharing] == taken.split()
    assert {sharing for sharing in found.values() if sharing} <= {Sharing(weights=2)}


def test_an_odd_group_has_no_company_while_there_are_few() -> None:
    ways = [prompt_launch.choose(rows, 256, CARD) for rows in (300, 384, 385, 640, 1100, 1152)]
    assert ways == [Sharing(weights=weights) for weights in (1, 1, 2, 1, 2, 2)]


def test_outputs_by_pairs_need_even_strides() -> None:
    for changed in ({}, {"N": 4095}, {"residual_stride": 4095}, {"angle_stride": 63}, {"residual": 2}, {"cos": 2}):
        params = Params(**{"M": 2048, "N": 4096, "K": 4096, "residual_stride": 4096, "residual": 4, **changed})
        assert prompt_launch._in_pairs(params) == (not changed), changed


@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_cards_without_wgmma_neither_compile_nor_take_it(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    made: list[Any] = []
    monkeypatch.setattr(prompt_launch, "capability", lambda: arch)
    monkeypatch.setattr(prompt_launch, "_device", prompt_launch._device.__wrapped__)
    monkeypatch.setattr(build, "compiled", lambda arch, units: made.append(units))
    prompt_launch.load(0)
    assert made == []
    assert prompt_launch.sharing_for(Epilogue.ADD, Params(M=2048, N=4096, K=4096), 0) is None


def test_wgmma_is_compiled_for_sm_90a_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing else of sm_90 is, so that its cubins are the plain ones."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        Path(command[command.index("-o") + 1]).touch()
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "nvcc", lambda: Path("nvcc"))
    monkeypatch.setattr(build.subprocess, "run", run)
    for arch in (80, 90, 120):
        build.compiled(arch, [build.prompt(1), build.wide(1)])
    found = sorted((Path(command[-1]).stem, next(a for a in command if a.startswith("-arch"))) for command in commands)
    plain = [("wide_gemm", f"-arch=sm_{arch}") for arch in (120, 80, 90)]
    assert found == [("prompt_gemm", f"-arch=sm_{arch}") for arch in ("120", "80", "90a")] + plain


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("op", "norm", "rows", "n", "chunks", "sharing"), EVERY_KERNEL)
def test_gpu_every_kernel(
    monkeypatch: pytest.MonkeyPatch,
    products: ModuleType,
    op: str,
    norm: bool,
    rows: int,
    n: int,
    chunks: int,
    sharing: Sharing,
) -> None:
    """Small enough for the sanitizer: few CTAs, so that each has several units and its ring goes round."""
    device = torch.cuda.current_device()
    if not prompt_launch._device(device).takes:
        pytest.skip("needs wgmma")
    prompt_launch.load(device)
    monkeypatch.setattr(prompt_launch, "_device", lambda device: Device(True, lambda size: 2 // size))
    case = products.Case(op, rows, n, 32 * chunks, "cuda", norm=norm, sums=norm and chunks > 9)
    found = case.run(products.KERNEL, override=Override(prompt=sharing))
    for name, value in case.run(products.KERNEL, override=OLD).items():
        assert found[name].equal(value), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("op", "norm"), CASES)
@pytest.mark.parametrize(("n", "k"), [(560, 576), (576, 1536), (1048, 4096), (1048, 14336)])
def test_gpu_rows_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch, products: ModuleType, op: str, norm: bool, n: int, k: int
) -> None:
    """Any number of rows, however CTAs share, with and without dependent launch; the whole against the twin."""
    if not prompt_launch._device(torch.cuda.current_device()).takes:
        pytest.skip("needs wgmma")
    monkeypatch.setattr(products, "HEADS", Heads(q=9, kv=3, dim=64))
    case = products.Case(op, 150, n, k, "cuda", norm=norm, sums=True)
    whole = case.run(products.KERNEL, override=OLD)
    products.same_but_for_rounding(whole, case.run(products.TWIN))
    for i, rows in enumerate((1, 8, 17, 64, 127, 128, 129, 150)):
        for sharing in SHARINGS:
            part = case.first(rows).run(products.KERNEL, override=Override(prompt=sharing, pdl=i % 2 == 0))
            for name, value in part.items():
                if name != "cache":
                    assert value.equal(whole[name][:rows]), (name, rows, sharing)

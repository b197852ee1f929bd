"""The CUDA C++ products that divide K over a cluster give the bits of those for few rows: emulated, or on a GPU."""

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.kernels.cuda import build, cluster_launch, launch
from slipstream.kernels.cuda.cluster_launch import Cut
from slipstream.kernels.cuda.launch import Epilogue, Override, Params
from slipstream.kernels.cuda.wide_launch import Device
from slipstream.kernels.norm_qkv import Heads

CASES = [("store", False), ("store", True), ("add", False), ("gate_up", True), ("qkv", False), ("qkv", True)]
EPILOGUES = {"store": Epilogue.STORE, "add": Epilogue.ADD, "gate_up": Epilogue.GATE_UP, "qkv": Epilogue.QKV}
OLD = Override(wide=False, prompt=False)


@pytest.fixture(scope="module")
def libraries(cuda_on_cpu: ModuleType, run_dir: Path) -> Any:
    return (
        cuda_on_cpu,
        cuda_on_cpu.compile_all(run_dir),
        cuda_on_cpu.compile_cluster(run_dir, Epilogue.ADD, Epilogue.GATE_UP),
    )


@pytest.fixture
def emulator(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launches of the new kernels; those of the old ones go to an emulator of their own."""
    module, compiled, cluster = libraries
    module.Emulator(compiled).install(monkeypatch)
    made = module.ClusterEmulator(cluster)
    made.install(monkeypatch)
    return made


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert found[name].equal(value), name


def test_lists_of_kernels_agree() -> None:
    source = (Path(launch.__file__).parent / "cluster_gemm.cu").read_text()
    compiled = re.findall(r"CLUSTER\(EPILOGUE, (\d+), (\d+)\)", source)
    assert [tuple(map(int, numbers)) for numbers in compiled] == [(c.columns, c.groups) for c in cluster_launch.CUTS]


KERNELS = [  # op, norm, N, chunks of K, cut; the others on a GPU
    ("add", False, 72, 56, Cut(64, 3, 2)),
    ("add", False, 136, 56, Cut(64, 2, 5)),
    ("gate_up", True, 68, 24, Cut(64, 2, 3)),
    ("gate_up", True, 108, 24, Cut(32, 3, 5)),
]


@pytest.mark.parametrize(("op", "norm", "n", "chunks", "cut"), KERNELS)
def test_kernels_give_the_bits_of_the_others(
    emulator: Any, products: ModuleType, op: str, norm: bool, n: int, chunks: int, cut: Cut
) -> None:
    """One unit, or two of unequal height, the last tile of few rows; rows that are no multiple of 8."""
    case = products.Case(op, cut.columns - 3, n, 32 * chunks, norm=norm, sums=norm and chunks > 30)
    found = case.run(products.KERNEL, override=Override(wide=cut))
    assert emulator.names[-2:] == [f"order_{int(norm)}", cut.name(EPILOGUES[op])]
    assert emulator.faults == 0
    assert (emulator.reads == 1).all()
    same(found, case.run(products.KERNEL, override=OLD))


def test_some_rows_take_it(emulator: Any, products: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_launch, "FROM_TILES", 4)
    monkeypatch.setattr(cluster_launch, "WIDTHS", (1792,))
    for rows, name in ((17, "cluster_1_32_3"), (33, "cluster_1_64_3")):
        emulator.names.clear()
        products.Case("add", rows, 70, 1792, norm=False, sums=False).run(products.KERNEL)
        assert emulator.names == ["order_0", name]


CARD = Device(132, 231424, {4: 30}.__getitem__)
LLAMA = {
    "qkv": (Epilogue.QKV, 384, 4096),
    "o": (Epilogue.ADD, 256, 4096),
    "gate_up": (Epilogue.GATE_UP, 1792, 4096),
    "down": (Epilogue.ADD, 256, 14336),
    "head": (Epilogue.STORE, 8016, 4096),
}
OF_OTHERS = {  # what nobody timed: SmolLM2-135M's, those of two ranks of 8B's, Kimi's
    "smol o": (Epilogue.ADD, 36, 576),
    "smol head": (Epilogue.STORE, 3072, 576),
    "tp2 o": (Epilogue.ADD, 256, 2048),
    "tp2 qkv": (Epilogue.QKV, 192, 4096),
    "kimi head": (Epilogue.STORE, 1280, 7168),
}


def chosen(rows: int, products: dict[str, tuple[Epilogue, int, int]]) -> dict[str, Cut]:
    found = {
        name: cluster_launch.choose(epilogue, rows, tiles, k, launch.split_k(k, epilogue is not Epilogue.ADD)[0], CARD)
        for name, (epilogue, tiles, k) in products.items()
    }
    return {name: cut for name, cut in found.items() if cut}


def test_what_was_fastest_is_chosen() -> None:
    two, three, small = Cut(64, 2), Cut(64, 3), Cut(32, 3)
    for rows in (33, 64):
        assert chosen(rows, LLAMA) == {"qkv": two} | dict.fromkeys(("o", "gate_up", "down", "head"), three)
    for rows in (17, 32):
        assert chosen(rows, LLAMA) == dict.fromkeys(("o", "gate_up", "down"), small)
    for rows in (16, 65):
        assert chosen(rows, LLAMA) == {}
    for rows in (17, 64):
        assert chosen(rows, OF_OTHERS) == {}
        for name, cut in chosen(rows, LLAMA).items():
            assert cut.slots(LLAMA[name][1], CARD) >= cluster_launch.MIN_SLOTS


@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_cards_without_wgmma_neither_compile_nor_take_it(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    made: list[Any] = []
    card = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=228 << 10)
    monkeypatch.setattr(cluster_launch, "capability", lambda: arch)
    monkeypatch.setattr(cluster_launch, "_device", cluster_launch._device.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(build, "compiled", lambda arch, units: made.append(units))
    cluster_launch.load(0)
    assert made == []
    assert cluster_launch.cut_for(Epilogue.ADD, False, Params(M=64, N=4096, K=4096), 0) is None


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("op", "norm"), CASES)
@pytest.mark.parametrize(
    ("outputs", "cut"), [(72, Cut(64, 3, 2)), (136, Cut(64, 2, 5)), (72, Cut(32, 3, 3)), (136, Cut(32, 3, 2))]
)
def test_gpu_every_kernel(
    monkeypatch: pytest.MonkeyPatch, products: ModuleType, op: str, norm: bool, outputs: int, cut: Cut
) -> None:
    """Small enough for the sanitizer: one cluster, rings of two slots and more that go round; one unit or several of
    unequal height."""
    device = torch.cuda.current_device()
    card = cluster_launch._device(device)
    if not card.shared_bytes:
        pytest.skip("needs wgmma")
    cluster_launch.load(device)
    monkeypatch.setattr(cluster_launch, "_device", lambda device: Device(4, card.shared_bytes, lambda size: 1))
    case = products.Case(op, cut.columns - 3, outputs, 768 if norm else 1792, "cuda", norm=norm, sums=norm)
    found = case.run(products.KERNEL, override=Override(wide=cut))
    same(found, case.run(products.KERNEL, override=OLD))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("op", "norm"), CASES)
@pytest.mark.parametrize(("n", "k"), [(3600, 4096), (1048, 14336)])
def test_gpu_rows_keep_their_bits_in_every_cut(
    monkeypatch: pytest.MonkeyPatch, products: ModuleType, op: str, norm: bool, n: int, k: int
) -> None:
    if not cluster_launch._device(torch.cuda.current_device()).shared_bytes:
        pytest.skip("needs wgmma")
    monkeypatch.setattr(products, "HEADS", Heads(q=12, kv=4, dim=64))
    case = products.Case(op, 64, n, k, "cuda", norm=norm, sums=True)
    whole = case.run(products.KERNEL, override=OLD)
    for rows in (1, 17, 32, 33, 63, 64):
        for i, cut in enumerate(cut for cut in cluster_launch.CUTS if rows <= cut.columns):
            part = case.first(rows).run(products.KERNEL, override=Override(wide=cut, pdl=(rows + i) % 2 == 0))
            for name, value in part.items():
                if name != "cache":
                    assert value.equal(whole[name][:rows]), (name, rows, cut)

"""The CUDA C++ kernels on the CPU: the very source, compiled by the host's C++ compiler against an emulated GPU."""

import ctypes
import fcntl
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.kernels.cuda import (
    cluster_launch,
    expert_launch,
    expert_stream_launch,
    gate_launch,
    int4_launch,
    prompt_launch,
    route_launch,
    wide_launch,
)
from slipstream.kernels.cuda import launch as cuda_launch
from slipstream.kernels.cuda.launch import Epilogue, Params

_HERE = Path(__file__).parent
_SOURCES = Path(cuda_launch.__file__).parent
_FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-w", "-ffp-contract=off")
BULK_BYTES = 84 << 10  # rings of four to nine slots
CLUSTER_BYTES = 220 << 10  # the same
WIDE_BYTES = 160 << 10  # rings of two and more


def compile_all(directory: Path) -> dict[Epilogue, ctypes.CDLL]:
    """The bf16 kernels, one library an epilogue."""
    return {e: _compile(directory, "skinny_gemm", "Params", f"-DSLIPSTREAM_EPILOGUE={int(e)}") for e in Epilogue}


def compile_wide(directory: Path) -> dict[Epilogue, ctypes.CDLL]:
    """The bf16 kernels for more rows, one library an epilogue."""
    return {e: _compile(directory, "wide_gemm", "WideParams", f"-DSLIPSTREAM_EPILOGUE={int(e)}") for e in Epilogue}


def compile_cluster(directory: Path, *epilogues: Epilogue) -> dict[Epilogue, ctypes.CDLL]:
    """The bf16 kernels that divide K over a cluster, one library an epilogue."""
    return {
        e: _compile(directory, "cluster_gemm", "ClusterParams", f"-DSLIPSTREAM_EPILOGUE={int(e)}") for e in epilogues
    }


def compile_prompt(directory: Path) -> dict[Epilogue, ctypes.CDLL]:
    """The bf16 kernels of wgmma for prompts, one library an epilogue."""
    return {e: _compile(directory, "prompt_gemm", "PromptParams", f"-DSLIPSTREAM_EPILOGUE={int(e)}") for e in Epilogue}


def compile_int4(directory: Path, group: int) -> dict[Epilogue, ctypes.CDLL]:
    """The kernels over INT4 weights of one group, one library an epilogue."""
    return {
        e: _compile(
            directory, "int4_gemm", "Int4Params", f"-DSLIPSTREAM_EPILOGUE={int(e)}", f"-DSLIPSTREAM_GROUP={group}"
        )
        for e in Epilogue
    }


def compile_experts(directory: Path) -> dict[str, ctypes.CDLL]:
    """The router's and the routed experts' kernels."""
    return {
        "route": _compile(directory, "route", "RouteParams"),
        "experts": _compile(directory, "expert_gemm", "ExpertParams"),
        "stream": _compile(directory, "expert_stream", "StreamParams", "-DCOPY_TURNS=30"),
    }


def compile_front(directory: Path) -> dict[str, ctypes.CDLL]:
    """The two kernels in front of routed experts."""
    return {
        "gate": _compile(directory, "gate", "GateParams"),
        "choose": _compile(directory, "choose", "ChooseParams"),
    }


def _compile(directory: Path, source: str, params: str, *defines: str) -> ctypes.CDLL:
    """Once a `directory`: who comes later, in this process or another, waits for it and takes it."""
    target = directory / f"{source}{''.join(defines)}.so"
    macros = (f'-DSOURCE="{source}.cu"', f"-DPARAMS={params}", *defines)
    includes = (f"-I{_HERE}", f"-I{_SOURCES}")
    partial = target.with_suffix(".partial")
    command = ["g++", *_FLAGS, *includes, *macros, "-o", str(partial), str(_HERE / "emulator.cpp")]
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            subprocess.run(command, check=True)
            partial.rename(target)
    return ctypes.CDLL(str(target))


def _run(
    library: Any,
    name: str,
    launch: tuple[int, int, int, int],
    params: ctypes.Structure,
    ranges: list[int],
    reads: Any,
    flows: Any,
) -> int:
    """Runs a kernel. Returns its faults.

    Args:
        launch: CTAs, threads of each, CTAs of a cluster, bytes of shared memory.
        ranges: where each activation begins and ends.
        reads: counts of each 16 bytes of the weight, filled.
        flows: three numbers a CTA, filled.
    """
    return int(
        library.run(
            ctypes.cast(getattr(library, name), ctypes.c_void_p),
            *launch,
            ctypes.byref(params),
            ctypes.c_long(reads.size * 16),
            reads.ctypes.data_as(ctypes.c_void_p),
            (ctypes.c_void_p * len(ranges))(*ranges),
            len(ranges) // 2,
            flows.ctypes.data_as(ctypes.c_void_p),
        )
    )


class Emulator:
    """Takes the place of the loaded modules; remembers how the last launch went."""

    def __init__(self, libraries: dict[Epilogue, ctypes.CDLL]) -> None:
        self._libraries = libraries
        self.reads: np.ndarray[Any, Any] = np.zeros((0, 0), dtype=np.uint32)  # [tiles, K / 32, 64]
        self.flows: np.ndarray[Any, Any] = np.zeros((0, 3), dtype=np.int64)  # [CTAs, 3], see emulator.cpp
        self.faults = -1
        self.names: list[str] = []
        self.shared: list[int] = []
        self.groups = self.grid = 0

    def install(self, monkeypatch: pytest.MonkeyPatch, bulk_bytes: int = BULK_BYTES, large_bytes: int = 0) -> None:
        """For the rest of a test, launches come here; the card is an sm_90 with two SMs and room for short rings."""
        monkeypatch.setattr(cuda_launch, "_module", lambda epilogue, device: _Module(self, epilogue))
        monkeypatch.setattr(cuda_launch, "_stream", lambda device: 0)
        card = cuda_launch.Device(2, bulk_bytes, large_bytes)
        monkeypatch.setattr(cuda_launch, "_device", lambda device: card)
        monkeypatch.setattr(cuda_launch, "capability", lambda: 90)
        monkeypatch.setattr(cuda_launch, "pdl_enabled", lambda: False)
        for module in (wide_launch, cluster_launch):
            monkeypatch.setattr(module, "_device", lambda device: wide_launch.Device(2, 0, lambda size: 2))

    def run(
        self, epilogue: Epilogue, name: str, grid: int, threads: int, cluster: int, shared_bytes: int, params: Any
    ) -> None:
        pieces = (params.tiles, params.K // 32, 64)
        self._run(epilogue, name, grid, threads, cluster, shared_bytes, params, params, pieces)

    def _run(
        self,
        epilogue: Epilogue,
        name: str,
        grid: int,
        threads: int,
        cluster: int,
        shared_bytes: int,
        params: Any,
        common: Params,
        pieces: tuple[int, ...],
        scales: tuple[int, ...] = (),
    ) -> None:
        """pieces: of 16 bytes, the weight's; scales: where they begin and end."""
        library = self._libraries[epilogue]
        reads, flows = np.zeros(pieces, dtype=np.uint32), np.zeros((grid, 3), dtype=np.int64)
        ranges = [common.x, common.x + 2 * ((common.M - 1) * common.x_stride + common.K)]
        if common.norm_weight:
            ranges += [common.norm_weight, common.norm_weight + 2 * common.K]
        ranges += scales
        self.faults = _run(library, name, (grid, threads, cluster, shared_bytes), params, ranges, reads, flows)
        self.reads, self.flows = reads, flows
        self.names.append(name)
        self.shared.append(shared_bytes)
        self.groups = common.m_groups
        self.grid = grid


class Int4Emulator(Emulator):
    """The same for the kernels over INT4 weights."""

    def install(self, monkeypatch: pytest.MonkeyPatch, arch: int = 90) -> None:
        monkeypatch.setattr(int4_launch, "_module", lambda group, epilogue, device: _Module(self, epilogue))
        monkeypatch.setattr(int4_launch, "_stream", lambda device: 0)
        monkeypatch.setattr(int4_launch, "_sms", lambda device: 1)
        monkeypatch.setattr(int4_launch, "capability", lambda: arch)
        monkeypatch.setattr(int4_launch, "pdl_enabled", lambda: False)

    def run(
        self, epilogue: Epilogue, name: str, grid: int, threads: int, cluster: int, shared_bytes: int, params: Any
    ) -> None:
        common = params.common
        pieces = (common.tiles // 2, common.K // 32, 32)
        scales = (params.scales, params.scales + 64 * pieces[0] * common.K // int(name.split("_")[3]))
        self._run(epilogue, name, grid, threads, cluster, shared_bytes, params, common, pieces, scales)


class WideEmulator(Emulator):
    """The same for the kernels for more rows; launches of the others go to `Emulator`."""

    def install(self, monkeypatch: pytest.MonkeyPatch, sms: int = 4, shared_bytes: int = WIDE_BYTES) -> None:
        card = wide_launch.Device(sms, shared_bytes, lambda size: sms // size)
        monkeypatch.setattr(wide_launch, "_module", lambda epilogue, device: _Module(self, epilogue))
        monkeypatch.setattr(wide_launch, "_stream", lambda device: 0)
        monkeypatch.setattr(wide_launch, "_device", lambda device: card)
        monkeypatch.setattr(wide_launch, "_ordered", lambda device, elements: self._ordered(elements))
        monkeypatch.setattr(wide_launch, "pdl_enabled", lambda: False)

    def _ordered(self, elements: int) -> torch.Tensor:
        self._x = torch.full((elements,), torch.nan, dtype=torch.bfloat16)
        return self._x

    def run(
        self, epilogue: Epilogue, name: str, grid: int, threads: int, cluster: int, shared_bytes: int, params: Any
    ) -> None:
        common = Params.from_buffer_copy(params.common)
        pieces = (common.tiles, common.K // 32, 64)
        before = 0
        if not name.startswith("order"):  # reads x as it was ordered, alone and whole
            before = self.faults + int(self._x.isnan().sum())
            common.x, common.norm_weight = params.x_ordered, 0
            common.M, common.x_stride = len(self._x) // common.K, common.K
        self._run(epilogue, name, grid, threads, cluster, shared_bytes, params, common, pieces)
        self.faults += before


class PromptEmulator(WideEmulator):
    """The same for the kernels of wgmma."""

    def install(self, monkeypatch: pytest.MonkeyPatch, sms: int = 4, shared_bytes: int = 0) -> None:
        card = prompt_launch.Device(True, lambda size: sms // size)
        monkeypatch.setattr(prompt_launch, "_module", lambda epilogue, device: _Module(self, epilogue))
        monkeypatch.setattr(prompt_launch, "_stream", lambda device: 0)
        monkeypatch.setattr(prompt_launch, "_device", lambda device: card)
        monkeypatch.setattr(prompt_launch, "_ordered", lambda device, elements: self._ordered(elements))
        monkeypatch.setattr(prompt_launch, "pdl_enabled", lambda: False)


class ClusterEmulator(WideEmulator):
    """The same for the kernels that divide K over a cluster."""

    def install(self, monkeypatch: pytest.MonkeyPatch, sms: int = 4, shared_bytes: int = CLUSTER_BYTES) -> None:
        card = wide_launch.Device(sms, shared_bytes, lambda size: sms // size)
        monkeypatch.setattr(cluster_launch, "_module", lambda epilogue, device: _Module(self, epilogue))
        monkeypatch.setattr(cluster_launch, "_stream", lambda device: 0)
        monkeypatch.setattr(cluster_launch, "_device", lambda device: card)
        monkeypatch.setattr(cluster_launch, "_ordered", lambda device, elements: self._ordered(elements))
        monkeypatch.setattr(cluster_launch, "pdl_enabled", lambda: False)


class ExpertEmulator:
    """The same for the router's and the experts' kernels; `faults` and `reads` by kernel, of all launches."""

    def __init__(self, libraries: dict[str, ctypes.CDLL]) -> None:
        self._libraries = libraries
        self.names: list[str] = []
        self.faults = 0
        self.reads: dict[str, np.ndarray[Any, Any]] = {}  # of the last launch, each 16 bytes of the weight

    def install(self, monkeypatch: pytest.MonkeyPatch, arch: int = 90) -> None:
        """For the rest of a test, launches come here; the card has two multiprocessors."""
        for module in (expert_launch, expert_stream_launch, route_launch):
            monkeypatch.setattr(module, "_module", lambda device: _Module(self, Epilogue.STORE))
            monkeypatch.setattr(module, "_stream", lambda device: 0)
            monkeypatch.setattr(module, "capability", lambda: arch)
            monkeypatch.setattr(module, "pdl_enabled", lambda: False)
        for module in (expert_launch, expert_stream_launch):
            monkeypatch.setattr(module, "_sms", lambda device: 2)
        monkeypatch.setattr(gate_launch, "_module", lambda name, device: _Module(self, Epilogue.STORE))
        monkeypatch.setattr(gate_launch, "_stream", lambda device: 0)
        monkeypatch.setattr(gate_launch, "pdl_enabled", lambda: False)

    def run(
        self, epilogue: Epilogue, name: str, grid: int, threads: int, cluster: int, shared_bytes: int, params: Any
    ) -> None:
        if name in ("gate_rows", "choose_rows"):
            self._front(name, grid, threads, cluster, shared_bytes, params)
            return
        routes, streams = name.startswith("route"), name == "experts_stream"
        library = self._libraries["route" if routes else "stream" if streams else "experts"]
        if streams:
            cluster = grid  # CTAs that wait for each other
        if routes:
            weight_bytes = 2 * params.E * 32 * params.chunks
        else:
            weight_bytes = 512 * params.blocks * params.chunks * self.num_experts
        if name.startswith("experts_down") or not params.x:
            x_bytes = 2 * params.pairs * 32 * params.chunks if not routes else 0
        else:
            x_bytes = 2 * ((params.M - 1) * params.x_stride + 32 * params.chunks)
        reads = np.zeros(max(1, weight_bytes // 16), dtype=np.uint32)
        flows = np.zeros((grid, 3), dtype=np.int64)
        x = params.x or 0
        ranges = [x, x + x_bytes]
        if streams:  # what else is copied: scales, and the words and scales of `down`
            down_bytes = 512 * self.num_experts * params.down_blocks * params.down_chunks
            ranges += [params.scales, params.scales + weight_bytes // 8]
            ranges += [params.down_scales, params.down_scales + down_bytes // 8]
            if params.down == params.weight + weight_bytes:  # one piece of memory: all its reads are counted
                reads = np.zeros((weight_bytes + down_bytes) // 16, dtype=np.uint32)
            else:
                ranges += [params.down, params.down + down_bytes]
        faults = _run(library, name, (grid, threads, cluster, shared_bytes), params, ranges, reads, flows)
        self.faults += faults
        self.reads[name.split("_")[1]] = reads
        self.names.append(name)

    num_experts = 0

    def _front(self, name: str, grid: int, threads: int, cluster: int, shared_bytes: int, params: Any) -> None:
        """The kernels in front of experts: ranges are x, the norm's weight, the shared expert's."""
        kind = name.split("_")[0]
        library = self._libraries[kind]
        if kind == "gate":
            ranges = [params.x, params.x + 2 * ((params.M - 1) * params.x_stride + params.K)]
            size = params.router_units * 2 * params.chunks * 1024
            if params.norm_weight:
                ranges += [params.norm_weight, params.norm_weight + 2 * params.K]
            if params.shared_weight:
                ranges += [params.shared_weight, params.shared_weight + -(-params.I // 16) * 2 * params.chunks * 1024]
        else:
            size = -(-params.N // 32) * 2 * params.chunks * 1024
            ranges = [params.x or 0, (params.x or 0) + 64 * params.M * params.chunks]
        reads, flows = np.zeros(max(1, size // 16), dtype=np.uint32), np.zeros((grid, 3), dtype=np.int64)
        self.faults += _run(library, name, (grid, threads, cluster, shared_bytes), params, ranges, reads, flows)
        self.reads[kind] = reads
        self.names.append(name)


class _Module:
    def __init__(self, emulator: Any, epilogue: Epilogue) -> None:
        self._emulator, self._epilogue = emulator, epilogue

    @property
    def functions(self) -> "_Module":
        return self

    def __getitem__(self, name: str) -> "_Function":
        return _Function(self._emulator, self._epilogue, name)


class _Function:
    def __init__(self, emulator: Any, epilogue: Epilogue, name: str) -> None:
        self._emulator, self._epilogue, self._name = emulator, epilogue, name

    def launch(
        self, grid: int, threads: int, shared_bytes: int, stream: int, params: Any, *, pdl: bool, cluster: int = 1
    ) -> None:
        self._emulator.run(self._epilogue, self._name, grid, threads, cluster, shared_bytes, params)

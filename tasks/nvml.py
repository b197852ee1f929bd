"""The NVIDIA driver's management library, by its C interface: what cards there are, how they are, and who uses them.

Only looks. It comes with the driver, so no package has to be installed for it, here or on a far host. What a card or a
driver does not tell is None.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_uint, c_ulonglong, c_void_p, create_string_buffer
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_INSUFFICIENT_SIZE = 7
_UNCORRECTED, _SINCE_LOADED = 1, 0  # of nvmlDeviceGetTotalEccErrors
_P2P_READ, _P2P_NVLINK, _P2P_OK = 0, 2, 0
_TEXT_BYTES = 96
_UNKNOWN_BYTES = 2**64 - 1  # a driver that may not tell a process's share


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (("pid", c_uint), ("used", c_ulonglong), ("gpu_instance", c_uint), ("compute_instance", c_uint))


@dataclass(frozen=True)
class GpuUser:
    """A process on a card: pid in the host's own table (a container may not see it), bytes where they are told."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One card.

    Args:
        index: the driver's number of it.
        name, uuid, capability: what it is; capability such as "9.0".
        total_bytes, used_bytes: memory.
        users: processes that compute on it.
        persistence: whether the driver keeps it initialised while nobody uses it.
        uncorrected_ecc_errors: since the driver was loaded.
        row_remap_pending, row_remap_failed: of its memory.
        peers: index of another card -> how they reach each other: "nvlink", "pcie" (directly) or "host" (through the
            host's memory).
    """

    index: int
    name: str
    uuid: str
    capability: str | None
    total_bytes: int
    used_bytes: int
    users: tuple[GpuUser, ...]
    persistence: bool | None
    uncorrected_ecc_errors: int | None
    row_remap_pending: bool | None
    row_remap_failed: bool | None
    peers: dict[int, str]


@dataclass(frozen=True)
class Gpus:
    """All cards of a machine, the driver's version, and the CUDA version that it can run, such as "13.0"."""

    driver: str
    cuda: str | None
    cards: tuple[Gpu, ...]


def read_gpus(library: str = LIBRARY) -> Gpus | None:
    """What the driver tells; None on a machine without an NVIDIA driver or whose driver does not answer."""
    with _nvml(library) as nvml:
        if nvml is None:
            return None
        count = _number(nvml, "nvmlDeviceGetCount_v2", c_uint) or 0
        handles = [handle for index in range(count) if (handle := _handle(nvml, index)) is not None]
        cuda = _number(nvml, "nvmlSystemGetCudaDriverVersion_v2", c_int)
        return Gpus(
            driver=_text(nvml, "nvmlSystemGetDriverVersion") or "unknown",
            cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            cards=tuple(_card(nvml, index, handle, handles) for index, handle in enumerate(handles)),
        )


@contextmanager
def _nvml(library: str) -> Iterator[Any]:
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, index: int, handle: c_void_p, handles: list[c_void_p]) -> Gpu:
    memory = _Memory()
    nvml.nvmlDeviceGetMemoryInfo(handle, byref(memory))
    remapped = [c_uint() for _ in range(4)]
    remap_known = _call(nvml, "nvmlDeviceGetRemappedRows", handle, *map(byref, remapped))
    persistence = _number(nvml, "nvmlDeviceGetPersistenceMode", c_uint, handle)
    ecc = _number(nvml, "nvmlDeviceGetTotalEccErrors", c_ulonglong, handle, _UNCORRECTED, _SINCE_LOADED)
    return Gpu(
        index=index,
        name=_text(nvml, "nvmlDeviceGetName", handle) or "unknown",
        uuid=_text(nvml, "nvmlDeviceGetUUID", handle) or "unknown",
        capability=_capability(nvml, handle),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        users=_users(nvml, handle),
        persistence=None if persistence is None else bool(persistence),
        uncorrected_ecc_errors=ecc,
        row_remap_pending=bool(remapped[2].value) if remap_known else None,
        row_remap_failed=bool(remapped[3].value) if remap_known else None,
        peers={other: _way(nvml, handle, there) for other, there in enumerate(handles) if other != index},
    )


def _users(nvml: Any, handle: c_void_p) -> tuple[GpuUser, ...]:
    """Processes that compute on a card. Asked again when more have come than there was room for."""
    function = "nvmlDeviceGetComputeRunningProcesses_v3"
    room = 16
    while True:
        count, found = c_uint(room), (_Process * room)()
        code = getattr(nvml, function)(handle, byref(count), found) if hasattr(nvml, function) else 1
        if code != _INSUFFICIENT_SIZE:
            break
        room = count.value + 16
    if code != 0:
        return ()
    return tuple(
        GpuUser(int(one.pid), None if one.used == _UNKNOWN_BYTES else int(one.used)) for one in found[: count.value]
    )


def _way(nvml: Any, handle: c_void_p, other: c_void_p) -> str:
    for index, way in ((_P2P_NVLINK, "nvlink"), (_P2P_READ, "pcie")):
        if _number(nvml, "nvmlDeviceGetP2PStatus", c_uint, handle, other, index) == _P2P_OK:
            return way
    return "host"


def _capability(nvml: Any, handle: c_void_p) -> str | None:
    major, minor = c_int(), c_int()
    known = _call(nvml, "nvmlDeviceGetCudaComputeCapability", handle, byref(major), byref(minor))
    return f"{major.value}.{minor.value}" if known else None


def _handle(nvml: Any, index: int) -> c_void_p | None:
    handle = c_void_p()
    return handle if _call(nvml, "nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle)) else None


def _number(nvml: Any, function: str, kind: type[Any], *arguments: Any) -> int | None:
    value = kind()
    return int(value.value) if _call(nvml, function, *arguments, byref(value)) else None


def _text(nvml: Any, function: str, *arguments: Any) -> str | None:
    text = create_string_buffer(_TEXT_BYTES)
    known = _call(nvml, function, *arguments, ctypes.cast(text, c_char_p), c_uint(_TEXT_BYTES))
    return text.value.decode(errors="replace") if known else None


def _call(nvml: Any, function: str, *arguments: Any) -> bool:
    """Whether the library has the function and it succeeded."""
    return hasattr(nvml, function) and getattr(nvml, function)(*arguments) == 0

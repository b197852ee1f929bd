"""The CUDA driver by ctypes: any call of it, and the few that load a cubin and launch a kernel."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_MAX_DYNAMIC_SHARED_BYTES, _SHARED_CARVEOUT = 8, 9  # CUfunction_attribute


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id padded to 8 bytes, a value of 64: a number, or three (y and z of a cluster)."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("y", ctypes.c_int),
        ("z", ctypes.c_int),
        ("rest", ctypes.c_char * 52),
    )


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *args: Any) -> None:
    """One call of the driver. Raises RuntimeError that names it, with the driver's words."""
    code = getattr(_library(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name} failed with {code}: {(text.value or b'unknown error').decode()}")


def _ensure_context(device: int) -> None:
    """A thread that has called nothing of CUDA yet has no context: take the one torch uses."""
    context = ctypes.c_void_p()
    call("cuInit", ctypes.c_uint(0))
    call("cuCtxGetCurrent", ctypes.byref(context))
    if context.value is None:
        handle = ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        call("cuCtxSetCurrent", context)


def prefer_shared(function: ctypes.c_void_p) -> None:
    """Asks for as much shared memory and as little L1 cache as an SM can have, whatever this kernel needs itself.

    Kernels of one chain overlap on an SM only where they want the same division of it: to change it, the SM must run
    empty first, and the next kernel's weights cannot be fetched meanwhile.
    """
    call("cuFuncSetAttribute", function, ctypes.c_int(_SHARED_CARVEOUT), ctypes.c_int(100))


class Function:
    """A kernel of a loaded module."""

    def __init__(self, module: ctypes.c_void_p, name: str, shared_bytes: int) -> None:
        """Args: shared_bytes: the most dynamic shared memory that a launch will ask for."""
        self._handle = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(self._handle), module, name.encode())
        # Loaded now: under lazy loading the first launch would, and that must not happen while a graph is captured.
        call("cuFuncLoad", self._handle)
        if shared_bytes > 48 * 1024:
            call(
                "cuFuncSetAttribute", self._handle, ctypes.c_int(_MAX_DYNAMIC_SHARED_BYTES), ctypes.c_int(shared_bytes)
            )
        prefer_shared(self._handle)

    def launch(
        self,
        grid: int,
        threads: int,
        shared_bytes: int,
        stream: int,
        params: ctypes.Structure,
        *,
        pdl: bool,
        cluster: int = 1,
    ) -> None:
        """Launch with one argument, a struct passed by value.

        Args:
            stream: handle, as torch's `cuda_stream`.
            pdl: the kernel may start before the one in front of it is done (it waits by itself).
            cluster: CTAs of one, of which the grid is a multiple.
        """
        attributes = (_Attribute * 2)()
        used = 0
        if pdl:
            attributes[used] = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
            used += 1
        if cluster > 1:
            attributes[used] = _Attribute(id=_CLUSTER_DIMENSION, value=cluster, y=1, z=1)
            used += 1
        config = _LaunchConfig(grid, 1, 1, threads, 1, 1, shared_bytes, stream or None, attributes, used)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        call("cuLaunchKernelEx", ctypes.byref(config), self._handle, arguments, None)

    def most_clusters(self, cluster: int, threads: int, shared_bytes: int) -> int:
        """How many clusters of so many CTAs the card holds at once."""
        attribute = _Attribute(id=_CLUSTER_DIMENSION, value=cluster, y=1, z=1)
        config = _LaunchConfig(cluster, 1, 1, threads, 1, 1, shared_bytes, None, ctypes.pointer(attribute), 1)
        found = ctypes.c_int()
        call("cuOccupancyMaxActiveClusters", ctypes.byref(found), self._handle, ctypes.byref(config))
        return found.value


class Module:
    """Kernels of one cubin, loaded on the current device."""

    def __init__(self, cubin: Path, device: int, functions: Sequence[tuple[str, int]]) -> None:
        """Args: functions: (name, most dynamic shared memory in bytes)."""
        _ensure_context(device)
        handle = ctypes.c_void_p()
        image = cubin.read_bytes()
        call("cuModuleLoadData", ctypes.byref(handle), ctypes.c_char_p(image))
        self.functions = {name: Function(handle, name, shared) for name, shared in functions}

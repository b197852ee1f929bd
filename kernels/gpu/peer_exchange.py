"""Exchange between cards through memory that each rank opens to the others (CUDA IPC): NVLink or PCIe, no multicast.

Memory is allocated with the driver's own call, apart from torch's allocator, whose pieces are not made to be shared.
It lives until its process ends.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.kernels.driver import call
from slipstream.kernels.gpu.all_gather import all_gather
from slipstream.kernels.gpu.all_reduce import all_reduce, all_reduce_add
from slipstream.kernels.gpu.exchange import CHUNK
from slipstream.kernels.stream import Stream

# Items that a rank can have under way: of 2 KB in each of two places, for every peer.
CAPACITY = 2048
_LAZY_PEER_ACCESS = 1


class PeerExchange:
    """One rank's side of every exchange.

    Args:
        rank, size: this one, of how many.
        addresses: of every rank's memory (`num_bytes(size)`, all zero), in rank order, as this process sees it.
        device: this rank's card.
        seconds: longest wait for a peer within one exchange.

    All ranks must run the same exchanges in the same order, each in one stream. Numbers of exchanges (epochs, one a
    place) are kept on the device and go on by themselves, also when a graph is replayed. They have 32 bits: a word that
    is as old as 2^32 exchanges of its place, and was not written since, would pass for new.
    """

    in_kernels = True

    def __init__(
        self, rank: int, size: int, addresses: Sequence[int], device: torch.device | str, seconds: float
    ) -> None:
        self.rank, self.size = rank, size
        with torch.device(device):
            self._buffers = torch.tensor(list(addresses), dtype=torch.int64)  # [size]
            self._epochs = torch.ones(CAPACITY, dtype=torch.int32)
            self._state = torch.zeros(2, dtype=torch.int64)  # nanoseconds to wait, and who was lost (rank + 1)
        pinned = self._buffers.is_cuda
        self._lost = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self._starts: dict[tuple[int, ...], torch.Tensor] = {}
        self.be_patient(seconds)

    @property
    def arguments(self) -> dict[str, Any]:
        """What a kernel of an exchange is given."""
        return {
            "buffers_ptr": self._buffers,
            "epochs_ptr": self._epochs,
            "state_ptr": self._state,
            "lost_ptr": self._lost,
            "CAPACITY": CAPACITY,
            "RANK": self.rank,
            "WORLD": self.size,
        }

    def rows_together(self, per_row: int) -> int:
        """Rows of one launch. Raises ValueError where not even one row of `per_row` items has room."""
        if per_row > CAPACITY:
            raise ValueError(f"a row of {per_row * CHUNK.value} words: at most {CAPACITY * CHUNK.value} are exchanged")
        return CAPACITY // per_row

    def starts_of(self, widths: Sequence[int]) -> torch.Tensor:
        """[size + 1] int64 on the device: where parts of these widths begin, and the end. Made once, not in a graph."""
        key = tuple(widths)
        if key not in self._starts:
            ends = [sum(widths[:rank]) for rank in range(self.size + 1)]
            self._starts[key] = torch.tensor(ends, dtype=torch.int64, device=self._buffers.device)
        return self._starts[key]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in rank order, as `kernels.all_reduce`."""
        return all_reduce(x, self)

    def all_reduce_add(self, partial: torch.Tensor, stream: Stream) -> Stream:
        """`stream` with that sum added."""
        return all_reduce_add(partial, stream, self)

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """[..., widths[own rank]] -> [..., sum of widths]."""
        return all_gather(x, widths, self)

    def lost(self) -> int | None:
        """The rank that did not come in time; None where all did. Read without asking the device."""
        return int(self._lost[0]) - 1 if int(self._lost[0]) else None

    def be_patient(self, seconds: float) -> None:
        """Changes the longest wait for a peer, for exchanges that are launched from now on in this stream."""
        self._state[0].fill_(int(seconds * 1e9))


def num_bytes(size: int) -> int:
    """Of one rank's memory among `size` ranks."""
    return 2 * size * CAPACITY * CHUNK.value * 8


def allocate(size: int) -> int:
    """Address of a rank's memory on the current card, all zero. Raises RuntimeError with the driver's words."""
    torch.cuda.current_stream().synchronize()  # the card is in use: its context is there
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes(size)))
    call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes(size)))
    torch.cuda.synchronize()
    return int(address.value)


def share(address: int) -> bytes:
    """What another process of this machine opens the memory with."""
    handle = _IpcHandle()
    call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle.data)


def open_shared(handle: bytes) -> int:
    """Address, in this process, of another one's memory. Raises RuntimeError where its card cannot be reached."""
    address = ctypes.c_uint64()
    flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
    call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), flags)
    return int(address.value)


class _IpcHandle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * 64),)

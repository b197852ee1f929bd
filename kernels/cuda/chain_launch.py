"""Products launched as one kernel (chain_gemm.cuh): output projection, gate and up, down, and what reads these.

Inside `joined()` a product that may begin or go on with such a chain is only noted; the chain is launched when it is
complete, when any other kernel of this project is launched, and at the end. So what lies between must be these kernels:
an op of torch's that reads a product inside `joined()` would come too early.
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from slipstream.kernels import driver
from slipstream.kernels.cuda import build
from slipstream.kernels.cuda import launch as products
from slipstream.kernels.cuda.launch import BULK, BULK_LONG_K, BULK_ONE, Epilogue, Override, Params
from slipstream.kernels.gpu import launch as gpu_launch

MAX_PRODUCTS, MAX_SLOTS, BARRIER_BYTES = 4, 24, 512  # as in chain_gemm.cuh
PARTS = 8  # of K, in each product: a warp each
MOST_RING_BYTES = 208 << 10


class ChainParams(ctypes.Structure):
    """As in chain_gemm.cuh."""

    _fields_ = (
        ("common", Params),
        ("then", Params * (MAX_PRODUCTS - 1)),
        ("arrived", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("pad", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Joining:
    """How products are joined. Changes no bits.

    Args:
        on: whether they are.
        shared: KB of a CTA's shared memory; beside it attention's 74 must fit on an SM, or wait.
        left, ahead, fixed: as `launch.Flow` has them; of all products, of the last and of the first one.
        last: whether queries, keys and values, or a head, end a chain as its fourth product.
    """

    on: bool = False
    shared: int = 140
    left: int = 96
    ahead: int = 64
    fixed: int = 3
    last: bool = True


joining = Joining()  # off until a card has timed it


@dataclass
class _Product:
    epilogue: Epilogue
    norm: bool
    params: Params
    device: int


class _Waiting(threading.local):
    depth = 0

    def __init__(self) -> None:
        self.products: list[_Product] = []


_waiting = _Waiting()  # this thread's products that are noted and not launched


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Products in here may be launched together, up to the end of the outermost."""
    _waiting.depth += 1
    try:
        yield
        if _waiting.depth == 1:
            flush()
    finally:
        _waiting.depth -= 1
        if not _waiting.depth:
            _waiting.products.clear()  # of a step that failed


def defer(epilogue: Epilogue, norm: bool, params: Params, device: int, override: Override) -> bool:
    """Whether the product was noted, to be launched later."""
    if not _waiting.depth or not joining.on or override != Override():
        return False
    if not _goes_on(epilogue, norm, params, device):
        flush()
        if not _goes_on(epilogue, norm, params, device):
            return False
    _waiting.products.append(_Product(epilogue, norm, Params.from_buffer_copy(params), device))
    if len(_waiting.products) == MAX_PRODUCTS:
        flush()
    return True


def flush() -> None:
    """Launches what was noted."""
    if not _waiting.products:
        return
    noted, _waiting.products = _waiting.products, []
    if len(noted) >= MAX_PRODUCTS - 1:
        _launch(noted)
        return
    for one in noted:
        products.launch(one.epilogue, one.norm, one.params, one.device, Override())


def load(device: int) -> None:
    """Compile and load the kernels: before a graph is captured."""
    if products._device(device).large_bytes:
        _module(device)


_ORDER: tuple[tuple[tuple[Epilogue, bool], ...], ...] = (
    ((Epilogue.ADD, False),),
    ((Epilogue.GATE_UP, True),),
    ((Epilogue.ADD, False),),
    ((Epilogue.QKV, True), (Epilogue.STORE, True)),
)


def _goes_on(epilogue: Epilogue, norm: bool, params: Params, device: int) -> bool:
    """Whether this product can be the next one of what was noted."""
    noted = _waiting.products
    place = len(noted)
    if (epilogue, norm) not in _ORDER[place] or (place == MAX_PRODUCTS - 1 and not joining.last):
        return False
    if noted:
        before = noted[-1]
        if (before.params.out, before.params.M, before.device) != (params.x, params.M, device):
            return False
    card, (parts, per_part) = products._device(device), products.split_k(params.K, norm)
    if not card.large_bytes or parts != PARTS or params.M > 8:
        return False
    tiles = -(-params.N // (8 if epilogue is Epilogue.GATE_UP else 16))
    variant = products.choose(params.M, tiles, params.K, parts, per_part, card)
    return variant == BULK or (place == 2 and variant in (BULK_LONG_K, BULK_ONE))


def _launch(noted: list[_Product]) -> None:
    """One kernel for three or four products, on torch's current stream."""
    device = noted[0].device
    card, chain = products._device(device), ChainParams()
    sums = max(BULK.sum_bytes(PARTS), BULK_LONG_K.sum_bytes(PARTS))
    slot = 1024 * PARTS
    slots = min(MAX_SLOTS, ((joining.shared << 10) - BARRIER_BYTES - sums) // slot)
    for place, one in enumerate(noted):
        params, unit = one.params, 2 if place == 2 else 1
        tiles = -(-params.N // (8 if one.epilogue is Epilogue.GATE_UP else 16))
        params.tiles = -(-tiles // unit) * unit
        params.chunks_per_part = products.split_k(params.K, one.norm)[1]
        params.m_groups, params.evict_first, params.slots = 1, 1, slots
        params.left = (joining.left << 10) // slot
        params.ahead = (joining.ahead << 10) // slot if place == 0 else 0
        params.fixed = joining.fixed
        if place:
            chain.then[place - 1] = params
        else:
            chain.common = params
    arrived = _arrived(device)
    chain.arrived, chain.count = arrived.data_ptr(), len(noted)
    name = "chain_n" if len(noted) < MAX_PRODUCTS else f"chain_{int(noted[-1].epilogue)}"
    _module(device).functions[name].launch(
        card.sms, 32 * (PARTS + 1), joining.shared << 10, products._stream(device), chain, pdl=products.pdl_enabled()
    )
    products._turn.large = True  # the next one beside it is small
    gpu_launch.launched(settles=True)


@functools.cache
def _arrived(device: int) -> torch.Tensor:
    """[MAX_PRODUCTS] int32, zero between launches, which follow each other in one stream."""
    return torch.zeros(MAX_PRODUCTS, dtype=torch.int32, device=_place(device))


def _place(device: int) -> torch.device:
    return torch.device("cuda", device)


@functools.cache
def _module(device: int) -> driver.Module:
    (cubin,) = build.compiled(products.capability(), [build.Unit("chain_gemm", ())])
    _arrived(device)  # before a capture
    return driver.Module(cubin, device, [(name, MOST_RING_BYTES) for name in ("chain_n", "chain_0", "chain_3")])


gpu_launch.flush_before(flush)

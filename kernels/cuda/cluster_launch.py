"""How products of up to 64 rows of x are launched where a cluster divides K: twin of cluster_gemm.cu."""

import ctypes
import functools
from dataclasses import dataclass

import torch

from slipstream.kernels import driver
from slipstream.kernels.cuda import build
from slipstream.kernels.cuda.launch import BARRIER_BYTES, MAX_SLOTS, Epilogue, Override, Params, norms, split_k
from slipstream.kernels.cuda.wide_launch import ORDER_CHUNKS, ORDER_WARPS, Device
from slipstream.kernels.gpu.launch import capability, launched, pdl_enabled

K_CTAS = 4  # of a cluster: each has a quarter of K
PARTS = 8  # of K
MIN_SLOTS = 2
FROM_ROWS, FROM_TILES, WIDTHS = 17, 256, (4096, 14336)  # timed
ORDER_BYTES = 1024  # of an SM's shared memory, for a CTA that orders the next product's x


class ClusterParams(ctypes.Structure):
    """As in cluster_gemm.cuh."""

    _fields_ = (
        ("common", Params),
        ("x_ordered", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("columns", "max_tiles")),
    )


@dataclass(frozen=True)
class Cut:
    """How a kernel takes a product. None of this changes a bit of the result.

    Args:
        columns: rows of x, 32 or 64.
        groups: of four warps that sum, 2 or 3: a unit is of up to four tiles for each.
        max_slots: of the ring.
    """

    columns: int
    groups: int
    max_slots: int = MAX_SLOTS

    def name(self, epilogue: Epilogue) -> str:
        """The kernel's name in the cubin."""
        return f"cluster_{int(epilogue)}_{self.columns}_{self.groups}"

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 128 * (self.groups + (1 if self.groups > 2 else 2))

    def max_tiles(self, tiles: int, clusters: int) -> int:
        """Of a unit, which is of four at least where a cluster has several."""
        share = -(-tiles // clusters)
        return max(min(4, share), -(-share // -(-share // (4 * self.groups))))

    @property
    def fixed_bytes(self) -> int:
        """Of shared memory beside the ring."""
        return BARRIER_BYTES + K_CTAS * self.groups * 64 * self.columns

    def slot_bytes(self, max_tiles: int) -> int:
        """Of the ring."""
        return 2048 * max_tiles + 128 * self.columns

    def slots(self, tiles: int, card: Device) -> int:
        """Of the ring."""
        room = card.shared_bytes - self.fixed_bytes
        return min(self.max_slots, MAX_SLOTS, room // self.slot_bytes(self.max_tiles(tiles, card.clusters(K_CTAS))))


CUTS = (ROWS_32, ROWS_64_TWO, ROWS_64) = (Cut(32, 3), Cut(64, 2), Cut(64, 3))


def choose(epilogue: Epilogue, rows: int, tiles: int, width: int, parts: int, card: Device) -> Cut | None:
    """How `rows` rows of x and `tiles` tiles of weight rows are taken; None: others are better, or nothing is timed.

    Llama-3.1-8B's products on an H200, us, others / this. 64 rows: qkv 29.7 / 22.8, o 23.7 / 17.2, gate_up 86.4 / 68.0,
    down 52.9 / 41.6, head 370 / 275. 32 rows: o 16.9 / 14.2, gate_up 65.9 / 64.6, down 38.6 / 35.3; in a chain qkv and
    the head gain nothing.
    """
    timed = FROM_ROWS <= rows <= ROWS_64.columns and tiles >= FROM_TILES and width in WIDTHS
    if not timed or not card.shared_bytes or parts != PARTS:
        return None
    if rows <= ROWS_32.columns:
        return ROWS_32 if epilogue in (Epilogue.ADD, Epilogue.GATE_UP) else None
    return ROWS_64_TWO if epilogue is Epilogue.QKV else ROWS_64


def cut_for(epilogue: Epilogue, norm: bool, params: Params, device: int) -> Cut | None:
    """As `choose`, for a launch."""
    if not FROM_ROWS <= params.M <= ROWS_64.columns:
        return None
    return choose(epilogue, params.M, _tiles(epilogue, params), params.K, split_k(params.K, norm)[0], _device(device))


def _tiles(epilogue: Epilogue, params: Params) -> int:
    return -(-params.N // (8 if epilogue is Epilogue.GATE_UP else 16))


@functools.cache
def _module(epilogue: Epilogue, device: int) -> driver.Module:
    functions = [(f"order_{int(norm)}", 0) for norm in norms(epilogue)]
    shared = _device(device).shared_bytes
    functions += [(cut.name(epilogue), shared) for cut in CUTS]
    return driver.Module(build.compiled(capability(), [build.cluster(int(epilogue))])[0], device, functions)


def load(device: int) -> None:
    """Compile and load everything: before a graph is captured."""
    if _device(device).shared_bytes:
        build.compiled(capability(), [build.cluster(int(epilogue)) for epilogue in Epilogue])
        for epilogue in Epilogue:
            _module(epilogue, device)


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _ordered(device: int, elements: int) -> torch.Tensor:
    # From the stream's or the captured graph's pool, which has it back as soon as the product is launched: whatever
    # kernel gets the room next writes behind its wait for that product.
    return torch.empty(elements, dtype=torch.bfloat16, device=torch.device("cuda", device))


@functools.cache
def _device(device: int) -> Device:
    properties = torch.cuda.get_device_properties(device)
    shared = properties.shared_memory_per_multiprocessor - 1024 - ORDER_BYTES  # the system takes 1 KB of each CTA

    @functools.cache
    def clusters(size: int) -> int:
        # A cluster lies in one group of multiprocessors, of which a card has several of unlike size.
        function = _module(Epilogue.ADD, device).functions[ROWS_64.name(Epilogue.ADD)]
        return function.most_clusters(size, ROWS_64.threads, shared)

    return Device(properties.multi_processor_count, shared if capability() == 90 else 0, clusters)


def launch(epilogue: Epilogue, norm: bool, params: Params, device: int, cut: Cut, override: Override) -> None:
    """Fill the cut into `params` and launch on torch's current stream. `params.N`: outputs of a row, or weight rows."""
    card = _device(device)
    tiles = _tiles(epilogue, params)
    clusters = min(card.clusters(K_CTAS), tiles)
    if cut.columns < params.M or split_k(params.K, norm)[0] != PARTS or params.K % (32 * PARTS):
        raise ValueError(f"{cut}: {params.M} rows, K {params.K}; expected {PARTS} equal parts and rows that fit")
    params.tiles, params.m_groups = tiles, 1
    params.slots = cut.slots(tiles, card)
    if params.slots < MIN_SLOTS:
        raise ValueError(f"{cut}: {params.slots} slots; expected at least {MIN_SLOTS}")
    params.evict_first = int(override.evict_first)
    ordered = _ordered(device, cut.columns * params.K)
    max_tiles = cut.max_tiles(tiles, card.clusters(K_CTAS))
    given = ClusterParams(params, ordered.data_ptr(), cut.columns, max_tiles)
    pdl = pdl_enabled() if override.pdl is None else override.pdl
    functions, stream = _module(epilogue, device).functions, _stream(device)
    order_ctas = cut.columns // 8 * -(-(params.K // 32) // (ORDER_WARPS * ORDER_CHUNKS))
    functions[f"order_{int(norm)}"].launch(order_ctas, 32 * ORDER_WARPS, 0, stream, given, pdl=pdl)
    functions[cut.name(epilogue)].launch(
        clusters * K_CTAS,
        cut.threads,
        cut.fixed_bytes + params.slots * cut.slot_bytes(max_tiles),
        stream,
        given,
        pdl=pdl,
        cluster=K_CTAS,
    )
    launched(settles=epilogue is Epilogue.QKV)  # as cluster_gemm.cuh does

"""How a matrix product of prompts (a thousand rows of x) with a small weight is launched. Twin of tiled_gemm.cuh."""

import functools

import torch

from slipstream.kernels import driver
from slipstream.kernels.cuda import build
from slipstream.kernels.cuda import launch as products
from slipstream.kernels.cuda.launch import BARRIER_BYTES, IN_L2, Epilogue, Override, Params, norms, split_k
from slipstream.kernels.cuda.wide_launch import ORDER_CHUNKS, ORDER_WARPS, WideParams
from slipstream.kernels.gpu.launch import capability, launched, pdl_enabled

COLUMNS, TILES, THREADS = 128, 4, 128  # rows of x and tiles of weight rows that a CTA takes; as in tiled_gemm.cuh
SLOTS = 6  # of the ring
SHARED_BYTES = BARRIER_BYTES + max(SLOTS * (1024 * TILES + 64 * COLUMNS), 4 * COLUMNS * (16 * TILES + 4))
ON_AN_SM = 2  # CTAs, by registers and shared memory
FROM_ROWS = 1024  # of x; no fewer were timed that it is faster for


def choose(rows: int, tiles: int, width: int, per_part: int, sms: int) -> bool:
    """Whether `rows` rows of x and `tiles` tiles of weight rows are for this kernel.

    A CTA takes all of K, 30 us of 576 and 50 of 1536 on an H200 however few run, so every SM must have two. Of
    SmolLM2-135M's products that is gate and up from 1,024 rows on: 42 us. Output (20 us by skinny_gemm.cuh, 37 by this)
    and down (28, 57) are too few, and skinny_gemm.cuh is better. Of a long K, and of weights larger than the L2 holds,
    which wide_gemm.cuh takes, nothing was timed.
    """
    short = per_part <= 4 and tiles * 32 * width <= IN_L2
    return short and rows >= FROM_ROWS and -(-tiles // TILES) * -(-rows // COLUMNS) >= ON_AN_SM * sms


def takes(epilogue: Epilogue, norm: bool, params: Params, device: int) -> bool:
    """As `choose`, for a launch."""
    tiles, per_part = _tiles(epilogue, params), split_k(params.K, norm)[1]
    return choose(params.M, tiles, params.K, per_part, products._device(device).sms) and _copies(device)


def _tiles(epilogue: Epilogue, params: Params) -> int:
    return -(-params.N // (8 if epilogue is Epilogue.GATE_UP else 16))


def name(epilogue: Epilogue) -> str:
    """The kernel's name in the cubin."""
    return f"tiled_{int(epilogue)}"


def _copies(device: int) -> bool:
    return capability() == 90


@functools.cache
def _module(epilogue: Epilogue, device: int) -> driver.Module:
    functions = [(f"order_{int(norm)}", 0) for norm in norms(epilogue)]
    functions.append((name(epilogue), SHARED_BYTES))
    return driver.Module(build.compiled(capability(), [build.tiled(int(epilogue))])[0], device, functions)


def load(device: int) -> None:
    """Compile and load everything: before a graph is captured."""
    if _copies(device):
        build.compiled(capability(), [build.tiled(int(epilogue)) for epilogue in Epilogue])
        for epilogue in Epilogue:
            _module(epilogue, device)


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _ordered(device: int, elements: int) -> torch.Tensor:
    # As in wide_launch.py.
    return torch.empty(elements, dtype=torch.bfloat16, device=torch.device("cuda", device))


def launch(epilogue: Epilogue, norm: bool, params: Params, device: int, override: Override) -> None:
    """Fill the cut into `params` and launch on torch's current stream. `params.N`: outputs of a row, or weight rows."""
    parts, _ = split_k(params.K, norm)
    tiles = _tiles(epilogue, params)
    params.tiles = tiles + tiles % 2
    params.m_groups = -(-params.M // COLUMNS)
    params.slots = SLOTS
    chunks = params.K // 32
    ordered = _ordered(device, params.m_groups * COLUMNS * params.K)
    wide = WideParams(params, ordered.data_ptr(), parts, 1, COLUMNS)
    pdl = pdl_enabled() if override.pdl is None else override.pdl
    functions, stream = _module(epilogue, device).functions, _stream(device)
    order_ctas = -(-params.M // 8) * -(-chunks // (ORDER_WARPS * ORDER_CHUNKS))
    functions[f"order_{int(norm)}"].launch(order_ctas, 32 * ORDER_WARPS, 0, stream, wide, pdl=pdl)
    ctas = -(-params.tiles // TILES) * params.m_groups
    functions[name(epilogue)].launch(ctas, THREADS, SHARED_BYTES, stream, wide, pdl=pdl)
    launched(settles=epilogue is Epilogue.QKV)  # as tiled_gemm.cuh does

"""Launches a kernel built on the core of the matrix products with the tile of its weight."""

from typing import Any

import torch

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.rms_norm import rms_norm
from slipstream.kernels.gpu.tiles import Tile
from slipstream.kernels.stream import Norm, Stream


def launch_product(
    kernel: Any,
    stream: Stream,
    norm: Norm | None,
    weight: torch.Tensor,
    tile: Tile,
    num_tiles: int,
    *,
    paired: bool = False,
    **arguments: Any,
) -> None:
    """Run `kernel` over all rows and `num_tiles` tiles of outputs.

    Args:
        kernel: takes the rows, the weight, the norm and the tile under the names below, and `arguments`.
        stream: M rows of width K; only their first axis may be strided.
        norm: None: rows are read as they are.
        weight: [N, K], contiguous.
        tile: of the weight.
        num_tiles: how many tiles of weight rows there are.
        paired: a program takes two weight rows for an output.
        arguments: the kernel's own.
    """
    rows = stream.rows
    num_rows, width = rows.shape
    if weight.shape[1] != width or not weight.is_contiguous() or rows.stride(1) != 1 or rows.dtype != weight.dtype:
        raise ValueError(
            f"a product needs rows [M, K] and a contiguous weight [N, K] of one dtype: found {tuple(rows.shape)} "
            f"{rows.dtype}, strides {rows.stride()}, and {tuple(weight.shape)} {weight.dtype}"
        )
    if not num_rows:
        return
    block_m = tile.block_m(num_rows)
    if norm is not None and block_m >= tile.norm_apart_from and tile.split:
        stream, norm = Stream(rms_norm(stream, norm, tile.warps)), None
        rows = stream.rows
    tile = tile.fitted(block_m, weight.element_size(), paired)
    parts = stream.sumsq if norm is not None else None
    launch.launch(
        kernel,
        (-(-num_rows // block_m), num_tiles),
        num_warps=tile.warps,
        num_stages=tile.stages,
        x_ptr=rows,
        x_stride=rows.stride(0),
        num_rows=num_rows,
        w_ptr=weight,
        norm_ptr=None if norm is None else norm.weight,
        eps=0.0 if norm is None else norm.eps,
        sumsq_ptr=parts,
        num_parts=0 if parts is None else parts.shape[1],
        K=width,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLIT=tile.split,
        NORM=norm is not None,
        SUMSQ=parts is not None,
        PREFETCH=min(tile.prefetch, width) if launch.pdl_enabled() else 0,
        WARPS=tile.warps,
        **arguments,
    )

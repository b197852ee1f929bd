"""The products of `skinny_gemm` for any number of rows: more than its kernels take at once go in groups.

Each group reads the weight again, from the L2 cache where it fits there. That is the price of a prompt: a chunk of 256
rows is two groups. A row's bits do not depend on its group.
"""

from collections.abc import Callable
from typing import Any

import torch

from slipstream.kernels.cuda import skinny_gemm
from slipstream.kernels.cuda.launch import MAX_ROWS
from slipstream.kernels.cuda.skinny_gemm import CudaWeight
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Norm, Stream


def norm_linear(stream: Stream, norm: Norm | None, weight: CudaWeight) -> torch.Tensor:
    """As the op: [M, N]."""
    stream = _aligned(stream)

    def group(rows: slice) -> tuple[torch.Tensor]:
        return (skinny_gemm.norm_linear(_part(stream, rows), norm, weight),)

    return _in_groups(stream.rows.shape[0], group)[0]


def linear_add(x: torch.Tensor, weight: CudaWeight, stream: Stream) -> Stream:
    """As the op, with the sums of squares of the new rows."""
    x = _aligned(Stream(x)).rows

    def group(rows: slice) -> tuple[Any, ...]:
        made = skinny_gemm.linear_add(x[rows], weight, Stream(stream.rows[rows]))
        return made.rows, made.sumsq

    return Stream(*_in_groups(x.shape[0], group))


def norm_gate_up(stream: Stream, norm: Norm, weight: CudaWeight) -> torch.Tensor:
    """As the op: [M, I]."""
    stream = _aligned(stream)

    def group(rows: slice) -> tuple[torch.Tensor]:
        return (skinny_gemm.norm_gate_up(_part(stream, rows), norm, weight),)

    return _in_groups(stream.rows.shape[0], group)[0]


def norm_qkv(
    stream: Stream,
    norm: Norm | None,
    weight: CudaWeight,
    heads: Heads,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    sink: KVSink | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As the op; a norm of single heads is a ValueError."""
    stream = _aligned(stream)

    def group(rows: slice) -> tuple[torch.Tensor, ...]:
        cells = None if sink is None else KVSink(sink.cache, sink.write_index[rows])
        made = skinny_gemm.norm_qkv(
            _part(stream, rows), norm, weight, heads, cos[rows], sin[rows], q_norm, k_norm, cells
        )
        return tuple(one for one in made if one is not None)

    q, *kv = _in_groups(stream.rows.shape[0], group)
    return (q, kv[0], kv[1]) if kv else (q, None, None)


def _aligned(stream: Stream) -> Stream:
    """The kernels read 16 bytes at a time: rows that begin elsewhere (slices of wider ones) are copied."""
    rows = stream.rows
    fits = rows.stride(-1) == 1 and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0
    return stream if fits else Stream(rows.clone(memory_format=torch.contiguous_format), stream.sumsq)


def _part(stream: Stream, rows: slice) -> Stream:
    return Stream(stream.rows[rows], None if stream.sumsq is None else stream.sumsq[rows])


def _in_groups(num_rows: int, group: Callable[[slice], tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """What `group` makes of every slice of at most MAX_ROWS rows, put together."""
    made = group(slice(0, MAX_ROWS))
    if num_rows <= MAX_ROWS:
        return list(made)
    whole = [one.new_empty(num_rows, *one.shape[1:]) for one in made]
    for start in range(0, num_rows, MAX_ROWS):
        if start:
            made = group(slice(start, start + MAX_ROWS))
        for place, one in zip(whole, made, strict=True):
            place[start : start + MAX_ROWS] = one
    return whole

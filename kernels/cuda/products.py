"""The products of `skinny_gemm` for rows that lie anywhere: its kernels read 16 bytes at a time."""

import torch

from slipstream.kernels.cuda import skinny_gemm
from slipstream.kernels.cuda.skinny_gemm import CudaWeight
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Norm, Stream


def norm_linear(stream: Stream, norm: Norm | None, weight: CudaWeight) -> torch.Tensor:
    """As the op: [M, N]."""
    return skinny_gemm.norm_linear(_aligned(stream), norm, weight)


def linear_add(x: torch.Tensor, weight: CudaWeight, stream: Stream) -> Stream:
    """As the op, with the sums of squares of the new rows."""
    return skinny_gemm.linear_add(_aligned(Stream(x)).rows, weight, stream)


def norm_gate_up(stream: Stream, norm: Norm, weight: CudaWeight) -> torch.Tensor:
    """As the op: [M, I]."""
    return skinny_gemm.norm_gate_up(_aligned(stream), norm, weight)


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
    return skinny_gemm.norm_qkv(_aligned(stream), norm, weight, heads, cos, sin, q_norm, k_norm, sink)


def _aligned(stream: Stream) -> Stream:
    """Rows that begin elsewhere than at multiples of 16 bytes (slices of wider ones) are copied."""
    rows = stream.rows
    fits = rows.stride(-1) == 1 and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0
    return stream if fits else Stream(rows.clone(memory_format=torch.contiguous_format), stream.sumsq)

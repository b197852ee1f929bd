"""The fused matrix products of a decoder layer: what the ops of the same name do, in CUDA C++.

Every op raises ValueError for what the kernel does not do.
"""

from collections.abc import Iterator

import torch

from slipstream.kernels.cuda import cluster_launch, int4_launch, prompt_launch, wide_launch
from slipstream.kernels.cuda.launch import MAX_ROWS, Epilogue, Override, Params, launch
from slipstream.kernels.cuda.pack import PackedWeight, RowOrder
from slipstream.kernels.int4 import Int4Weight
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Norm, Stream

CudaWeight = PackedWeight | Int4Weight
_AS_PLANNED = Override()


def norm_linear(
    stream: Stream, norm: Norm | None, weight: CudaWeight, *, override: Override = _AS_PLANNED
) -> torch.Tensor:
    """y = norm(x) W^T: [M, N], as `slipstream.kernels.norm_linear.norm_linear`."""
    params = _params(stream.rows, weight, RowOrder.ROWS, stream, norm)
    rows, n = stream.rows.shape[0], weight.shape[0]
    out = stream.rows.new_empty(rows, n)
    params.out, params.N = out.data_ptr(), n
    if rows:
        _run(weight, Epilogue.STORE, norm is not None, params, _device(out), override)
    return out


def linear_add(x: torch.Tensor, weight: CudaWeight, stream: Stream, *, override: Override = _AS_PLANNED) -> Stream:
    """The stream with x W^T added and its sums of squares in parts of 16, as `slipstream.kernels.linear_add`."""
    params = _params(x, weight, RowOrder.ROWS, None, None)
    rows, n = x.shape[0], weight.shape[0]
    _check(stream.rows.shape == (rows, n), f"stream {tuple(stream.rows.shape)}", f"[{rows}, {n}]")
    _check(stream.rows.dtype == torch.bfloat16 and stream.rows.stride(-1) == 1, "stream", "bf16, rows contiguous")
    out = stream.rows.new_empty(rows, n)
    sumsq = torch.empty(rows, -(-n // 16), dtype=torch.float32, device=x.device)
    params.residual, params.residual_stride = stream.rows.data_ptr(), stream.rows.stride(0)
    params.out, params.sumsq_out, params.N = out.data_ptr(), sumsq.data_ptr(), n
    if rows:
        _run(weight, Epilogue.ADD, False, params, _device(out), override)
    return Stream(out, sumsq)


def norm_gate_up(stream: Stream, norm: Norm, weight: CudaWeight, *, override: Override = _AS_PLANNED) -> torch.Tensor:
    """silu(g) * u with [g; u] = norm(x) W^T: [M, I], as `slipstream.kernels.norm_gate_up`."""
    params = _params(stream.rows, weight, RowOrder.GATE_UP, stream, norm)
    rows, n = stream.rows.shape[0], weight.shape[0] // 2
    out = stream.rows.new_empty(rows, n)
    params.out, params.N = out.data_ptr(), n
    if rows:
        _run(weight, Epilogue.GATE_UP, True, params, _device(out), override)
    return out


def norm_qkv(
    stream: Stream,
    norm: Norm | None,
    weight: CudaWeight,
    heads: Heads,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    sink: KVSink | None = None,
    *,
    override: Override = _AS_PLANNED,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Rotated queries, keys and values, as `slipstream.kernels.norm_qkv`; norms of single heads are not done here."""
    _check(q_norm is None and k_norm is None, "a norm of single heads", "none (the Triton kernel has it)")
    params = _params(stream.rows, weight, RowOrder.HEADS, stream, norm)
    rows, total = stream.rows.shape[0], heads.q + 2 * heads.kv
    _check(
        weight.shape[0] == total * heads.dim and _head_dim(weight) == heads.dim,
        f"weight of {weight.shape[0]} rows in heads of {_head_dim(weight)}",
        f"{total * heads.dim} in heads of {heads.dim}",
    )
    for name, angles in (("cos", cos), ("sin", sin)):
        _check(
            angles.shape == (rows, heads.dim) and angles.dtype == torch.bfloat16 and angles.stride(-1) == 1,
            f"{name} {angles.dtype} {tuple(angles.shape)}",
            f"bf16 [{rows}, {heads.dim}], rows contiguous",
        )
    _check(rows == 0 or cos.stride(0) == sin.stride(0), "cos and sin of unequal strides", "the same layout")
    q = stream.rows.new_empty(rows, heads.q, heads.dim)
    k = v = None
    if sink is None:
        k, v = (stream.rows.new_empty(rows, heads.kv, heads.dim) for _ in range(2))
        params.out_k, params.out_v, params.kv_stride = k.data_ptr(), v.data_ptr(), heads.kv * heads.dim
    else:
        cache = sink.cache
        _check(
            cache.dtype == torch.bfloat16 and cache.is_contiguous() and cache.shape[2:] == (2, heads.kv, heads.dim),
            f"cache {cache.dtype} {tuple(cache.shape)}",
            f"bf16 [blocks, block, 2, {heads.kv}, {heads.dim}], contiguous",
        )
        index = sink.write_index
        _check(
            index.dtype == torch.int64 and index.shape == (rows,) and index.is_contiguous(),
            f"write_index {index.dtype} {tuple(index.shape)}",
            f"int64 [{rows}], contiguous",
        )
        params.out_k, params.kv_stride = cache.data_ptr(), cache.stride(1)
        params.out_v = cache.data_ptr() + cache.stride(2) * cache.element_size()
        params.write_index = index.data_ptr()
    params.cos, params.sin, params.angle_stride = cos.data_ptr(), sin.data_ptr(), cos.stride(0)
    params.out, params.N = q.data_ptr(), weight.shape[0]
    params.q_heads, params.kv_heads, params.head_dim = heads.q, heads.kv, heads.dim
    if rows:
        _run(weight, Epilogue.QKV, norm is not None, params, _device(q), override)
    return q, k, v


def _params(x: torch.Tensor, weight: CudaWeight, order: RowOrder, stream: Stream | None, norm: Norm | None) -> Params:
    """x, the weight and the norm in front."""
    problem = _unsupported(x, weight)
    if problem:
        raise ValueError(problem)
    params = Params(x=x.data_ptr(), x_stride=_row_stride(x), M=x.shape[0], K=x.shape[1])
    if isinstance(weight, Int4Weight):
        half = {RowOrder.ROWS: 16, RowOrder.GATE_UP: weight.num_rows // 2}.get(order, weight.half)
        _check(weight.half == half, f"blocks of rows {weight.half} apart", f"{half}, for {order.value}")
    else:
        _check(weight.order is order, f"rows packed in order {weight.order.value}", order.value)
        params.weight, params.counter = weight.data.data_ptr(), weight.counter.data_ptr()
    params.inverse_width = 1 / x.shape[1]
    if norm is not None:
        _check(
            norm.weight.shape == (x.shape[1],) and norm.weight.dtype == torch.bfloat16 and norm.weight.is_contiguous(),
            f"norm weight {norm.weight.dtype} {tuple(norm.weight.shape)}",
            f"bf16 [{x.shape[1]}], contiguous",
        )
        params.norm_weight, params.eps = norm.weight.data_ptr(), norm.eps
        if stream is not None and stream.sumsq is not None:
            sumsq = stream.sumsq
            _check(
                sumsq.dtype == torch.float32 and sumsq.is_contiguous() and sumsq.shape[0] == x.shape[0],
                f"sumsq {sumsq.dtype} {tuple(sumsq.shape)}",
                f"fp32 [{x.shape[0]}, parts], contiguous",
            )
            params.sumsq_in, params.num_sumsq = sumsq.data_ptr(), sumsq.shape[1]
    return params


def _run(weight: CudaWeight, epilogue: Epilogue, norm: bool, params: Params, device: int, override: Override) -> None:
    if isinstance(weight, Int4Weight):
        _check(
            norm == int4_launch.has_norm(epilogue),
            f"a product {'behind a' if norm else 'without a'} norm over INT4 weights",
            "the other (a norm can run before it by itself)",
        )
        for group in _groups(epilogue, params):
            int4_launch.launch(epilogue, weight, group, device, override)
        return
    for group in _groups(epilogue, params):
        cut, prompt = override.wide, override.prompt
        free = cut is None and override.variant is None and override.parts is None
        if prompt is None and free:
            prompt = prompt_launch.sharing_for(epilogue, group, device)
        if cut is None and free and not prompt:
            cut = cluster_launch.cut_for(epilogue, norm, group, device)
            cut = cut or wide_launch.cut_for(epilogue, norm, group, device)
        if prompt:
            prompt_launch.launch(epilogue, norm, group, device, prompt, override)
        elif isinstance(cut, cluster_launch.Cut):
            cluster_launch.launch(epilogue, norm, group, device, cut, override)
        elif cut:
            wide_launch.launch(epilogue, norm, group, device, cut, override)
        else:
            launch(epilogue, norm, group, device, override)


def _groups(epilogue: Epilogue, params: Params) -> Iterator[Params]:
    """`params` for MAX_ROWS rows at a time: each group writes where its rows belong, and reads the weight again."""
    strides = {
        "x": 2 * params.x_stride,
        "sumsq_in": 4 * params.num_sumsq,
        "residual": 2 * params.residual_stride,
        "cos": 2 * params.angle_stride,
        "sin": 2 * params.angle_stride,
        "write_index": 8,
        "out": 2 * (params.q_heads * params.head_dim if epilogue is Epilogue.QKV else params.N),
        "out_k": 0 if params.write_index else 2 * params.kv_stride,
        "out_v": 0 if params.write_index else 2 * params.kv_stride,
        "sumsq_out": 4 * -(-params.N // 16),
    }
    for first in range(0, params.M, MAX_ROWS):
        group = Params.from_buffer_copy(params)
        group.M = min(MAX_ROWS, params.M - first)
        for name, stride in strides.items():
            if getattr(params, name):
                setattr(group, name, getattr(params, name) + first * stride)
        yield group


def _head_dim(weight: CudaWeight) -> int:
    return 2 * weight.half if isinstance(weight, Int4Weight) else weight.head_dim


def _unsupported(x: torch.Tensor, weight: CudaWeight) -> str:
    """Why the kernels do not take this, or nothing."""
    if x.dtype != torch.bfloat16:
        return f"x {x.dtype}; expected bf16"
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        return f"x {tuple(x.shape)}, weight {weight.shape}; expected [M, K] and [N, K]"
    if isinstance(weight, Int4Weight) and not int4_launch.takes(weight):
        return f"INT4 weight {tuple(weight.shape)}; expected K a multiple of {int4_launch.QUAD}, nothing empty"
    if x.stride(1) != 1 or _row_stride(x) % 8 or x.data_ptr() % 16:
        return "x not aligned; expected contiguous rows that begin at multiples of 16 bytes"
    return ""


def _row_stride(x: torch.Tensor) -> int:
    """Of a single row torch keeps whatever stride it had."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _check(ok: bool, found: str, expected: str) -> None:
    if not ok:
        raise ValueError(f"found {found}; expected {expected}")


def _device(x: torch.Tensor) -> int:
    return x.device.index

"""Triton kernel of `draft_input`: one program a row, embedding and feature normed side by side."""

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.squares import normalise
from slipstream.kernels.stream import Norm


@triton.jit
def _draft_input_kernel(
    ids_ptr,
    ids_stride,
    table_ptr,
    g_ptr,
    g_stride,
    e_norm_ptr,
    e_eps,
    g_norm_ptr,
    g_eps,
    out_ptr,
    normed_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)  # the whole row
    inside = k < WIDTH
    e_weight = tl.load(e_norm_ptr + k, mask=inside, other=0.0)
    g_weight = tl.load(g_norm_ptr + k, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    g = tl.load(g_ptr + m * g_stride + k, mask=inside, other=0.0)
    e = tl.load(table_ptr + tl.load(ids_ptr + m * ids_stride).to(tl.int64) * WIDTH + k, mask=inside, other=0.0)
    e32, g32 = e.to(tl.float32), g.to(tl.float32)
    e = normalise(e, tl.rsqrt(tl.sum(e32 * e32, 0) / WIDTH + e_eps), e_weight)
    g = normalise(g, tl.rsqrt(tl.sum(g32 * g32, 0) / WIDTH + g_eps), g_weight)
    tl.store(out_ptr + m * (2 * WIDTH) + k, e, mask=inside)
    tl.store(out_ptr + m * (2 * WIDTH) + WIDTH + k, g, mask=inside)
    if NORMED:
        tl.store(normed_ptr + m * WIDTH + k, g, mask=inside)


def draft_input(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    g: torch.Tensor,
    e_norm: Norm,
    g_norm: Norm,
    norm_before_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the op: (x [M, 2h], residual [M, h])."""
    num_rows, width = g.shape
    x = torch.empty((num_rows, 2 * width), dtype=g.dtype, device=g.device)
    normed = torch.empty_like(x[:, :width]) if norm_before_residual else None
    if num_rows:
        launch.launch(
            _draft_input_kernel,
            (num_rows,),
            num_warps=4 if width <= 2048 else 8,
            ids_ptr=token_ids,
            ids_stride=token_ids.stride(0),
            table_ptr=table,
            g_ptr=g,
            g_stride=g.stride(0),
            e_norm_ptr=e_norm.weight,
            e_eps=e_norm.eps,
            g_norm_ptr=g_norm.weight,
            g_eps=g_norm.eps,
            out_ptr=x,
            normed_ptr=normed,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            NORMED=normed is not None,
        )
    return x, g if normed is None else normed

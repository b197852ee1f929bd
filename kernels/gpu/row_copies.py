"""Triton kernels of `kernels.row_copies`."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch

_BLOCK = 1024  # values a program copies
_MAX_STATES = 5  # of the draft's features


def select_last(states: torch.Tensor, last_row: torch.Tensor) -> torch.Tensor:
    states = states.contiguous()
    batch, rows, hidden = states.shape
    out = states.new_empty(batch, hidden)
    launch.launch(
        _select_last_kernel,
        (batch, triton.cdiv(hidden, _BLOCK)),
        num_warps=4,
        states_ptr=states,
        last_ptr=last_row,
        out_ptr=out,
        rows=rows,
        hidden=hidden,
        BLOCK=_BLOCK,
    )
    return out


def store_features(
    states: Sequence[torch.Tensor], features: torch.Tensor, slots: torch.Tensor, last_row: torch.Tensor | None
) -> None:
    (rows, hidden), batch = states[0].shape, slots.shape[0]
    given = [state.contiguous() for state in states]
    padded: dict[str, Any] = {f"state{i}_ptr": given[i] if i < len(given) else None for i in range(_MAX_STATES)}
    launch.launch(
        _store_features_kernel,
        (batch if last_row is not None else rows, triton.cdiv(hidden, _BLOCK)),
        num_warps=4,
        **padded,
        features_ptr=features,
        slot_stride=features.stride(0),
        row_stride=features.stride(1),
        slots_ptr=slots,
        last_ptr=last_row,
        per_request=rows // batch,
        hidden=hidden,
        BLOCK=_BLOCK,
    )


@triton.jit
def _select_last_kernel(states_ptr, last_ptr, out_ptr, rows, hidden, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = b * rows + tl.load(last_ptr + b)
    value = tl.load(states_ptr + row * hidden + column, column < hidden)
    tl.store(out_ptr + b * hidden + column, value, column < hidden)


@triton.jit
def _store_features_kernel(
    state0_ptr,
    state1_ptr,
    state2_ptr,
    state3_ptr,
    state4_ptr,
    features_ptr,
    slot_stride,
    row_stride,
    slots_ptr,
    last_ptr,
    per_request,
    hidden,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, row, to_row = tl.program_id(0).to(tl.int64), tl.program_id(0).to(tl.int64), 0
    if last_ptr is not None:
        row = b * per_request + tl.load(last_ptr + b)
    else:
        b, to_row = row // per_request, row % per_request
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    to = features_ptr + tl.load(slots_ptr + b) * slot_stride + to_row * row_stride + column
    at = row * hidden + column
    tl.store(to, tl.load(state0_ptr + at, inside), inside)
    if state1_ptr is not None:
        tl.store(to + hidden, tl.load(state1_ptr + at, inside), inside)
    if state2_ptr is not None:
        tl.store(to + 2 * hidden, tl.load(state2_ptr + at, inside), inside)
    if state3_ptr is not None:
        tl.store(to + 3 * hidden, tl.load(state3_ptr + at, inside), inside)
    if state4_ptr is not None:
        tl.store(to + 4 * hidden, tl.load(state4_ptr + at, inside), inside)

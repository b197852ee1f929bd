"""Triton kernel of `all_gather` on cards: each rank's part of every row, put together on all of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.exchange import CHUNK, end_exchange, place, push, receive

if TYPE_CHECKING:
    from slipstream.kernels.gpu.peer_exchange import PeerExchange

_MOST_PROGRAMS = 256  # as in all_reduce.py


@triton.jit(do_not_specialize=["num_items", "per_row"])
def _all_gather_kernel(
    x_ptr,
    starts_ptr,
    out_ptr,
    buffers_ptr,
    epochs_ptr,
    state_ptr,
    lost_ptr,
    num_items,
    per_row,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """starts [WORLD + 1] int64: where each rank's part of a row begins in `out`, and where the row ends."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first, step = tl.program_id(0), tl.num_programs(0)
    word = tl.arange(0, CHUNK)
    total = tl.load(starts_ptr + WORLD)
    mine = tl.load(starts_ptr + RANK)
    width = tl.load(starts_ptr + RANK + 1) - mine
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    for turn in range(tl.cdiv(num_items - first, step)):
        item = first + turn * step
        row = (item // per_row).to(tl.int64)
        column = (item % per_row) * CHUNK + word
        inside = column < width
        own = tl.load(x_ptr + row * width + column, inside, other=0)
        tl.store(out_ptr + row * total + mine + column, own, inside)
        epoch = tl.load(epochs_ptr + item)
        for peer in tl.static_range(WORLD):
            if peer != RANK:
                push(
                    place(buffers_ptr, peer, RANK, item, epoch, CAPACITY, WORLD), own.to(tl.int32), epoch, inside, CARD
                )
    for turn in range(tl.cdiv(num_items - first, step)):
        item = first + turn * step
        row = (item // per_row).to(tl.int64)
        column = (item % per_row) * CHUNK + word
        epoch = tl.load(epochs_ptr + item)
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                start = tl.load(starts_ptr + rank)
                inside = column < tl.load(starts_ptr + rank + 1) - start
                source = place(buffers_ptr, RANK, rank, item, epoch, CAPACITY, WORLD)
                words = receive(source, epoch, inside, rank, state_ptr, lost_ptr, CARD)
                tl.store(out_ptr + row * total + start + column, words.to(TYPE), inside)
    tl.debug_barrier()
    for turn in range(tl.cdiv(num_items - first, step)):
        end_exchange(epochs_ptr, first + turn * step)


def all_gather(x: torch.Tensor, widths: Sequence[int], peers: "PeerExchange") -> torch.Tensor:
    """This rank's x [..., widths[own rank]] -> [..., sum of widths], the parts side by side in rank order."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # [..., n] -> [M, n]
    out = x.new_empty((rows.shape[0], sum(widths)))
    # Words of 32 bits where all parts are whole ones; else of one number each.
    per_word = 2 if x.element_size() == 2 and all(width % 2 == 0 for width in widths) else 1
    kind = torch.int16 if x.element_size() == 2 and per_word == 1 else torch.int32
    if x.element_size() not in (2, 4):
        raise ValueError(f"{x.dtype}: found {x.element_size()} bytes a number, not 2 or 4")
    starts = peers.starts_of([width // per_word for width in widths])
    per_row = max(1, triton.cdiv(max(widths) // per_word, CHUNK.value))
    together = peers.rows_together(per_row)
    for start in range(0, rows.shape[0], together):
        part = slice(start, min(rows.shape[0], start + together))
        num_items = (part.stop - start) * per_row
        launch.launch(
            _all_gather_kernel,
            (min(num_items, _MOST_PROGRAMS),),
            num_warps=8,
            x_ptr=rows[part].view(kind),
            starts_ptr=starts,
            out_ptr=out[part].view(kind),
            **peers.arguments,
            num_items=num_items,
            per_row=per_row,
            CARD=not launch.INTERPRET,
        )
    return out.view(*x.shape[:-1], -1)  # [M, sum] -> [..., sum]

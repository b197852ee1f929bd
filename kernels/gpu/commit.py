"""Triton kernel of the commits of `kernels.round_ops`: a few hundred integers, one program."""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.round_ops import now
from slipstream.kernels.round_ring import HEADER, RoundRing

if TYPE_CHECKING:
    from slipstream.kernels.round_ops import RoundTable


def commit(
    table: "RoundTable",
    slots: torch.Tensor,
    token_ids: torch.Tensor | None,
    start: torch.Tensor | None,
    num_valid: torch.Tensor | None,
    tokens: torch.Tensor,
    gate: torch.Tensor | None,
    ring: RoundRing | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted, count), [B] int64 each. Arguments as in `round_ops._commit`."""
    batch, width = tokens.shape
    accepted, count = slots.new_empty(batch), slots.new_empty(batch)
    if ring is not None and (ring.records.shape[1] < batch or ring.records.shape[2] < HEADER + width):
        raise ValueError(f"a ring of {tuple(ring.records.shape)} cannot hold {batch} requests of {width} tokens")
    _launch_one(
        _commit_kernel,
        table,
        slots,
        width,
        num_fresh_ptr=table.num_fresh,
        rows_ids_ptr=token_ids,
        rows_start_ptr=start,
        rows_valid_ptr=num_valid,
        chosen_ptr=tokens.contiguous(),
        gate_ptr=gate,
        accepted_ptr=accepted,
        count_ptr=count,
        records_ptr=ring and ring.records,
        stamps_ptr=ring and ring.stamps,
        seq_ptr=ring and ring.seq,
        counter_ptr=ring and ring.counter,
        clock_ptr=ring and ring.clock,
        depth=ring.depth if ring else 0,
        entry_stride=ring.records.stride(0) if ring else 0,
        request_stride=ring.records.stride(1) if ring else 0,
        WIDTH=width,
        HEADER=HEADER,
    )
    return accepted, count


def _launch_one(kernel: Any, table: "RoundTable", slots: torch.Tensor, width: int, **arguments: Any) -> None:
    """A kernel in which one program does all B x width values."""
    batch = slots.shape[0]
    block_b, block_k = triton.next_power_of_2(batch), triton.next_power_of_2(width)
    launch.launch(
        kernel,
        (1,),
        num_warps=1 if block_b * block_k <= 128 else 4,
        tokens_ptr=table.tokens,
        tokens_stride=table.tokens.stride(0),
        lengths_ptr=table.lengths,
        limits_ptr=table.limits,
        slots_ptr=slots,
        batch=batch,
        BB=block_b,
        BK=block_k,
        TIMER=not launch.INTERPRET,
        **arguments,
    )


@triton.jit
def _requests(slots_ptr, lengths_ptr, limits_ptr, batch, K, BB: tl.constexpr):
    """Of each request [BB]: whether it is real, slot, committed tokens, limit, usable drafts."""
    b = tl.arange(0, BB)
    real = b < batch
    slot = tl.load(slots_ptr + b, real, other=0)
    start = tl.load(lengths_ptr + slot, real, other=0)
    limit = tl.load(limits_ptr + slot, real, other=0)
    return real, slot, start, limit, tl.minimum(tl.maximum(limit - start - 1, 0), K)


@triton.jit(do_not_specialize=["batch", "depth"])
def _commit_kernel(
    tokens_ptr,
    tokens_stride,
    lengths_ptr,
    limits_ptr,
    num_fresh_ptr,
    slots_ptr,
    batch,
    rows_ids_ptr,
    rows_start_ptr,
    rows_valid_ptr,
    chosen_ptr,
    gate_ptr,
    accepted_ptr,
    count_ptr,
    records_ptr,
    stamps_ptr,
    seq_ptr,
    counter_ptr,
    clock_ptr,
    depth,
    entry_stride,
    request_stride,
    WIDTH: tl.constexpr,
    HEADER: tl.constexpr,
    BB: tl.constexpr,
    BK: tl.constexpr,
    TIMER: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    real, slot, start, limit, num_valid = _requests(slots_ptr, lengths_ptr, limits_ptr, batch, 0, BB)
    b, k = tl.arange(0, BB), tl.arange(0, BK)[None, :]
    inside = real[:, None] & (k < WIDTH)
    cell = b[:, None] * WIDTH + k  # [BB, BK]
    token = tl.load(chosen_ptr + cell, inside, other=0)
    accepted = tl.full((BB,), 0, tl.int64)
    if rows_ids_ptr is not None:
        start = tl.load(rows_start_ptr + b, real, other=0)
        num_valid = tl.load(rows_valid_ptr + b, real, other=0)
        draft = tl.load(rows_ids_ptr + cell + 1, inside & (k + 1 < WIDTH), other=-1)
        stands = (draft == token) & (k < num_valid[:, None])
        accepted = tl.min(tl.where(stands, BK, k), axis=1).to(tl.int64)  # column of the first that does not
    count = tl.maximum(tl.minimum(accepted + 1, limit - start), 0)
    if gate_ptr is not None:
        count = count * tl.load(gate_ptr + b, real, other=0)
    tl.store(accepted_ptr + b, accepted, real)
    tl.store(count_ptr + b, count, real)
    appended = inside & (k < count[:, None])
    tl.store(tokens_ptr + slot[:, None] * tokens_stride + start[:, None] + k, token, appended)
    # Padding rows all name the dummy slot and all store the same there: its length, 0.
    tl.store(lengths_ptr + slot, start + count, real)
    tl.store(num_fresh_ptr + slot, count, real)
    if seq_ptr is not None:
        index = tl.load(counter_ptr)
        place = index % depth
        entry = records_ptr + place * entry_stride + b * request_stride  # [BB]
        tl.store(entry, start, real)
        tl.store(entry + 1, num_valid, real)
        tl.store(entry + 2, accepted, real)
        tl.store(entry + 3, count, real)
        tl.store(entry[:, None] + HEADER + k, token, inside)
        began = tl.full((), 0, tl.int64)
        drafted = tl.full((), 0, tl.int64)
        if gate_ptr is None:
            began = tl.load(clock_ptr)
            drafted = tl.load(clock_ptr + 1)
        tl.store(stamps_ptr + place * 3, began)
        tl.store(stamps_ptr + place * 3 + 1, drafted)
        tl.store(stamps_ptr + place * 3 + 2, now(TIMER))
        # Every thread makes its own stores visible to the host, then all meet, then one says so.
        if TIMER:
            tl.inline_asm_elementwise("fence.acq_rel.sys; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
        tl.store(seq_ptr + place, index + 1)
        tl.store(counter_ptr, index + 1)

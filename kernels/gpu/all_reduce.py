"""Triton kernel of `all_reduce` and `all_reduce_add`: one exchange, then every rank adds all parts in rank order."""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.exchange import CHUNK, end_exchange, place, push, receive
from slipstream.kernels.stream import Stream

if TYPE_CHECKING:
    from slipstream.kernels.gpu.peer_exchange import PeerExchange

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Programs that wait for a peer's must all be on the card at once: each card that is served has room for these.
_MOST_PROGRAMS = 256
_WARPS = 8  # a thread waits for one word


@triton.jit
def _low(word, TYPE: tl.constexpr):
    """First number of each 32-bit word, in fp32: its only one where TYPE is fp32."""
    if tl.float32 == TYPE:
        number = word.to(tl.float32, bitcast=True)
    else:
        number = (word & 0xFFFF).to(tl.uint16).to(TYPE, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _high(word, TYPE: tl.constexpr):
    """Second number of each word, in fp32; 0 where there is none."""
    if tl.float32 == TYPE:
        number = tl.zeros(word.shape, tl.float32)
    else:
        number = ((word >> 16) & 0xFFFF).to(tl.uint16).to(TYPE, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _rounded(number, TYPE: tl.constexpr):
    return number.to(TYPE).to(tl.float32)


@triton.jit
def _packed(low, high, TYPE: tl.constexpr):
    """Numbers that are rounded already -> words."""
    if tl.float32 == TYPE:
        word = low.to(tl.int32, bitcast=True)
    else:
        first = low.to(TYPE).to(tl.uint16, bitcast=True).to(tl.int32)
        second = high.to(TYPE).to(tl.uint16, bitcast=True).to(tl.int32)
        word = first | (second << 16)
    return word


@triton.jit(do_not_specialize=["num_items"])
def _all_reduce_kernel(
    partial_ptr,
    residual_ptr,
    out_ptr,
    sumsq_ptr,
    buffers_ptr,
    epochs_ptr,
    state_ptr,
    lost_ptr,
    num_items,
    WORDS: tl.constexpr,
    PER_ROW: tl.constexpr,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    TYPE: tl.constexpr,
    CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """An item is a part of a row: all that is done with it does not depend on how many there are."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first, step = tl.program_id(0), tl.num_programs(0)
    word = tl.arange(0, CHUNK)
    if WORLD > 1:
        for turn in range(tl.cdiv(num_items - first, step)):
            item = first + turn * step
            column = (item % PER_ROW) * CHUNK + word
            inside = column < WORDS
            own = tl.load(partial_ptr + (item // PER_ROW).to(tl.int64) * WORDS + column, inside, other=0)
            epoch = tl.load(epochs_ptr + item)
            for peer in tl.static_range(WORLD):
                if peer != RANK:
                    push(place(buffers_ptr, peer, RANK, item, epoch, CAPACITY, WORLD), own, epoch, inside, CARD)
    for turn in range(tl.cdiv(num_items - first, step)):
        item = first + turn * step
        row = (item // PER_ROW).to(tl.int64)
        column = (item % PER_ROW) * CHUNK + word
        inside = column < WORDS
        at = row * WORDS + column
        own = tl.load(partial_ptr + at, inside, other=0)
        residual = tl.zeros((CHUNK,), tl.int32)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + at, inside, other=0)
        epoch = tl.full((), 0, tl.int32)
        if WORLD > 1:
            epoch = tl.load(epochs_ptr + item)
        low = tl.zeros((CHUNK,), tl.float32)
        high = tl.zeros((CHUNK,), tl.float32)
        for rank in tl.static_range(WORLD):
            words = own
            if rank != RANK:
                source = place(buffers_ptr, RANK, rank, item, epoch, CAPACITY, WORLD)
                words = receive(source, epoch, inside, rank, state_ptr, lost_ptr, CARD)
            if rank == 0:  # not 0 + x, which is another number where x is -0
                low, high = _low(words, TYPE), _high(words, TYPE)
            else:
                low, high = low + _low(words, TYPE), high + _high(words, TYPE)
        low, high = _rounded(low, TYPE), _rounded(high, TYPE)
        if residual_ptr is not None:  # the sum is rounded, then what it is added to
            low = _rounded(low + _low(residual, TYPE), TYPE)
            high = _rounded(high + _high(residual, TYPE), TYPE)
        tl.store(out_ptr + at, _packed(low, high, TYPE), inside)
        if sumsq_ptr is not None:
            squares = tl.where(inside, low * low + high * high, 0.0)
            tl.store(sumsq_ptr + row * PER_ROW + item % PER_ROW, tl.sum(squares, 0))
    if WORLD > 1:
        tl.debug_barrier()
        for turn in range(tl.cdiv(num_items - first, step)):
            end_exchange(epochs_ptr, first + turn * step)


def all_reduce(partial: torch.Tensor, peers: "PeerExchange") -> torch.Tensor:
    """As the op."""
    rows = partial.reshape(-1, partial.shape[-1])  # [..., n] -> [M, n]
    return _run(rows, None, peers, sumsq=False).rows.view(partial.shape)


def all_reduce_add(partial: torch.Tensor, stream: Stream, peers: "PeerExchange | None") -> Stream:
    """As the op; with sums of squares of the new rows. peers: None where `partial` is the sum already."""
    return _run(partial, stream.rows, peers, sumsq=True)


def _run(partial: torch.Tensor, residual: torch.Tensor | None, peers: "PeerExchange | None", sumsq: bool) -> Stream:
    num_rows, width = partial.shape
    per_word = 4 // partial.element_size()
    if partial.dtype not in _TYPES or width % per_word:
        raise ValueError(f"rows of {width} {partial.dtype}: found an odd width, or a dtype that is not summed")
    if residual is not None and (residual.shape != partial.shape or residual.dtype != partial.dtype):
        raise ValueError(f"a stream of {tuple(residual.shape)} {residual.dtype} for parts {tuple(partial.shape)}")
    per_row = triton.cdiv(width // per_word, CHUNK.value)
    out = torch.empty_like(partial, memory_format=torch.contiguous_format)
    squares = partial.new_empty((num_rows, per_row), dtype=torch.float32) if sumsq else None
    # Not more rows at a time than there is room for at the peers.
    together = max(1, num_rows) if peers is None else peers.rows_together(per_row)
    for start in range(0, num_rows, together):
        stop = min(num_rows, start + together)
        num_items = (stop - start) * per_row
        exchange: dict[str, Any] = dict.fromkeys(("buffers_ptr", "epochs_ptr", "state_ptr", "lost_ptr"))
        exchange |= {"CAPACITY": 1, "RANK": 0, "WORLD": 1}
        if peers is not None:
            exchange = peers.arguments
        launch.launch(
            _all_reduce_kernel,
            (min(num_items, _MOST_PROGRAMS),),
            num_warps=_WARPS,
            partial_ptr=_words(partial[start:stop]),
            residual_ptr=None if residual is None else _words(residual[start:stop]),
            out_ptr=_words(out[start:stop]),
            sumsq_ptr=None if squares is None else squares[start:stop],
            **exchange,
            num_items=num_items,
            WORDS=width // per_word,
            PER_ROW=per_row,
            TYPE=_TYPES[partial.dtype],
            CARD=not launch.INTERPRET,
        )
    return Stream(out, squares)


def _words(rows: torch.Tensor) -> torch.Tensor:
    """[M, n] -> [M, n / 2] (n of fp32) int32, without a copy but of rows that do not lie side by side."""
    return rows.contiguous().view(torch.int32)

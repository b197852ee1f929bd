"""What ranks on different cards tell each other: words that carry their own sign of being there.

Every 32-bit word of data travels in 64 bits together with the number of its exchange (its epoch): one store writes
both, and whoever reads the right epoch has the data with it. So there is no flag behind the data, and no fence.

A rank pushes its words into every peer's memory and then waits for theirs in its own. There are two places for each
word, taken in turn, and no barrier behind an exchange: who has a peer's words of exchange e + 1 knows that the peer
has ended its exchange e, because a kernel starts after the one before it has ended, and so may push e + 2 to where e
was.
"""

import triton
import triton.language as tl

# Words of an item: what one program sends and receives at a time.
CHUNK = tl.constexpr(256)


@triton.jit
def place(buffers_ptr, owner, source, item, epoch, CAPACITY: tl.constexpr, WORLD: tl.constexpr):
    """Address (int64 scalar) of the words that rank `source` leaves with rank `owner`."""
    turn = (epoch & 1).to(tl.int64)
    region = ((turn * WORLD + source) * CAPACITY + item) * CHUNK
    return tl.load(buffers_ptr + owner) + region * 8


@triton.jit
def push(address, word, epoch, inside, CARD: tl.constexpr):
    """Store words [n] int32 (n: at most CHUNK) with their epoch at `address`, visible to other cards without delay."""
    value = (epoch.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
    at = address + tl.arange(0, word.shape[0]).to(tl.int64) * 8
    if CARD:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,l,r",
            [at, value, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(at.to(tl.pointer_type(tl.int64)), value, mask=inside)


# One thread waits for one word, by itself: nothing is told between threads until all have theirs. $0: the word with its
# epoch, $1: 1 where it did not come in time; $2: address, $3: epoch, $4: whether to wait at all, $5: state. Only each
# 8th look that finds nothing reads the clock and the state: neither is on the way of a word that comes.
_WAIT = tl.constexpr("""{
    .reg .pred p;
    .reg .b32 low, high, looks;
    .reg .b64 began, now, gone, limit;
    mov.b64 $0, 0;
    mov.b32 $1, 0;
    mov.b32 looks, 0;
    setp.eq.s32 p, $4, 0;
    @p bra DONE;
    mov.u64 began, %globaltimer;
LOOK:
    ld.relaxed.sys.global.b64 $0, [$2];
    mov.b64 {low, high}, $0;
    setp.eq.s32 p, high, $3;
    @p bra DONE;
    add.u32 looks, looks, 1;
    and.b32 low, looks, 7;
    setp.ne.u32 p, low, 0;
    @p bra LOOK;
    ld.relaxed.gpu.global.b64 gone, [$5+8];
    setp.ne.s64 p, gone, 0;
    @p bra LATE;
    ld.relaxed.gpu.global.b64 limit, [$5];
    mov.u64 now, %globaltimer;
    sub.s64 now, now, began;
    setp.le.s64 p, now, limit;
    @p bra LOOK;
LATE:
    mov.b32 $1, 1;
DONE:
}""")


@triton.jit
def receive(address, epoch, inside, peer, state_ptr, lost_ptr, CARD: tl.constexpr):
    """Words [n] int32, n those of `inside`, of this epoch at `address`, waited for at most state[0] nanoseconds.

    Who does not come in time is written to `lost_ptr` (host memory) as rank + 1, and to state[1]: from then on nobody
    waits, and what is returned is whatever lies there.
    """
    at = address + tl.arange(0, inside.shape[0]).to(tl.int64) * 8
    if CARD:
        value, late = tl.inline_asm_elementwise(
            _WAIT,
            "=&l,=&r,l,r,r,l",
            [at, epoch, inside.to(tl.int32), state_ptr.to(tl.int64)],
            dtype=(tl.int64, tl.int32),
            is_pure=False,
            pack=1,
        )
        is_late = late != 0
    else:  # the interpreter runs one program after the other: only ranks in other processes come later
        value = tl.load(at.to(tl.pointer_type(tl.int64)), mask=inside, other=0)
        is_late = inside & ((value >> 32).to(tl.int32) != epoch)
        looks = tl.load(state_ptr) // 100000
        while (looks > 0) & (tl.sum(is_late.to(tl.int32)) > 0):
            value = tl.load(at.to(tl.pointer_type(tl.int64)), mask=inside, other=0)
            is_late = inside & ((value >> 32).to(tl.int32) != epoch)
            looks -= 1
    nowhere = tl.zeros(inside.shape, tl.int32)  # every thread that is late says so, at the same place
    tl.store(state_ptr + 1 + nowhere, peer + 1, mask=is_late)
    tl.store(lost_ptr + nowhere, peer + 1, mask=is_late)
    return value.to(tl.int32)


@triton.jit
def end_exchange(epochs_ptr, item):
    """The epoch of an item moves on: behind a barrier (`tl.debug_barrier`), since warps wait for words by themselves.

    A warp that read an epoch which another one had moved on already would wait for words that nobody sends.
    """
    tl.store(epochs_ptr + item, tl.load(epochs_ptr + item) + 1)


@triton.jit
def sums_of_all(
    values, item, epoch, buffers_ptr, state_ptr, lost_ptr, CAPACITY: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, CARD: tl.constexpr,
):  # fmt: skip
    """The sums, in rank order, of all ranks' int64 values [n], each two words of an item: exchange `epoch` of it.

    n: at most CHUNK / 2. Whoever calls it counts the epochs, and writes down the next one when all is exchanged. Peers
    are gone through by a loop: it stands in a kernel several times, which would take minutes to compile.
    """
    n: tl.constexpr = values.shape[0]
    there = tl.arange(0, n) >= 0
    low, high = (values & 0xFFFFFFFF).to(tl.int32), (values >> 32).to(tl.int32)
    for peer in range(WORLD):
        if peer != RANK:
            address = place(buffers_ptr, peer, RANK, item, epoch, CAPACITY, WORLD)
            push(address, low, epoch, there, CARD)
            push(address + 8 * n, high, epoch, there, CARD)
    total = tl.zeros((n,), tl.int64)
    for peer in range(WORLD):
        if peer == RANK:
            total += values
        else:
            source = place(buffers_ptr, RANK, peer, item, epoch, CAPACITY, WORLD)
            low = receive(source, epoch, there, peer, state_ptr, lost_ptr, CARD)
            high = receive(source + 8 * n, epoch, there, peer, state_ptr, lost_ptr, CARD)
            total += (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    tl.debug_barrier()  # all warps have their words: a peer that sees the next epoch may take the place again
    return total


@triton.jit
def largest_of_all(
    value, item, epoch, buffers_ptr, state_ptr, lost_ptr, CAPACITY: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, CARD: tl.constexpr,
):  # fmt: skip
    """The largest of all ranks' int64 scalars: each is two words of an item; epochs as in `sums_of_all`."""
    half = tl.arange(0, 2)
    inside = half < 2
    words = tl.where(half == 0, value & 0xFFFFFFFF, value >> 32).to(tl.int32)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            push(place(buffers_ptr, peer, RANK, item, epoch, CAPACITY, WORLD), words, epoch, inside, CARD)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            source = place(buffers_ptr, RANK, peer, item, epoch, CAPACITY, WORLD)
            theirs = receive(source, epoch, inside, peer, state_ptr, lost_ptr, CARD).to(tl.int64)
            value = tl.maximum(value, tl.sum(tl.where(half == 0, theirs & 0xFFFFFFFF, theirs << 32)))
    tl.debug_barrier()
    return value

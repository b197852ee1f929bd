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
    """Store words [CHUNK] int32 with their epoch at `address`, visible to other cards without delay."""
    value = (epoch.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
    at = address + tl.arange(0, CHUNK).to(tl.int64) * 8
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


@triton.jit
def receive(address, epoch, inside, peer: tl.constexpr, state_ptr, lost_ptr, CARD: tl.constexpr):
    """Words [CHUNK] int32 of this epoch at `address`, waited for at most state[0] nanoseconds.

    Who does not come in time is written to `lost_ptr` (host memory) as rank + 1, and to state[1]: from then on nobody
    waits, and what is returned is whatever lies there.
    """
    at = (address + tl.arange(0, CHUNK).to(tl.int64) * 8).to(tl.pointer_type(tl.int64))
    value = tl.zeros((CHUNK,), tl.int64)
    status = tl.full((), 1, tl.int32)  # 1: words are missing, 2: and the time is over
    if CARD:
        limit = tl.where(tl.load(state_ptr + 1, volatile=True) == 0, tl.load(state_ptr), 0)
        began = tl.extra.cuda.globaltimer()
        while status == 1:
            value = tl.load(at, mask=inside, other=0, volatile=True)
            # Each thread reads its own clock: the reduction makes them all decide alike.
            late = tl.extra.cuda.globaltimer() - began > limit
            missing = inside & ((value >> 32).to(tl.int32) != epoch)
            status = tl.max(tl.where(missing, 1 + late.to(tl.int32), 0))
    else:  # the interpreter runs one program after the other: it would wait for ever
        value = tl.load(at, mask=inside, other=0)
        status = tl.max(tl.where(inside & ((value >> 32).to(tl.int32) != epoch), 2, 0))
    if status == 2:
        tl.store(state_ptr + 1, peer + 1)
        tl.store(lost_ptr, peer + 1)
    return value.to(tl.int32)

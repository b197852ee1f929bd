"""Top-k and top-p in Triton where each rank has a part of the vocabulary: `gpu/logit_filters.py`, summed over ranks.

No logits are exchanged. Every rank looks at its own columns alone; what it must know of the others' are numbers and
masses of tokens, integers that are added in rank order, so that all ranks see the same sums, the sums of one rank with
all columns, and take the same turns. A rank has to itself which of its tokens are kept.

1. `sum_kernel`: rows' histograms and largest scores become those of all ranks, so that all collect their candidates
   down to the same bin.
2. `choose_filtered_of_ranks`: whether all ranks' candidates suffice, and fit; the cut, of `_WAYS` keys at a time, among
   own candidates or all own columns; of the tokens that tie there, how many the ranks before have.

A row takes so many exchanges, each of at most 64 words a rank: one for the histograms, one each for the candidates and
the range of keys, up to 4 for each of top-k and top-p (8 where logits are fp32), one where ties are cut.
"""

import triton
import triton.language as tl

from slipstream.kernels.gpu.exchange import CHUNK, end_exchange, place, push, receive, sums_of_all
from slipstream.kernels.gpu.gumbel_noise import gumbel, ordered, pack
from slipstream.kernels.gpu.logit_filters import (
    NO_KEY,
    NUM_BINS,
    id_of_tie,
    key_range,
    mass_of,
    row_parameters,
    tokens_at,
    weigh_above,
)

ITEMS = NUM_BINS.value // (2 * CHUNK.value) + 1  # of a row: of its histogram, and one for all other exchanges
_WAYS = tl.constexpr(16)  # keys that a search looks at together
MOST_RANKS = 8  # each has a place for numbers of its own among those of an exchange
_RANKS = tl.constexpr(MOST_RANKS)


@triton.jit
def sum_kernel(
    logits_ptr,
    row_stride,
    vocab,
    whole_vocab,
    per_request,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    histogram_ptr,
    tile_max_ptr,
    tiles,
    TILES: tl.constexpr,
    buffers_ptr,
    epochs_ptr,
    state_ptr,
    lost_ptr,
    ROOM: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ITEMS: tl.constexpr,
    CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: rows. A filtered row's histogram and largest score (of its first tile) become those of all ranks."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    _at, _temperature, _top_k, _top_p, is_filtered = row_parameters(
        row, per_request, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, whole_vocab, True
    )
    if is_filtered:
        _sum_histograms(
            histogram_ptr + row * NUM_BINS, tile_max_ptr + row * tiles, tiles, row * ITEMS, buffers_ptr, epochs_ptr,
            state_ptr, lost_ptr, TILES, ROOM, RANK, WORLD, CARD,
        )  # fmt: skip


@triton.jit
def _sum_histograms(
    histogram_ptr, tile_max_ptr, tiles, first_item, buffers_ptr, epochs_ptr, state_ptr, lost_ptr, TILES: tl.constexpr,
    CAPACITY: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, CARD: tl.constexpr,
):  # fmt: skip
    """Two counts are a word: 65,535 stand for themselves and for more, on all ranks alike.

    A bin of more is counted too low, so that other tokens than needed may be candidates: that is found out.
    """
    every = tl.arange(0, TILES)
    tile_max = tl.load(tile_max_ptr + every, every < tiles, other=-float("inf"))
    largest = ordered(tl.max(tile_max)).to(tl.int64)
    pair = tl.arange(0, CHUNK)
    there = pair >= 0
    for i in tl.static_range(NUM_BINS // (2 * CHUNK)):
        at = histogram_ptr + 2 * (i * CHUNK + pair)
        word = tl.minimum(tl.load(at), 65535) | (tl.minimum(tl.load(at + 1), 65535) << 16)
        epoch = tl.load(epochs_ptr + first_item + i)
        for peer in tl.static_range(WORLD):
            if peer != RANK:
                push(place(buffers_ptr, peer, RANK, first_item + i, epoch, CAPACITY, WORLD), word, epoch, there, CARD)
    # The largest of each rank at a place of its own, so that a sum tells all.
    item = first_item + NUM_BINS // (2 * CHUNK)
    epoch = tl.load(epochs_ptr + item)
    rank = tl.arange(0, _RANKS)
    of_all = sums_of_all(
        tl.where(rank == RANK, largest, 0), item, epoch, buffers_ptr, state_ptr, lost_ptr, CAPACITY, RANK, WORLD, CARD
    )
    for i in tl.static_range(NUM_BINS // (2 * CHUNK)):
        at = histogram_ptr + 2 * (i * CHUNK + pair)
        low, high = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int32)
        epoch = tl.load(epochs_ptr + first_item + i)
        for peer in tl.static_range(WORLD):
            if peer == RANK:
                low += tl.minimum(tl.load(at), 65535)
                high += tl.minimum(tl.load(at + 1), 65535)
            else:
                source = place(buffers_ptr, RANK, peer, first_item + i, epoch, CAPACITY, WORLD)
                word = receive(source, epoch, there, peer, state_ptr, lost_ptr, CARD)
                low += word & 0xFFFF
                high += (word >> 16) & 0xFFFF
        tl.debug_barrier()  # all have read their counts, too
        tl.store(at, low)
        tl.store(at + 1, high)
        end_exchange(epochs_ptr, first_item + i)
    end_exchange(epochs_ptr, item)
    bits = tl.max(tl.where(rank < WORLD, of_all, -(2**63))).to(tl.int32)
    tl.store(tile_max_ptr, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))


@triton.jit
def choose_filtered_of_ranks(
    logits_ptr, width, first_id, temperature, top_k, top_p, key, largest, total, count, candidate_ptr, id_ptr,
    item, epoch, buffers_ptr, state_ptr, lost_ptr,
    CAPACITY: tl.constexpr, SHIFT: tl.constexpr, CHUNK_OF_RANKS: tl.constexpr,
    ROOM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, CARD: tl.constexpr,
):  # fmt: skip
    """The best kept (score, id) of this rank's `width` columns, packed, and the item's next epoch.

    total, count: mass and candidates of this rank's columns; largest: of all ranks'.
    """
    lowest = tl.full((), NO_KEY + 1, tl.int64)
    fits = tl.minimum(count, CAPACITY)
    _number, mass = weigh_above(lowest, fits, candidate_ptr, temperature, largest, SHIFT, CHUNK_OF_RANKS)
    slot = tl.arange(0, 4)
    own = tl.where(slot == 0, count.to(tl.int64), tl.where(slot == 1, (count > CAPACITY).to(tl.int64), 0))
    own = tl.where(slot == 2, mass, tl.where(slot == 3, total, own))
    sums = sums_of_all(own, item, epoch, buffers_ptr, state_ptr, lost_ptr, ROOM, RANK, WORLD, CARD)
    epoch += 1
    number, too_many = tl.sum(tl.where(slot == 0, sums, 0)), tl.sum(tl.where(slot == 1, sums, 0))
    mass, total = tl.sum(tl.where(slot == 2, sums, 0)), tl.sum(tl.where(slot == 3, sums, 0))
    if top_k > 0:
        suffices = number >= top_k
    else:
        suffices = mass.to(tl.float64) >= top_p * total.to(tl.float64)
    is_whole = (suffices & (too_many == 0)) == 0
    if is_whole:
        source_ptr, count, mass = logits_ptr, tl.full((), 0, tl.int32) + width, total
    else:
        source_ptr = candidate_ptr
    own_lowest, own_highest = key_range(count, source_ptr, temperature, SHIFT, CHUNK_OF_RANKS)
    slot = tl.arange(0, 4 * _RANKS)  # each rank's lowest, highest and number
    own = tl.where(slot == RANK, own_lowest, tl.where(slot == _RANKS + RANK, own_highest, 0))
    own = tl.where(slot == 2 * _RANKS, count.to(tl.int64), own)
    sums = sums_of_all(own, item, epoch, buffers_ptr, state_ptr, lost_ptr, ROOM, RANK, WORLD, CARD)
    epoch += 1
    cut = tl.min(tl.where(slot < WORLD, sums, 2**31))
    end = tl.max(tl.where((slot >= _RANKS) & (slot < _RANKS + WORLD), sums, NO_KEY)) + 1
    number = tl.sum(tl.where(slot == 2 * _RANKS, sums, 0))
    above_number, above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if top_k > 0:
        nothing = tl.full((), 0.0, tl.float64)
        cut, number, mass, above_number, above, epoch = _narrow(
            cut, end, number, mass, top_k, nothing, count, source_ptr, temperature, largest, item, epoch, buffers_ptr,
            state_ptr, lost_ptr, SHIFT, CHUNK_OF_RANKS, ROOM, RANK, WORLD, CARD,
        )  # fmt: skip
        total = mass
    last = tl.full((), -1, tl.int32) + width  # of own tokens that tie at the cut, columns up to this are kept
    if top_p < 1:
        wanted = top_p * total.to(tl.float64)
        no_number = tl.full((), 0, tl.int64)
        cut, number, mass, above_number, above, epoch = _narrow(
            cut, end, number, mass, no_number, wanted, count, source_ptr, temperature, largest, item, epoch,
            buffers_ptr, state_ptr, lost_ptr, SHIFT, CHUNK_OF_RANKS, ROOM, RANK, WORLD, CARD,
        )  # fmt: skip
        ties = number - above_number
        weight = (mass - above) // tl.maximum(ties, 1)
        kept_ties = tl.ceil((wanted - above.to(tl.float64)) / tl.maximum(weight, 1).to(tl.float64)).to(tl.int64)
        if kept_ties < ties:
            at_cut, _mass_there = weigh_above(cut, count, source_ptr, temperature, largest, SHIFT, CHUNK_OF_RANKS)
            over, _mass_over = weigh_above(cut + 1, count, source_ptr, temperature, largest, SHIFT, CHUNK_OF_RANKS)
            own_ties = at_cut - over
            of_rank = tl.arange(0, _RANKS)
            all_ties = sums_of_all(
                tl.where(of_rank == RANK, own_ties, 0), item, epoch, buffers_ptr, state_ptr, lost_ptr, ROOM, RANK,
                WORLD, CARD,
            )  # fmt: skip
            epoch += 1
            left = kept_ties - tl.sum(tl.where(of_rank < RANK, all_ties, 0))  # lower ids are those of ranks before
            if left <= 0:
                last = tl.full((), -1, tl.int32)
            elif left < own_ties:
                if is_whole:
                    last = id_of_tie(
                        left, width, cut, count, source_ptr, id_ptr, temperature, True, SHIFT, CHUNK_OF_RANKS
                    )
                else:
                    last = id_of_tie(
                        left, width, cut, count, source_ptr, id_ptr, temperature, False, SHIFT, CHUNK_OF_RANKS
                    )
    best = tl.full((CHUNK_OF_RANKS,), -(2**63), tl.int64)
    start = tl.full((), 0, tl.int32)
    while start < count:
        at, inside, score_key, score = tokens_at(start, count, source_ptr, temperature, SHIFT, CHUNK_OF_RANKS)
        columns = tl.where(is_whole, at, tl.load(id_ptr + at, inside & (is_whole == 0), other=0))
        kept = inside & ((score_key > cut) | ((score_key == cut) & (columns <= last)))
        if tl.max(kept.to(tl.int32)) > 0:
            ids = columns + first_id
            best = tl.maximum(best, tl.where(kept, pack(score + gumbel(key, ids), ids), -(2**63)))
        start += CHUNK_OF_RANKS
    return tl.max(best), epoch


@triton.jit
def _narrow(
    low, high, number, mass, wanted_number, wanted_mass, count, source_ptr, temperature, largest, item, epoch,
    buffers_ptr, state_ptr, lost_ptr, SHIFT: tl.constexpr, CHUNK_OF_RANKS: tl.constexpr,
    ROOM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, CARD: tl.constexpr,
):  # fmt: skip
    """`logit_filters._bisect` over all ranks' tokens: `_WAYS` keys at a time, for a step is an exchange.

    Returns what `_bisect` does, and the item's next epoch.
    """
    above_number, above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    way = tl.arange(0, _WAYS)
    while high - low > 1:
        step = (high - low + _WAYS - 1) // _WAYS
        bounds = low + step * (way + 1).to(tl.int64)
        own_number = tl.zeros((CHUNK_OF_RANKS, _WAYS), tl.int32)
        own_mass = tl.zeros((CHUNK_OF_RANKS, _WAYS), tl.int64)
        start = tl.full((), 0, tl.int32)
        while start < count:
            _at, inside, score_key, score = tokens_at(start, count, source_ptr, temperature, SHIFT, CHUNK_OF_RANKS)
            is_above = inside[:, None] & (score_key[:, None] >= bounds[None, :])  # [CHUNK_OF_RANKS, _WAYS]
            own_number += is_above.to(tl.int32)
            own_mass += tl.where(is_above, mass_of(score, largest)[:, None], 0)
            start += CHUNK_OF_RANKS
        both = tl.join(tl.sum(own_number, axis=0).to(tl.int64), tl.sum(own_mass, axis=0))  # [_WAYS] twice -> [_WAYS, 2]
        both = sums_of_all(
            both.reshape(2 * _WAYS), item, epoch, buffers_ptr, state_ptr, lost_ptr, ROOM, RANK, WORLD, CARD
        )
        epoch += 1
        numbers, weights = both.reshape(_WAYS, 2).split()  # [2 * _WAYS] -> [_WAYS] twice
        is_enough = (bounds < high) & (numbers >= wanted_number) & (weights.to(tl.float64) >= wanted_mass)
        passed = tl.sum(is_enough.to(tl.int32))  # the first ones: fewer tokens lie above a higher key
        if passed > 0:
            number = tl.sum(tl.where(way == passed - 1, numbers, 0))
            mass = tl.sum(tl.where(way == passed - 1, weights, 0))
        low += step * passed
        if low + step < high:
            high = low + step
            above_number = tl.sum(tl.where(way == passed, numbers, 0))
            above = tl.sum(tl.where(way == passed, weights, 0))
    return low, number, mass, above_number, above, epoch

"""Top-k and top-p in Triton: the cut of a row by exact search, first among few tokens that surely hold what is kept.

A token's mass is exp(score - largest score) as an integer, in units of 2^-40: integer sums are exact in any order, so
that tiles, candidates and whole rows give the same sums. The tokens kept are those of the twin: top-k every token that
ties with the k-th; top-p, over what top-k leaves, every token whose predecessors (larger scores; of equals, lower ids)
weigh less than top_p of the whole.

1. `note_tile`: a histogram of every row's scores (equal bins, counted modulo their number: only those near the largest
   score are looked at), and each tile's largest score.
2. `collect`: from the histogram, a bin below which nothing can be kept; the tokens at or above it, in any order.
3. `choose_filtered`: checks that the candidates suffice; searches the cut among them, or in the whole row where they do
   not or are too many; the best of the kept tokens, noise included.
"""

import triton
import triton.language as tl

from slipstream.kernels.gpu.gumbel_noise import gumbel, ordered, pack

NUM_BINS = tl.constexpr(1024)
_MASS_UNITS = tl.constexpr(2.0**40)
NO_KEY = tl.constexpr(-(2**31))  # below the key of every score


@triton.jit
def row_parameters(
    row, per_request, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, whole_vocab, FILTER: tl.constexpr,
):  # fmt: skip
    """Of a row: where its parameters stand, temperature, top-k (0 = off), top-p (1 = off), whether either is on."""
    at = (row // per_request).to(tl.int64)
    if slots_ptr is not None:
        at = tl.load(slots_ptr + at)
    temperature = tl.load(temperature_ptr + at)
    top_k = tl.full((), 0, tl.int64)
    top_p = tl.full((), 1.0, tl.float64)
    if FILTER:
        top_k = tl.load(top_k_ptr + at)
        top_p = tl.load(top_p_ptr + at)
    top_k = tl.where(top_k > 0, tl.minimum(top_k, whole_vocab), 0)
    is_filtered = (temperature > 0) & ((top_k > 0) | (top_p < 1))
    return at, temperature, top_k, top_p, is_filtered


@triton.jit
def _bin_of(score, temperature):
    """Bins are 1/4 wide, and at least 1/8 in logits, so that 1024 of them span every row that matters."""
    width = tl.maximum(0.25, 0.125 / temperature)
    return tl.floor(tl.maximum(score / width, -1e9)).to(tl.int32), width


@triton.jit
def note_tile(score, inside, tile, row, temperature, tile_max_ptr, histogram_ptr, count_ptr):
    """score [TILE] fp32, -inf outside. Adds to the row's histogram; zeroes its count of candidates."""
    largest = tl.max(score)
    tl.store(tile_max_ptr + row.to(tl.int64) * tl.num_programs(0) + tile, largest)
    if tile == 0:
        tl.store(count_ptr + row, 0)
    score_bin, _width = _bin_of(score, temperature)
    top_bin, _width = _bin_of(largest, temperature)
    near = inside & (top_bin - score_bin < NUM_BINS // 2) & (score > -float("inf"))
    counts = tl.histogram(score_bin & (NUM_BINS - 1), NUM_BINS, near)
    bins = tl.arange(0, NUM_BINS)
    tl.atomic_add(histogram_ptr + row.to(tl.int64) * NUM_BINS + bins, counts, counts > 0, sem="relaxed")


@triton.jit
def collect(
    logit, score, ids, inside, largest, temperature, top_k, top_p, histogram_ptr, mass_ptr, count_ptr, candidate_ptr,
    id_ptr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """logit, score [TILE] fp32. Stores the tile's mass; its candidates go behind other tiles', up to CAPACITY."""
    tl.store(mass_ptr, tl.sum(tl.where(inside, mass_of(score, largest), 0)))
    top_bin, width = _bin_of(largest, temperature)
    down = tl.arange(0, NUM_BINS)  # bins from the largest score's downwards
    counts = tl.load(histogram_ptr + ((top_bin - down) & (NUM_BINS - 1)))
    if top_k > 0:
        enough = tl.cumsum(counts) >= top_k
    else:
        # What is above a bin weighs at least, and what is below weighs at most, as if it all lay at the bins' ends.
        lower = (top_bin - down).to(tl.float32) * width - largest
        least = tl.cumsum(counts * tl.exp(lower))
        most = counts * tl.exp(tl.minimum(lower + width, 0.0))
        below = tl.sum(most) - tl.cumsum(most)
        enough = least >= top_p.to(tl.float32) * (least + below)
    steps = tl.min(tl.where(enough, down, NUM_BINS))  # NUM_BINS: take every token
    score_bin, _width = _bin_of(score, temperature)
    taken = inside & ((top_bin - score_bin <= steps) | (steps == NUM_BINS))
    number = tl.sum(taken.to(tl.int32))
    if number > 0:
        place = tl.atomic_add(count_ptr, number, sem="relaxed") + tl.cumsum(taken.to(tl.int32)) - 1
        stored = taken & (place < CAPACITY)
        tl.store(candidate_ptr + place, logit, stored)
        tl.store(id_ptr + place, ids, stored)


@triton.jit
def choose_filtered(
    logits_ptr, vocab, temperature, top_k, top_p, key, largest, total, count, candidate_ptr, id_ptr,
    CAPACITY: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best kept (score, id) of a row, packed. total: mass of the row; count: candidates found."""
    lowest = tl.full((), NO_KEY + 1, tl.int64)
    kept_count = tl.minimum(count, CAPACITY)
    _number, mass = weigh_above(lowest, kept_count, candidate_ptr, temperature, largest, SHIFT, CHUNK)
    if top_k > 0:
        suffices = count >= top_k
    else:
        suffices = mass.to(tl.float64) >= top_p * total.to(tl.float64)
    if suffices & (count <= CAPACITY):
        best = _search(
            count, vocab, mass, total, candidate_ptr, id_ptr, temperature, top_k, top_p, key, largest,
            False, SHIFT, CHUNK,
        )  # fmt: skip
    else:
        best = _search(
            vocab, vocab, total, total, logits_ptr, id_ptr, temperature, top_k, top_p, key, largest, True, SHIFT, CHUNK
        )
    return best


@triton.jit
def _search(
    count, vocab, mass, total, source_ptr, id_ptr, temperature, top_k, top_p, key, largest,
    WHOLE: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`choose_filtered` over `count` tokens that weigh `mass`. WHOLE: they are the row's logits, else candidates."""
    cut, highest = key_range(count, source_ptr, temperature, SHIFT, CHUNK)
    end = highest + 1
    number, above_number, above = count.to(tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    nothing = tl.full((), 0.0, tl.float64)
    if top_k > 0:
        cut, number, mass, above_number, above = _bisect(
            cut, end, number, mass, top_k, nothing, count, source_ptr, temperature, largest, SHIFT, CHUNK
        )
        total = mass
    last_id = vocab - 1  # of the tokens that tie at the cut, ids up to this are kept
    if top_p < 1:
        wanted = top_p * total.to(tl.float64)
        cut, number, mass, above_number, above = _bisect(
            cut, end, number, mass, 0, wanted, count, source_ptr, temperature, largest, SHIFT, CHUNK
        )
        ties = number - above_number
        weight = (mass - above) // tl.maximum(ties, 1)
        kept_ties = tl.ceil((wanted - above.to(tl.float64)) / tl.maximum(weight, 1).to(tl.float64)).to(tl.int64)
        if kept_ties < ties:
            last_id = id_of_tie(kept_ties, vocab, cut, count, source_ptr, id_ptr, temperature, WHOLE, SHIFT, CHUNK)
    best = tl.full((CHUNK,), -(2**63), tl.int64)
    start = tl.full((), 0, tl.int32)
    while start < count:
        at, inside, score_key, score = tokens_at(start, count, source_ptr, temperature, SHIFT, CHUNK)
        ids = ids_of(at, inside, id_ptr, WHOLE)
        kept = inside & ((score_key > cut) | ((score_key == cut) & (ids <= last_id)))
        if tl.max(kept.to(tl.int32)) > 0:
            best = tl.maximum(best, tl.where(kept, pack(score + gumbel(key, ids), ids), -(2**63)))
        start += CHUNK
    return tl.max(best)


@triton.jit
def _bisect(
    low, high, number, mass, wanted_number, wanted_mass, count, source_ptr, temperature, largest,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest key that as many tokens, and as much mass, as wanted lie at or above.

    Args:
        low, high: int64; enough lies at or above `low`, not at or above `high`.
        number, mass: what lies at or above `low`; nothing lies at or above `high`.

    Returns:
        (key, number and mass at or above it, number and mass above it).
    """
    above_number, above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        n, m = weigh_above(middle, count, source_ptr, temperature, largest, SHIFT, CHUNK)
        if (n >= wanted_number) & (m.to(tl.float64) >= wanted_mass):
            low, number, mass = middle, n, m
        else:
            high, above_number, above = middle, n, m
    return low, number, mass, above_number, above


@triton.jit
def weigh_above(bound, count, source_ptr, temperature, largest, SHIFT: tl.constexpr, CHUNK: tl.constexpr):
    """Number and mass (int64 each) of the tokens whose key is `bound` or more."""
    number, mass = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int64)
    start = tl.full((), 0, tl.int32)
    while start < count:
        _at, inside, score_key, score = tokens_at(start, count, source_ptr, temperature, SHIFT, CHUNK)
        is_above = inside & (score_key >= bound)
        number += is_above.to(tl.int32)
        mass += tl.where(is_above, mass_of(score, largest), 0)
        start += CHUNK
    return tl.sum(number).to(tl.int64), tl.sum(mass)


@triton.jit
def key_range(count, source_ptr, temperature, SHIFT: tl.constexpr, CHUNK: tl.constexpr):
    """Lowest and highest key, int64."""
    lowest, highest = tl.full((CHUNK,), 2**31 - 1, tl.int32), tl.full((CHUNK,), NO_KEY, tl.int32)
    start = tl.full((), 0, tl.int32)
    while start < count:
        _at, inside, score_key, _score = tokens_at(start, count, source_ptr, temperature, SHIFT, CHUNK)
        lowest = tl.where(inside, tl.minimum(lowest, score_key), lowest)
        highest = tl.where(inside, tl.maximum(highest, score_key), highest)
        start += CHUNK
    return tl.min(lowest).to(tl.int64), tl.max(highest).to(tl.int64)


@triton.jit
def id_of_tie(
    wanted,
    vocab,
    cut,
    count,
    source_ptr,
    id_ptr,
    temperature,
    WHOLE: tl.constexpr,
    SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The id up to which `wanted` tokens lie exactly at the cut."""
    low, high = tl.full((), -1, tl.int32), vocab - 1
    while high - low > 1:
        middle = (low + high) >> 1
        number = tl.zeros((CHUNK,), tl.int32)
        start = tl.full((), 0, tl.int32)
        while start < count:
            at, inside, score_key, _score = tokens_at(start, count, source_ptr, temperature, SHIFT, CHUNK)
            ids = ids_of(at, inside, id_ptr, WHOLE)
            number += (inside & (score_key == cut) & (ids <= middle)).to(tl.int32)
            start += CHUNK
        if tl.sum(number) >= wanted:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def tokens_at(start, count, source_ptr, temperature, SHIFT: tl.constexpr, CHUNK: tl.constexpr):
    """Of the next CHUNK tokens: place, whether there is one, key, score (logit / T). Keys are in the order of scores.

    SHIFT: low bits of a logit's fp32 form that its own dtype does not have; without them a search takes a third of the
    steps. 0 for fp32, where other logits may give an equal score: there the key is the score's.
    """
    at = start + tl.arange(0, CHUNK)
    inside = at < count
    logit = tl.load(source_ptr + at, inside, other=0.0).to(tl.float32)
    score = tl.div_rn(logit, temperature)
    if SHIFT > 0:
        score_key = ordered(logit) >> SHIFT
    else:
        score_key = ordered(score)
    return at, inside, score_key, score


@triton.jit
def ids_of(at, inside, id_ptr, WHOLE: tl.constexpr):
    ids = at
    if not WHOLE:
        ids = tl.load(id_ptr + at, inside, other=0)
    return ids


@triton.jit
def mass_of(score, largest):
    return (tl.exp(score - largest) * _MASS_UNITS).to(tl.int64)

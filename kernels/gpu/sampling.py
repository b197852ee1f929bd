"""Triton kernels of `kernels.sampling`: no probabilities are stored, and a row's result hangs on that row alone.

Stage 1 (grid: tiles of the vocabulary x rows) leaves the best (score, id) of each tile, noise included. For a row with
top-k or top-p it leaves instead what stage 2 needs to find the few tokens that matter (`gpu/logit_filters.py`).
The last stage (grid: rows) combines the tiles; of a filtered row it searches the cut among those few tokens. Where
several ranks have a part of the vocabulary each, they exchange what each has found in its own part.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.all_gather import all_gather
from slipstream.kernels.gpu.exchange import largest_of_all
from slipstream.kernels.gpu.gumbel_noise import gumbel, pack, row_key, unpack_id
from slipstream.kernels.gpu.logit_filters import NUM_BINS, choose_filtered, collect, note_tile
from slipstream.kernels.sampling_batch import SamplingBatch
from slipstream.kernels.vocabulary_part import VocabularyPart

_TILE = 2048  # token ids a program
_CHUNK = 2048  # candidates looked at together
_MAX_CANDIDATES = 8192  # of a row; more of them, and the last stage reads the whole row again and again
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # of a logit as fp32
_HISTOGRAM_ROWS = 1024  # most rows of a call that share the standing histogram


def sample(
    logits: torch.Tensor,
    sampling: SamplingBatch,
    positions: torch.Tensor,
    offset: int,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """logits [B, R, V or those of `part`], positions [B, R] -> [B, R] int64."""
    batch, per_request, _ = logits.shape
    if part is not None:  # the others' columns too, of the rows that need them
        logits = all_gather(logits, part.widths, part.carrier, sampling)  # [B, R, Vr] -> [B, R, V]
    vocab = logits.shape[-1]
    out = torch.empty((batch, per_request), dtype=torch.int64, device=logits.device)
    rows, tiles = batch * per_request, triton.cdiv(vocab, _TILE)
    if not rows:
        return out
    capacity = min(_MAX_CANDIDATES, vocab)
    filters = {
        "top_k_ptr": sampling.top_k,
        "top_p_ptr": sampling.top_p,
        "histogram_ptr": _histogram(rows, logits.device),
        "tile_max_ptr": logits.new_empty((rows, tiles), dtype=torch.float32),
        "tile_mass_ptr": out.new_empty((rows, tiles)),
        "count_ptr": out.new_empty(rows, dtype=torch.int32),
        "candidate_ptr": logits.new_empty((rows, capacity), dtype=torch.float32),
        "id_ptr": out.new_empty((rows, capacity), dtype=torch.int32),
        "CAPACITY": capacity,
    }
    own = slice(0, vocab) if part is None else part.ids
    rest = (positions.contiguous(), offset, per_request, None, out, 1, filters)
    _run(logits.reshape(rows, vocab), own, 0, part, sampling, *rest)
    return out


def propose_tokens(
    logits: torch.Tensor,
    sampling: SamplingBatch,
    positions: torch.Tensor,
    target_ids: torch.Tensor,
    offset: int,
    out: torch.Tensor | None,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """logits [B, Vd or those of `part`], positions [B] -> [B] int64, in `out` where given."""
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0]:
        unfiltered = dict.fromkeys(_FILTER_ARGUMENTS) | {"CAPACITY": 0}
        first, rest = 0 if part is None else part.start, (target_ids, out, out.stride(0), unfiltered)
        own = slice(0, logits.shape[1])
        _run(logits, own, first, part, sampling, positions.contiguous(), offset, 1, *rest)
    return out


_FILTER_ARGUMENTS = (
    "top_k_ptr", "top_p_ptr", "histogram_ptr", "tile_max_ptr", "tile_mass_ptr", "count_ptr", "candidate_ptr", "id_ptr",
)  # fmt: skip


@functools.cache
def _standing_histogram(device: torch.device) -> torch.Tensor:
    """Zeros between calls: the last stage clears what a call has added. Made in the warm-up, never while capturing."""
    return torch.zeros((_HISTOGRAM_ROWS, NUM_BINS.value), dtype=torch.int32, device=device)


def _histogram(rows: int, device: torch.device) -> torch.Tensor:
    if rows <= _HISTOGRAM_ROWS and device.type != "meta":
        return _standing_histogram(device)
    return torch.zeros((rows, NUM_BINS.value), dtype=torch.int32, device=device)


def _run(
    logits: torch.Tensor,
    own: slice,
    first_id: int,
    part: VocabularyPart | None,
    sampling: SamplingBatch,
    positions: torch.Tensor,
    offset: int,
    per_request: int,
    target_ids: torch.Tensor | None,
    out: torch.Tensor,
    out_stride: int,
    filters: dict[str, Any],
) -> None:
    """logits [M, V], M = B * per_request rows.

    own: the columns among which this rank looks for the best of an unfiltered row. first_id: id of the first column.
    """
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, _TILE)
    best = torch.empty((rows, tiles), dtype=torch.int64, device=logits.device)
    filtered = filters["CAPACITY"] > 0
    row_arguments: dict[str, Any] = {
        "logits_ptr": logits,
        "row_stride": logits.stride(0),
        "vocab": vocab,
        "per_request": per_request,
        "slots_ptr": sampling.slots,
        "temperature_ptr": sampling.temperature,
        "top_k_ptr": filters["top_k_ptr"],
        "top_p_ptr": filters["top_p_ptr"],
    }
    noise_arguments: dict[str, Any] = {
        "seed_ptr": sampling.seed,
        "choice_ptr": sampling.choice,
        "positions_ptr": positions,
        "offset": offset,
        "ids_ptr": target_ids,
    }
    launch.launch(
        _tile_kernel,
        (tiles, rows),
        num_warps=4,
        **row_arguments,
        **noise_arguments,
        id_offset=first_id,
        own_start=own.start,
        own_stop=own.stop,
        best_ptr=best,
        tile_max_ptr=filters["tile_max_ptr"],
        histogram_ptr=filters["histogram_ptr"],
        count_ptr=filters["count_ptr"],
        TILE=_TILE,
        FILTER=filtered,
    )
    if filtered:
        launch.launch(
            _candidate_kernel,
            (tiles, rows),
            num_warps=4,
            **row_arguments,
            **{name: filters[name] for name in _FILTER_ARGUMENTS[2:]},
            TILE=_TILE,
            TILES=triton.next_power_of_2(tiles),
            CAPACITY=filters["CAPACITY"],
        )
    launch.launch(
        _pick_kernel,
        (rows,),
        num_warps=8 if filtered else 1,
        **row_arguments,
        **noise_arguments,
        best_ptr=best,
        **{name: filters[name] for name in _FILTER_ARGUMENTS[2:]},
        out_ptr=out,
        out_stride=out_stride,
        tiles=tiles,
        TILES=triton.next_power_of_2(tiles),
        CHUNK=_CHUNK,
        CAPACITY=filters["CAPACITY"],
        SHIFT=_UNUSED_BITS[logits.dtype],
        FILTER=filtered,
        **_exchange(part, rows),
        CARD=not launch.INTERPRET,
    )


def _exchange(part: VocabularyPart | None, rows: int) -> dict[str, Any]:
    """What the last stage exchanges with: an item a row."""
    if part is None:
        nobody: dict[str, Any] = dict.fromkeys(("buffers_ptr", "epochs_ptr", "state_ptr", "lost_ptr"))
        return nobody | {"ROOM": 1, "RANK": 0, "WORLD": 1}
    arguments: dict[str, Any] = dict(part.carrier.arguments)
    room = arguments.pop("CAPACITY")
    if rows > room:
        raise ValueError(f"{rows} rows; at most {room} are exchanged at a time")
    return arguments | {"ROOM": room}


@triton.jit
def _row(row, per_request, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab, FILTER: tl.constexpr):
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
    top_k = tl.where(top_k > 0, tl.minimum(top_k, vocab), 0)
    is_filtered = (temperature > 0) & ((top_k > 0) | (top_p < 1))
    return at, temperature, top_k, top_p, is_filtered


@triton.jit(do_not_specialize=["offset", "id_offset", "own_start", "own_stop"])
def _tile_kernel(
    logits_ptr,
    row_stride,
    vocab,
    per_request,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    choice_ptr,
    positions_ptr,
    offset,
    ids_ptr,
    id_offset,
    own_start,
    own_stop,
    best_ptr,
    tile_max_ptr,
    histogram_ptr,
    count_ptr,
    TILE: tl.constexpr,
    FILTER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Best (score, id) of a tile, among the own columns; a row that is filtered counts all of them.

    id_offset: id of the first column, where the rows are a shard of the vocabulary.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, row = tl.program_id(0), tl.program_id(1)
    at, temperature, _top_k, _top_p, is_filtered = _row(
        row, per_request, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab, FILTER
    )
    column = tile * TILE + tl.arange(0, TILE)
    if is_filtered:
        own_start, own_stop = 0, vocab
    inside = (column >= own_start) & (column < own_stop)
    score = tl.load(logits_ptr + row.to(tl.int64) * row_stride + column, inside, other=-float("inf")).to(tl.float32)
    if temperature > 0:
        score = tl.div_rn(score, temperature)
    if is_filtered:
        if FILTER:
            note_tile(score, inside, tile, row, temperature, tile_max_ptr, histogram_ptr, count_ptr)
    else:
        ids = column + id_offset
        if temperature > 0:
            noise_ids = ids
            if ids_ptr is not None:
                noise_ids = tl.load(ids_ptr + ids, inside, other=0)
            position = tl.load(positions_ptr + row) + offset
            score += gumbel(row_key(tl.load(seed_ptr + at), tl.load(choice_ptr + at), position), noise_ids)
        packed = tl.where(inside, pack(score, ids), -(2**63))
        tl.store(best_ptr + row.to(tl.int64) * tl.num_programs(0) + tile, tl.max(packed))


@triton.jit
def _candidate_kernel(
    logits_ptr,
    row_stride,
    vocab,
    per_request,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    histogram_ptr,
    tile_max_ptr,
    tile_mass_ptr,
    count_ptr,
    candidate_ptr,
    id_ptr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of a filtered row: collects the tokens of a tile that may be kept, and sums its masses."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _at, temperature, top_k, top_p, is_filtered = _row(
        row, per_request, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab, True
    )
    if is_filtered:
        tiles = tl.num_programs(0)
        column = tile * TILE + tl.arange(0, TILE)
        inside = column < vocab
        logit = tl.load(logits_ptr + row * row_stride + column, inside, other=-float("inf")).to(tl.float32)
        score = tl.div_rn(logit, temperature)
        every = tl.arange(0, TILES)
        tile_max = tl.load(tile_max_ptr + row * tiles + every, every < tiles, other=-float("inf"))
        largest = tl.max(tile_max)
        collect(
            logit, score, column, inside, largest, temperature, top_k, top_p, histogram_ptr + row * NUM_BINS,
            tile_mass_ptr + row * tiles + tile, count_ptr + row, candidate_ptr + row * CAPACITY,
            id_ptr + row * CAPACITY, CAPACITY,
        )  # fmt: skip


@triton.jit(do_not_specialize=["offset"])
def _pick_kernel(
    logits_ptr,
    row_stride,
    vocab,
    per_request,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    choice_ptr,
    positions_ptr,
    offset,
    ids_ptr,
    best_ptr,
    histogram_ptr,
    tile_max_ptr,
    tile_mass_ptr,
    count_ptr,
    candidate_ptr,
    id_ptr,
    out_ptr,
    out_stride,
    tiles,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
    SHIFT: tl.constexpr,
    FILTER: tl.constexpr,
    buffers_ptr,
    epochs_ptr,
    state_ptr,
    lost_ptr,
    ROOM: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at, temperature, top_k, top_p, is_filtered = _row(
        row, per_request, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab, FILTER
    )
    every = tl.arange(0, TILES)
    best = tl.full((), -(2**63), tl.int64)
    if is_filtered:
        if FILTER:
            key = row_key(tl.load(seed_ptr + at), tl.load(choice_ptr + at), tl.load(positions_ptr + row) + offset)
            masses = tl.load(tile_mass_ptr + row * tiles + every, every < tiles, other=0)
            tile_max = tl.load(tile_max_ptr + row * tiles + every, every < tiles, other=-float("inf"))
            best = choose_filtered(
                logits_ptr + row * row_stride, vocab, temperature, top_k, top_p, key, tl.max(tile_max), tl.sum(masses),
                tl.load(count_ptr + row), candidate_ptr + row * CAPACITY, id_ptr + row * CAPACITY,
                CAPACITY, SHIFT, CHUNK,
            )  # fmt: skip
            bins = tl.arange(0, NUM_BINS)
            tl.store(histogram_ptr + row * NUM_BINS + bins, tl.zeros((NUM_BINS,), tl.int32))
    else:
        best = tl.max(tl.load(best_ptr + row * tiles + every, every < tiles, other=-(2**63)))
        if WORLD > 1:  # a filtered row has all columns, on all ranks
            best = largest_of_all(best, row, buffers_ptr, epochs_ptr, state_ptr, lost_ptr, ROOM, RANK, WORLD, CARD)
    token = unpack_id(best)
    if ids_ptr is not None:
        token = tl.load(ids_ptr + token)
    tl.store(out_ptr + row * out_stride, token)

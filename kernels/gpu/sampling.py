"""Triton kernels of `kernels.sampling`: no probabilities are stored, and a row's result hangs on that row alone.

Stage 1 (grid: tiles of the vocabulary x rows) leaves the best (score, id) of each tile, noise included. For a row with
top-k or top-p it leaves instead what stage 2 needs to find the few tokens that matter (`gpu/logit_filters.py`).
The last stage (grid: rows) combines the tiles; of a filtered row it searches the cut among those few tokens. Where
several ranks have a part of the vocabulary each, they exchange what each has found in its own part; of filtered rows
also the sums that their cut hangs on (`gpu/filters_of_ranks.py`).
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.gpu.exchange import largest_of_all
from slipstream.kernels.gpu.filters_of_ranks import ITEMS, MOST_RANKS, choose_filtered_of_ranks, sum_kernel
from slipstream.kernels.gpu.gumbel_noise import gumbel, pack, row_key, unpack_id
from slipstream.kernels.gpu.logit_filters import NUM_BINS, choose_filtered, collect, note_tile, row_parameters
from slipstream.kernels.sampling_batch import SamplingBatch
from slipstream.kernels.vocabulary_part import VocabularyPart

_TILE = 2048  # token ids a program
_CHUNK = 2048  # candidates looked at together
_CHUNK_OF_RANKS = 512  # the same, where 16 keys are looked at together
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
    batch, per_request, vocab = logits.shape
    out = torch.empty((batch, per_request), dtype=torch.int64, device=logits.device)
    rows, tiles = batch * per_request, max(1, triton.cdiv(vocab, _TILE))
    if not rows:
        return out
    capacity = max(1, min(_MAX_CANDIDATES, vocab))
    filters = {
        "top_k_ptr": sampling.top_k,
        "top_p_ptr": sampling.top_p,
        "histogram_ptr": _histogram(rows, logits.device),
        "tile_max_ptr": logits.new_empty((rows, tiles), dtype=torch.float32),
        "tile_mass_ptr": out.new_empty((rows, tiles)),
        "count_ptr": out.new_empty(rows, dtype=torch.int32),
        "candidate_ptr": logits.new_empty((rows, capacity), dtype=torch.float32 if part is None else logits.dtype),
        "id_ptr": out.new_empty((rows, capacity), dtype=torch.int32),
        "CAPACITY": capacity,
    }
    rest = (positions.contiguous(), offset, per_request, None, out, 1, filters)
    _run(logits.reshape(rows, vocab), part, sampling, *rest)
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
        rest = (target_ids, out, out.stride(0), unfiltered)
        _run(logits, part, sampling, positions.contiguous(), offset, 1, *rest)
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
    """logits [M, V or the columns of `part`], M = B * per_request rows."""
    rows, vocab = logits.shape
    tiles, first_id = max(1, triton.cdiv(vocab, _TILE)), 0 if part is None else part.start
    best = torch.empty((rows, tiles), dtype=torch.int64, device=logits.device)
    filtered = filters["CAPACITY"] > 0
    row_arguments: dict[str, Any] = {
        "logits_ptr": logits,
        "row_stride": logits.stride(0),
        "vocab": vocab,
        "whole_vocab": vocab if part is None else sum(part.widths),
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
        "first_id": first_id,
    }
    exchange = _exchange(part, rows, filtered)
    launch.launch(
        _tile_kernel,
        (tiles, rows),
        num_warps=4,
        **row_arguments,
        **noise_arguments,
        best_ptr=best,
        tile_max_ptr=filters["tile_max_ptr"],
        histogram_ptr=filters["histogram_ptr"],
        count_ptr=filters["count_ptr"],
        TILE=_TILE,
        FILTER=filtered,
    )
    if filtered and part is not None:
        launch.launch(
            sum_kernel,
            (rows,),
            num_warps=4,
            **row_arguments,
            histogram_ptr=filters["histogram_ptr"],
            tile_max_ptr=filters["tile_max_ptr"],
            tiles=tiles,
            TILES=triton.next_power_of_2(tiles),
            **exchange,
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
        CHUNK=_CHUNK if part is None else _CHUNK_OF_RANKS,
        CAPACITY=filters["CAPACITY"],
        SHIFT=_UNUSED_BITS[logits.dtype],
        FILTER=filtered,
        **exchange,
    )


def _exchange(part: VocabularyPart | None, rows: int, filtered: bool) -> dict[str, Any]:
    """What stages exchange with: an item a row, or `ITEMS` where rows may be filtered."""
    if part is None:
        nobody: dict[str, Any] = dict.fromkeys(("buffers_ptr", "epochs_ptr", "state_ptr", "lost_ptr"))
        return nobody | {"ROOM": 1, "RANK": 0, "WORLD": 1, "ITEMS": 1, "CARD": not launch.INTERPRET}
    arguments: dict[str, Any] = dict(part.carrier.arguments)
    room, items = arguments.pop("CAPACITY"), ITEMS if filtered else 1
    if rows * items > room or len(part.widths) > MOST_RANKS:
        raise ValueError(
            f"{rows} rows on {len(part.widths)} ranks; expected at most {room // items} rows on {MOST_RANKS} ranks"
        )
    return arguments | {"ROOM": room, "ITEMS": items, "CARD": not launch.INTERPRET}


@triton.jit(do_not_specialize=["offset", "first_id"])
def _tile_kernel(
    logits_ptr,
    row_stride,
    vocab,
    whole_vocab,
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
    first_id,
    best_ptr,
    tile_max_ptr,
    histogram_ptr,
    count_ptr,
    TILE: tl.constexpr,
    FILTER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Best (score, id) of a tile; a row that is filtered is counted. first_id: of the first column."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, row = tl.program_id(0), tl.program_id(1)
    at, temperature, _top_k, _top_p, is_filtered = row_parameters(
        row, per_request, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, whole_vocab, FILTER
    )
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < vocab
    score = tl.load(logits_ptr + row.to(tl.int64) * row_stride + column, inside, other=-float("inf")).to(tl.float32)
    if temperature > 0:
        score = tl.div_rn(score, temperature)
    if is_filtered:
        if FILTER:
            note_tile(score, inside, tile, row, temperature, tile_max_ptr, histogram_ptr, count_ptr)
    else:
        ids = column + first_id
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
    whole_vocab,
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
    _at, temperature, top_k, top_p, is_filtered = row_parameters(
        row, per_request, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, whole_vocab, True
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


@triton.jit(do_not_specialize=["offset", "first_id"])
def _pick_kernel(
    logits_ptr,
    row_stride,
    vocab,
    whole_vocab,
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
    first_id,
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
    ITEMS: tl.constexpr,
    CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at, temperature, top_k, top_p, is_filtered = row_parameters(
        row, per_request, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, whole_vocab, FILTER
    )
    every = tl.arange(0, TILES)
    best = tl.full((), -(2**63), tl.int64)
    item = row * ITEMS + ITEMS - 1  # the last one of the row: `sum_histograms` has the others
    epoch = tl.full((), 0, tl.int32)
    if WORLD > 1:
        epoch = tl.load(epochs_ptr + item)
    if is_filtered:
        if FILTER:
            key = row_key(tl.load(seed_ptr + at), tl.load(choice_ptr + at), tl.load(positions_ptr + row) + offset)
            masses = tl.load(tile_mass_ptr + row * tiles + every, every < tiles, other=0)
            tile_max = tl.load(tile_max_ptr + row * tiles + every, every < tiles, other=-float("inf"))
            if WORLD > 1:
                best, epoch = choose_filtered_of_ranks(
                    logits_ptr + row * row_stride, vocab, first_id, temperature, top_k, top_p, key, tl.max(tile_max),
                    tl.sum(masses), tl.load(count_ptr + row), candidate_ptr + row * CAPACITY, id_ptr + row * CAPACITY,
                    item, epoch, buffers_ptr, state_ptr, lost_ptr,
                    CAPACITY, SHIFT, CHUNK, ROOM, RANK, WORLD, CARD,
                )  # fmt: skip
            else:
                best = choose_filtered(
                    logits_ptr + row * row_stride, vocab, temperature, top_k, top_p, key, tl.max(tile_max),
                    tl.sum(masses), tl.load(count_ptr + row), candidate_ptr + row * CAPACITY, id_ptr + row * CAPACITY,
                    CAPACITY, SHIFT, CHUNK,
                )  # fmt: skip
            bins = tl.arange(0, NUM_BINS)
            tl.store(histogram_ptr + row * NUM_BINS + bins, tl.zeros((NUM_BINS,), tl.int32))
    else:
        best = tl.max(tl.load(best_ptr + row * tiles + every, every < tiles, other=-(2**63)))
    if WORLD > 1:
        best = largest_of_all(best, item, epoch, buffers_ptr, state_ptr, lost_ptr, ROOM, RANK, WORLD, CARD)
        tl.store(epochs_ptr + item, epoch + 1)
    token = unpack_id(best)
    if ids_ptr is not None:
        token = tl.load(ids_ptr + token)
    tl.store(out_ptr + row * out_stride, token)

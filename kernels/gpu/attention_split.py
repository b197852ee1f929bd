"""How the work of decode attention is cut: tiles and the tree above them, programs, and where partials lie."""

from dataclasses import dataclass, replace

import torch
import triton

from slipstream.kernels.gpu.tiles import SHARED_BYTES, architecture

FAN = 8
REGISTERS = 65536  # of a multiprocessor, sm_80 to sm_120


@dataclass(frozen=True)
class Tile:
    """How large a tile is.

    Args:
        keys: tokens of a tile; rows: query rows of a program, at most; warps: of a program. All three touch bits.
        early: tiles that fit into a program's registers before it waits for the kernel before. Touches none.
        registers: of a thread, at most; None: as many as the compiler likes. Touches none.
    """

    keys: int
    rows: int
    warps: int = 8
    early: int = 2
    registers: int | None = None


@dataclass(frozen=True)
class Cut:
    """How a launch hands its work out. Bits do not depend on it.

    Args:
        programs: of a launch, about: a wave of 132 multiprocessors.
        wide: whole groups are handed out as soon as they keep 1 / wide of the programs busy,
        whole: and while a request has at most so many tiles: one program then does them all, and nobody waits.
        early: tiles that a program has in its registers before it waits for the kernel before.
        stages: of the pipeline that loads the others, 1, 3 or 5: none, one or two of them lie in shared memory.
        settles: the kernel lets the next one start only when those before it are done (launch.py); else when its own
            keys are on the way, so that the next one's weights do not come before them (a step of 8B sizes on an H200:
            4.32 ms, at once 4.68, after the wait 4.42).
        registers: of a thread, at most; None: the tile's.
    """

    programs: int = 132
    wide: int = 3
    whole: int = 2
    early: int = 2
    stages: int = 5
    settles: bool = False
    registers: int | None = None


_CUT = Cut()
# By padded head_dim, the same for every architecture: shared memory fits the smallest (99 KB a block on sm_120).
# 128: four warps of 224 registers leave room on an SM for a CTA of the products before and behind, whose weights come
# meanwhile; at 255 registers there was none (8B sizes on an H200: 4.44 ms a step, now 4.32).
_TILES = {64: Tile(256, 32), 128: Tile(128, 32, warps=4, early=1, registers=224), 256: Tile(64, 16)}


_FEW = 4  # requests at a time: their latency counts, not the memory's rate; one tile ahead starts quicker than two


def usual_cut(batch: int, fewest: int, tile: Tile) -> Cut:
    """The cut for the card at hand. sm_120 has too little shared memory for two tiles, or two programs.

    More programs than multiprocessors: two must stand on one, or they come in two waves. So each has half its
    registers, the fewest tiles in flight, and the other program's work while it waits. SmolLM2-135M's 192 programs of
    64 requests, queries, keys and values in front, on an H200 at 129, 256 and 384 tokens: 12.8, 14.1, 18.5 us; with
    three stages 14.8, 15.8, 19.7; one program on an SM 17.3, 18.0, 22.1. A tile that names its registers stays as it
    is: it was timed beside the products.

    Args:
        batch: requests of the launch.
        fewest: programs that it needs, one a request, KV head and block of rows.
        tile: what they take at a time.
    """
    roomy = SHARED_BYTES[architecture()] > 144 * 1024
    if roomy and fewest > _CUT.programs and tile.registers is None and tile.warps >= 8:
        return replace(_CUT, early=1, stages=1, registers=REGISTERS // (2 * 32 * tile.warps))
    return replace(_CUT, stages=3) if batch <= _FEW or not roomy else _CUT


def padded_dim(head_dim: int) -> int:
    """Width of a head in the attention kernels. A ValueError names a head that is too large."""
    padded = max(64, triton.next_power_of_2(head_dim))
    if padded not in _TILES:
        raise ValueError(f"head_dim {head_dim} is larger than any the attention kernels know ({max(_TILES)})")
    return int(padded)


def tile_of(head_dim: int, dtype: torch.dtype) -> Tile:
    """Tile of a head size. fp32 is for tests of tiny models: half the tile, twice the bytes."""
    tile = _TILES[padded_dim(head_dim)]
    return tile if dtype.itemsize == 2 else Tile(max(16, tile.keys // 8), 16, 4)


def rows_of(folded: int, tile: Tile) -> tuple[int, int]:
    """(rows of a program, blocks of so many) for `folded` rows x query heads of a KV head."""
    rows = min(tile.rows, max(16, triton.next_power_of_2(folded)))
    return rows, triton.cdiv(folded, rows)


@dataclass(frozen=True)
class Split:
    """How a launch divides its work, and where its partials lie. Of these, only `rows` and `keys` could touch bits."""

    rows: int  # M: query rows of a program
    keys: int  # T: tokens of a tile
    row_blocks: int
    programs: int  # of each (request, KV head, block of rows)
    tile_slots: int
    group_slots: int
    slots: int

    @staticmethod
    def of(batch: int, folded: int, kv_heads: int, context: int, tile: Tile, cut: Cut) -> "Split":
        """folded: rows x query heads of a KV head; context: tokens that the block table can hold."""
        rows, row_blocks = rows_of(folded, tile)
        tiles = triton.cdiv(context, tile.keys)
        each = max(1, min(tiles, cut.programs // (batch * kv_heads * row_blocks)))
        # Single tiles are handed out only while their groups are too few for the programs.
        tile_slots = min(tiles, FAN * ((each - 1) // cut.wide))
        group_slots = tiles // FAN + 2
        slots, room, top = tile_slots + group_slots, group_slots, (tiles - 1) // FAN
        while top > 0:  # n nodes in a row have at most n // FAN + 2 parents; up to the level of a single node
            room, top = room // FAN + 2, top // FAN
            slots += room
        return Split(rows, tile.keys, row_blocks, each, tile_slots, group_slots, slots)


class _Workspace:
    """Partials and counters of one device; launches follow each other in one stream, so one set serves all.

    Grows outside of graph capture only. What it outgrew stays allocated: captured graphs point to it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[torch.Tensor] = []

    @torch.inference_mode(False)  # they outlive the step that first needs them: plain tensors serve steps of any mode
    def reserve(self, partials: int, counters: int) -> None:
        """At least so many fp32 partials and counters, which are 0."""
        if partials <= self.partials.numel() and counters <= self.counters.numel():
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "the workspace of paged attention grows during graph capture: launch this size once before it"
            )
        self._outgrown += [self.partials, self.counters]
        self.partials = torch.empty(max(partials, self.partials.numel()), dtype=torch.float32, device=self.device)
        self.counters = torch.zeros(max(counters, self.counters.numel()), dtype=torch.int32, device=self.device)


_WORKSPACES: dict[torch.device, _Workspace] = {}


def workspace_of(device: torch.device) -> _Workspace:
    """The device's, empty at first."""
    if device not in _WORKSPACES:
        _WORKSPACES[device] = _Workspace(device)
    return _WORKSPACES[device]


def reserve(device: torch.device, batch: int, kv_heads: int, split: Split, padded: int) -> _Workspace:
    workspace = workspace_of(device)
    slots = batch * kv_heads * split.row_blocks * split.slots
    workspace.reserve(slots * split.rows * (padded + 2), slots)
    return workspace

"""Linear layer over an INT4 weight, for 1 to 128 rows (tokens) and more: every row the same bits whatever their number.

The weight is the left operand of the matrix instruction, so that its rows fill the tile and tokens are the narrow side.
Nibbles become bf16 by bits: nibble | 0x4300 is 128 + nibble exactly, less 136 is the integer. The integers go into the
matrix unit as they are; each group's sum is multiplied by the group's scale in fp32. No weight is ever rounded.

Input features are cut into a number of parts that depends on the weight's shape alone. Each part's sum goes to memory;
the program that is last to finish adds the parts in their order.
"""

import torch
import triton
import triton.language as tl

from slipstream.kernels.gpu import launch
from slipstream.kernels.int4 import Int4Weight

_BLOCK_N = 64  # weight rows of a program: one warp, 16 rows of each of the four row classes of a word
_MAX_BLOCK_M = 64
_PROGRAMS = 1024  # to spread the bytes over: several small programs on each of a large card's multiprocessors
_MIN_PART = 512  # input features of a part, at least: a shorter one ends before its loads overlap


def linear_int4(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """x [M, K] fp32 or bf16 on the card, weight [N, K] -> [M, N] in the dtype of `x`."""
    x = x.contiguous()
    num_tokens, features = x.shape
    y = x.new_empty(num_tokens, weight.num_rows)
    if not y.numel():
        return y
    parts = num_parts(weight.num_rows, features, weight.group)
    exact32 = launch.INTERPRET or x.dtype == torch.float32
    block_m = 8 if exact32 else block_of_tokens(num_tokens)
    grid = (triton.cdiv(weight.num_rows, _BLOCK_N), parts, triton.cdiv(num_tokens, block_m))
    sums, arrived = (y, y) if parts == 1 else (_sums(x, parts, num_tokens, weight.num_rows), _arrived(x.device))
    launch.launch(
        _linear_int4,
        grid,
        num_warps=1,
        num_stages=4,
        x_ptr=x,
        words_ptr=weight.words,
        scales_ptr=weight.scales,
        y_ptr=y,
        sums_ptr=sums,
        arrived_ptr=arrived,
        num_tokens=num_tokens,
        num_rows=weight.num_rows,
        HALF=weight.half,
        FEATURES=features,
        GROUP=weight.group,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        PARTS=parts,
        EXACT32=exact32,
    )
    return y


def num_parts(num_rows: int, features: int, group: int) -> int:
    """Parts of the input features: a power of two that divides the groups of a row; by the weight's shape alone."""
    parts = 1
    while (
        triton.cdiv(num_rows, _BLOCK_N) * parts < _PROGRAMS
        and features // (2 * parts) >= _MIN_PART
        and (features // group) % (2 * parts) == 0
    ):
        parts *= 2
    return parts


def block_of_tokens(num_tokens: int) -> int:
    """Tokens of a program; does not change bits, every token is a column of its own."""
    return min(max(8, triton.next_power_of_2(num_tokens)), _MAX_BLOCK_M)


def _sums(x: torch.Tensor, parts: int, num_tokens: int, num_rows: int) -> torch.Tensor:
    return torch.empty(parts, num_tokens, num_rows, dtype=torch.float32, device=x.device)


_counters: dict[torch.device, torch.Tensor] = {}


def _arrived(device: torch.device) -> torch.Tensor:
    """[65536] int32, parts done of each tile: zero between kernels, so that a graph can be replayed."""
    if device not in _counters:
        _counters[device] = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    return _counters[device]


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_int4(
    x_ptr,  # [M, K]
    words_ptr,  # [N / 32, K / 32, 8, 16] int32
    scales_ptr,  # [N / 32, K / GROUP, 8, 4] bf16
    y_ptr,  # [M, N]
    sums_ptr,  # [PARTS, M, N] fp32
    arrived_ptr,  # one int32 a tile
    num_tokens,
    num_rows,
    HALF: tl.constexpr,
    FEATURES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    EXACT32: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile_n, part, tile_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups: tl.constexpr = FEATURES // GROUP // PARTS
    first_group = part * groups

    # Rows of an operand are (block of 32, g); its columns are (chunk of 32 features, j): as words lie in memory. Column
    # c stands for the input features 2 c (bits 0 to 15 of a word) and 2 c + 1: an aligned pair of x.
    row = tl.arange(0, BLOCK_N // 4)
    column = tl.arange(0, GROUP // 2)
    block = tile_n * (BLOCK_N // 32) + row // 8
    inside = block * 32 < num_rows
    blocks_words = block * (FEATURES // 32) * 128 + (row % 8) * 16
    chunk_words = (column // 16) * 128 + column % 16
    words_at = words_ptr + blocks_words[:, None] + chunk_words[None, :] + first_group * (GROUP * 4)
    scales_at = scales_ptr + (block * (FEATURES // GROUP) + first_group) * 32 + (row % 8) * 4
    token = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    present = token < num_tokens

    if PDL:
        # Weights do not depend on the kernel before: the head of this part, up to 8 KB a block, is on its way to L2.
        lines = tl.arange(0, 64)
        some = tile_n * (BLOCK_N // 32) + tl.arange(0, BLOCK_N // 32)
        line_at = words_ptr + some[:, None] * (FEATURES * 4) + first_group * (GROUP * 4) + lines[None, :] * 32
        used = (some[:, None] * 32 < num_rows) & (lines[None, :] * 32 < groups * GROUP * 4)
        _prefetch(tl.where(used, line_at, words_ptr))
        tl.extra.cuda.gdc_wait()

    y0 = tl.zeros((BLOCK_N // 4, BLOCK_M), tl.float32)
    y1 = tl.zeros((BLOCK_N // 4, BLOCK_M), tl.float32)
    y2 = tl.zeros((BLOCK_N // 4, BLOCK_M), tl.float32)
    y3 = tl.zeros((BLOCK_N // 4, BLOCK_M), tl.float32)
    for g in range(groups):
        words = tl.load(words_at + g * (GROUP * 4), mask=inside[:, None], other=0)
        pair_at = token[None, :] * (FEATURES // 2) + (first_group + g) * (GROUP // 2) + column[:, None]
        if EXACT32:
            x0 = tl.load(x_ptr + 2 * pair_at, mask=present[None, :], other=0.0).to(tl.float32)
            x1 = tl.load(x_ptr + 2 * pair_at + 1, mask=present[None, :], other=0.0).to(tl.float32)
        else:
            pairs = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + pair_at, mask=present[None, :], other=0)
            x0 = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
            x1 = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        a0, a1, a2, a3, b0, b1, b2, b3 = _integers(words, EXACT32)
        scale = scales_at + g * 32
        y0 += _scale(scale, inside) * _dot(a0, b0, x0, x1)
        y1 += _scale(scale + 1, inside) * _dot(a1, b1, x0, x1)
        y2 += _scale(scale + 2, inside) * _dot(a2, b2, x0, x1)
        y3 += _scale(scale + 3, inside) * _dot(a3, b3, x0, x1)

    # Block b: 16 rows, and the 16 that lie HALF behind them.
    out_row = block // (HALF // 16) * (2 * HALF) + block % (HALF // 16) * 16 + row % 8
    if PARTS > 1:
        sums_at = sums_ptr + part * num_tokens * num_rows
        _store(sums_at, y0, y1, y2, y3, out_row, token, num_rows, num_tokens, HALF)
        tl.debug_barrier()  # every thread's sums are written before the count says so
        arrived_at = arrived_ptr + tile_m * tl.num_programs(0) + tile_n
        last = tl.atomic_add(arrived_at, 1, sem="acq_rel") == PARTS - 1
        if last:
            tl.debug_barrier()
            tl.store(arrived_at, 0)
            y0 = _add_parts(sums_ptr, out_row, token, num_rows, num_tokens, PARTS)
            y1 = _add_parts(sums_ptr, out_row + 8, token, num_rows, num_tokens, PARTS)
            y2 = _add_parts(sums_ptr, out_row + HALF, token, num_rows, num_tokens, PARTS)
            y3 = _add_parts(sums_ptr, out_row + HALF + 8, token, num_rows, num_tokens, PARTS)
            _store(y_ptr, y0, y1, y2, y3, out_row, token, num_rows, num_tokens, HALF)
    else:
        _store(y_ptr, y0, y1, y2, y3, out_row, token, num_rows, num_tokens, HALF)


@triton.jit
def _prefetch(pointers):
    """The cache lines at `pointers` into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _integers(words, EXACT32: tl.constexpr):
    """Words [R, C] -> eight [R, C]: of each word the weights in bits 4 i (i = 0..3), then those in bits 16 + 4 i."""
    if EXACT32:
        a0, a1, a2, a3 = _nibble(words, 0), _nibble(words, 4), _nibble(words, 8), _nibble(words, 12)
        b0, b1, b2, b3 = _nibble(words, 16), _nibble(words, 20), _nibble(words, 24), _nibble(words, 28)
    else:
        # Of two words at a time: the low halves in one register, the high halves in another, and of each register one
        # nibble a half at a time made bf16 (128 + nibble, then - 136; fma because sm_80 has no subtraction of bf16x2).
        a0, a1, a2, a3, b0, b1, b2, b3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, one, less;
            mov.b32 one, 0x3f803f80;
            mov.b32 less, 0xc308c308;
            prmt.b32 low, $8, $9, 0x5410;
            prmt.b32 high, $8, $9, 0x7632;
            lop3.b32 $0, low, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $4, high, 0x000f000f, 0x43004300, 0xea;
            shr.u32 low, low, 4;
            shr.u32 high, high, 4;
            lop3.b32 $1, low, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $5, high, 0x000f000f, 0x43004300, 0xea;
            shr.u32 low, low, 4;
            shr.u32 high, high, 4;
            lop3.b32 $2, low, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $6, high, 0x000f000f, 0x43004300, 0xea;
            shr.u32 low, low, 4;
            shr.u32 high, high, 4;
            lop3.b32 $3, low, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $7, high, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, $0, one, less;
            fma.rn.bf16x2 $1, $1, one, less;
            fma.rn.bf16x2 $2, $2, one, less;
            fma.rn.bf16x2 $3, $3, one, less;
            fma.rn.bf16x2 $4, $4, one, less;
            fma.rn.bf16x2 $5, $5, one, less;
            fma.rn.bf16x2 $6, $6, one, less;
            fma.rn.bf16x2 $7, $7, one, less;
            }
            """,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [words],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    return a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit
def _nibble(words, place: tl.constexpr):
    return (((words >> place) & 0xF) - 8).to(tl.float32)


@triton.jit
def _dot(a, b, x0, x1):
    """A group's sum: [R, C] x [C, M], both halves of the words, in one chain."""
    return tl.dot(b, x1, tl.dot(a, x0, input_precision="ieee"), input_precision="ieee")


@triton.jit
def _scale(scale_at, inside):
    """[R] bf16 -> [R, 1] fp32, by bits: so subnormal scales survive in the interpreter, too."""
    bits = tl.load(scale_at, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _store(out_ptr, y0, y1, y2, y3, out_row, token, num_rows, num_tokens, HALF: tl.constexpr):
    """Four [R, BLOCK_M] fp32, of the row classes i of a block -> [M, N]."""
    dtype = out_ptr.dtype.element_ty
    at = out_ptr + token[None, :] * num_rows + out_row[:, None]
    present = (token < num_tokens)[None, :]
    tl.store(at, y0.to(dtype), mask=present & (out_row < num_rows)[:, None])
    tl.store(at + 8, y1.to(dtype), mask=present & (out_row + 8 < num_rows)[:, None])
    tl.store(at + HALF, y2.to(dtype), mask=present & (out_row + HALF < num_rows)[:, None])
    tl.store(at + HALF + 8, y3.to(dtype), mask=present & (out_row + HALF + 8 < num_rows)[:, None])


@triton.jit
def _add_parts(sums_ptr, out_row, token, num_rows, num_tokens, PARTS: tl.constexpr):
    """[PARTS, M, N] -> this tile's [R, BLOCK_M], parts added in their order. Past L1: other programs wrote them."""
    at = sums_ptr + token[None, :] * num_rows + out_row[:, None]
    mask = (token < num_tokens)[None, :] & (out_row < num_rows)[:, None]
    total = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    for part in range(1, PARTS):
        total += tl.load(at + part * num_tokens * num_rows, mask=mask, other=0.0, cache_modifier=".cg")
    return total

"""INT4 weights (W4A16): integers -8..7, symmetric, one bf16 scale for each group of input features of a row.

Two forms of the same bits. On disk (`compressed-tensors`, "pack-quantized"): int32 [N, K / 8], the lowest nibble the
lowest input feature, a nibble is the integer + 8; scales [N, K / group]. In memory (`Int4Weight`): the words are laid
so that 16 bytes of each of a warp's 32 lanes are the operands of matrix instructions, with nothing left to shuffle.
`arrange` is the one definition of that order.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

GROUPS = (32, 128)
# Rows and input features of the block that one 16-byte load a lane of a warp brings.
BLOCK = 32
_NIBBLES = 8  # of a 32-bit word
_ZEROS = 0x88888888 - (1 << 32)  # a word of eight zeros
_BYTES_AT_ONCE = 16 << 20  # of a stack that is put in order: a few launches a layer, and little memory beside it


@dataclass(frozen=True)
class Int4Weight:
    """A weight [num_rows, in_features] in the order of the kernels, in B blocks of 32 rows; zeros fill the last.

    Args:
        words: [B, K / 32, 8, 16] int32. Word [b, c, g, j], bits 16 e + 4 i .. + 3: the weight of row 8 i + g of block b
            and of input feature 32 c + 2 j + e, plus 8 (g in 0..7, j in 0..15, i in 0..3, e in 0..1).
        scales: [B, K / group, 8, 4] bf16, [b, c, g, i] of row 8 i + g of block b.
        num_rows: output features.
        half: which rows make a block: 16 that follow each other, and those `half` rows behind them. 16: 32 rows in a
            row. Half a head: a rotation's pairs lie in one thread; the intermediate width: so do gate and up.
        cuda: its products run in CUDA C++, where they are on a card; else in Triton. Set when a model has been loaded.
    """

    words: torch.Tensor
    scales: torch.Tensor
    num_rows: int
    half: int = 16
    cuda: bool = False

    @property
    def in_features(self) -> int:
        return self.words.shape[1] * BLOCK

    @property
    def group(self) -> int:
        """Input features that share a scale; 0 where a rank holds no feature."""
        return self.in_features // max(1, self.scales.shape[1])

    @property
    def shape(self) -> torch.Size:
        """[N, K], as of the weight it stands for."""
        return torch.Size((self.num_rows, self.in_features))

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes


def pack(integers: torch.Tensor) -> torch.Tensor:
    """Integers -8..7 [N, K] (any integer dtype, K a multiple of 8) -> their form on disk [N, K / 8] int32."""
    nibbles = (integers + 8).unflatten(1, (-1, _NIBBLES))  # [N, K] -> [N, K / 8, 8]
    return _join(nibbles.unbind(-1))


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The form on disk [N, K / 8] int32 -> integers -8..7 [N, K] int8."""
    return (torch.stack(_split(packed), dim=-1).flatten(1) - 8).to(torch.int8)  # [N, K / 8, 8] -> [N, K]


def dequantise(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Integer x scale, exact.

    Args:
        packed: [N, K / 8] int32, the form on disk.
        scale: [N, K / group] bf16.

    Returns:
        [N, K] fp32.
    """
    grouped = unpack(packed).unflatten(1, (scale.shape[1], -1))  # [N, K] -> [N, K / group, group]
    return (grouped.float() * scale.float()[..., None]).flatten(1)


def arrange(packed: torch.Tensor, scale: torch.Tensor, half: int = 16) -> Int4Weight:
    """From the form on disk to that of the kernels, on the device of `packed`.

    Args:
        packed: [N, K / 8] int32.
        scale: [N, K / group] bf16; group one of `GROUPS`.
        half: as in `Int4Weight`; N is a multiple of 2 half, but for half = 16.

    Raises ValueError for shapes, dtypes or a group that do not belong together.
    """
    check(packed, scale)
    num_rows = packed.shape[0]
    if half % 16 or (half != 16 and num_rows % (2 * half)):
        raise ValueError(f"{num_rows} rows, half {half}: expected a multiple of 16, and rows a multiple of twice that")
    missing = -num_rows % BLOCK
    words = _words(F.pad(packed, (0, 0, 0, missing), value=_ZEROS), half)
    return Int4Weight(words, _scales(F.pad(scale, (0, 0, 0, missing)), half), num_rows, half)


def arrange_stack(packed: torch.Tensor, scale: torch.Tensor, count: int, half: int = 16) -> Int4Weight:
    """`arrange` for `count` weights of equal shape below each other, some at a time, in the memory of the arguments.

    Args:
        packed: [count * N, K / 8] int32, contiguous; overwritten. N a multiple of 32.
        scale: [count * N, K / group] bf16, contiguous; overwritten.
        count: weights.
        half: as in `arrange`.

    Raises ValueError as `arrange`, before anything is overwritten.
    """
    check(packed, scale)
    num_rows = packed.shape[0] // count
    if packed.shape[0] % count or num_rows % BLOCK or num_rows % (2 * half):
        raise ValueError(
            f"{packed.shape[0]} rows of {count} weights, half {half}: expected whole blocks of {BLOCK} rows each"
        )
    # Two weights in order below each other are the order of both: no row leaves its 2 half rows.
    at_once = num_rows * max(1, _BYTES_AT_ONCE // max(1, num_rows * packed.shape[1] * 4))
    for words, scales in zip(packed.split(at_once), scale.split(at_once), strict=True):
        words.copy_(_words(words, half).view(words.shape))
        scales.copy_(_scales(scales, half).view(scales.shape))
    return arranged(packed, scale, half)


def _words(packed: torch.Tensor, half: int) -> torch.Tensor:
    """The words of `Int4Weight` of [N, K / 8] int32, N a multiple of 2 half: [N / 32, K / 32, 8, 16], in new memory.

    A byte on disk holds e = 0 and e = 1 of one j; a byte of a word holds i and i + 1 of one e. So nibbles change places
    between two rows, 8 apart, and then whole bytes do.
    """
    # [N, K / 8] -> [segment, second half?, 16 rows, 8 rows (odd i?), g, c, byte = j]; i = 2 * second half + odd
    segments, chunks = packed.shape[0] // (2 * half), packed.shape[1] // 4
    rows = packed.contiguous().view(torch.uint8).view(segments, 2, half // 16, 2, 8, chunks, 16)
    even, odd = rows.unbind(3)
    words = torch.empty(segments, half // 16, chunks, 8, 16, 2, 2, dtype=torch.uint8, device=packed.device)
    low, high = words.permute(5, 0, 6, 1, 3, 2, 4)  # [s, t, c, g, j, e, second] -> e, [s, second, t, g, c, j]
    low.copy_(even & 0x0F | odd << 4)
    high.copy_(even >> 4 | odd & 0xF0)
    words = words.view(packed.shape[0] // BLOCK, chunks, 8, 64)  # [s, t, c, g, j, e, second] -> [b, c, g, bytes]
    return words.view(torch.int32)  # [b, c, g, j]


def _scales(scale: torch.Tensor, half: int) -> torch.Tensor:
    """The scales of `Int4Weight` of [N, K / group], N a multiple of 2 half: [N / 32, K / group, 8, 4]."""
    segments, groups = scale.shape[0] // (2 * half), scale.shape[1]
    rows = scale.view(segments, 2, half // 16, 2, 8, groups)  # [s, second, t, odd, g, group]
    rows = rows.permute(0, 2, 5, 4, 1, 3).contiguous()  # [s, t, group, g, second, odd]
    return rows.view(scale.shape[0] // BLOCK, groups, 8, 4)  # [b, group, g, i]


def arranged(packed: torch.Tensor, scale: torch.Tensor, half: int = 16) -> Int4Weight:
    """Memory of the form on disk that holds words and scales in the order of the kernels already, as the weight.

    Args:
        packed: [N, K / 8] int32, contiguous, N and K multiples of 32.
        scale: [N, K / group] bf16, contiguous.
        half: as in `arrange`.
    """
    blocks, chunks = packed.shape[0] // BLOCK, packed.shape[1] * _NIBBLES // BLOCK
    words = packed.view(blocks, chunks, 8, 16)  # [N, K / 8] -> [b, c, g, j]
    return Int4Weight(words, scale.view(blocks, -1, 8, 4), packed.shape[0], half)  # [N, K / group] -> [b, c, g, i]


def disarrange(weight: Int4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `arrange`: (packed [N, K / 8] int32, scale [N, K / group] bf16)."""
    rows, scales = _rows(weight)
    return pack(rows - 8), scales.contiguous()


def matrix(weight: Int4Weight) -> torch.Tensor:
    """Integer x scale, exact: [N, K] fp32."""
    rows, scales = _rows(weight)
    grouped = (rows - 8).unflatten(1, (max(1, scales.shape[1]), -1))  # [N, K] -> [N, K / group, group]
    return (grouped.float() * scales.float()[..., None]).flatten(1)


def _rows(weight: Int4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """(nibbles 0..15 [N, K] int8, scales [N, K / group] bf16), rows and features in their own order."""
    blocks, chunks = weight.words.shape[:2]
    nibbles = torch.stack(_split(weight.words), dim=-1)  # [b, c, g, j] -> [b, c, g, j, (e i)]
    nibbles = nibbles.view(blocks, chunks, 8, 16, 2, 4).permute(0, 5, 2, 1, 3, 4)  # -> [b, i, g, c, j, e]
    rows = _from_blocks(nibbles.reshape(blocks * BLOCK, chunks * BLOCK), weight.half)
    scales = weight.scales.permute(0, 3, 2, 1).reshape(blocks * BLOCK, -1)  # [b, c, g, i] -> [b, i, g, c]
    return rows[: weight.num_rows], _from_blocks(scales, weight.half)[: weight.num_rows]


def _from_blocks(rows: torch.Tensor, half: int) -> torch.Tensor:
    """Rows [N, ...] in the order of the blocks (16, and the 16 that lie `half` behind them) -> in their own."""
    segments = rows.shape[0] // (2 * half)
    return rows.unflatten(0, (segments, half // 16, 2, 16)).transpose(1, 2).flatten(0, 3)


def check(packed: torch.Tensor, scale: torch.Tensor) -> None:
    """Raises ValueError unless the two are one weight: shapes, dtypes, a known group. No number is looked at."""
    if packed.dtype != torch.int32 or packed.dim() != 2:
        raise ValueError(f"packed weight is {packed.dtype} {list(packed.shape)}, expected int32 [N, K / 8]")
    if scale.dtype != torch.bfloat16 or scale.dim() != 2 or scale.shape[0] != packed.shape[0]:
        raise ValueError(
            f"scale is {scale.dtype} {list(scale.shape)}, expected bfloat16 [{packed.shape[0]}, K / group]"
        )
    features = packed.shape[1] * _NIBBLES
    if not features and not scale.shape[1]:
        return  # of a rank that holds none
    if scale.shape[1] == 0 or features % scale.shape[1] or features // scale.shape[1] not in GROUPS:
        raise ValueError(f"{scale.shape[1]} scales a row of {features} features, expected groups of {GROUPS}")


def _join(nibbles: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Eight tensors of 0..15, the lowest nibble first -> words of their shape, int32."""
    words = torch.zeros(nibbles[0].shape, dtype=torch.int32, device=nibbles[0].device)
    for place, nibble in enumerate(nibbles):
        words |= nibble.to(torch.int32) << (4 * place)
    return words


def _split(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The eight nibbles of each word, 0..15, the lowest first, each of the words' shape, int8."""
    return tuple(((words >> (4 * place)) & 0xF).to(torch.int8) for place in range(_NIBBLES))

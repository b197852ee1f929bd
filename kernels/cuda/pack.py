"""Weights in the order in which the kernels read them: repacked once, when a model is loaded."""

from dataclasses import dataclass, field
from enum import Enum

import torch


class RowOrder(Enum):
    """In which order the rows of a weight [N, K] stand in its packed form, in tiles of 16.

    ROWS: as they are. GATE_UP: 8 gate rows, then the 8 up rows of the same index. HEADS: within each head 8 rows of its
    first half, then the 8 that a rotation pairs with them. So a tile holds whole pairs.
    """

    ROWS = "rows"
    GATE_UP = "gate_up"
    HEADS = "heads"


@dataclass(eq=False)
class PackedWeight:
    """A weight [N, K] as the matrix unit takes it.

    Args:
        data: [tiles, K / 32, 2, 32, 8] bf16: of each tile of 16 rows and each chunk of 32 k, for two MMAs what lane
            4 g + t has in its four registers: from k = 32 chunk + 8 t + 4 mma two elements of row g, two of row g + 8,
            and the next two of each. Rows past the end are zero; the number of tiles is even.
        order: of the rows.
        shape: (N, K).
        head_dim: rows of a head (HEADS).
        counter: [1] int32, zero but while a product runs that hands out its tiles by it; so products over one weight
            run one after the other, on one stream.
    """

    data: torch.Tensor
    order: RowOrder
    shape: tuple[int, int]
    head_dim: int = 0
    counter: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.counter = torch.zeros(1, dtype=torch.int32, device=self.data.device)


def pack(weight: torch.Tensor, order: RowOrder = RowOrder.ROWS, head_dim: int = 0) -> PackedWeight:
    """Args: weight: [N, K] bf16, K a multiple of 32; head_dim: with HEADS, a multiple of 32.

    Raises:
        ValueError: another dtype or shape.
    """
    n, k = weight.shape
    if weight.dtype != torch.bfloat16 or n == 0 or k == 0 or k % 32:
        raise ValueError(f"weight {weight.dtype} {tuple(weight.shape)}; expected bf16 [N, K], K a multiple of 32")
    rows = _rows(order, n, head_dim).to(weight.device)  # [16 tiles]
    data = weight.new_zeros(rows.shape[0] // 16, k // 32, 2, 8, 4, 2, 2, 2)
    # [16 tiles, K] -> [tiles, half, g, chunk, t, mma, pair, 2] -> [tiles, chunk, mma, g, t, pair, half, 2]
    source = weight.index_select(0, rows.clamp_min(0)).view(-1, 2, 8, k // 32, 4, 2, 2, 2)
    data.copy_(source.permute(0, 3, 5, 2, 4, 6, 1, 7))
    absent = (rows < 0).view(-1, 1, 1, 2, 8).transpose(3, 4)  # [16 tiles] -> [tiles, 1, 1, g, half]
    data.masked_fill_(absent[:, :, :, :, None, None, :, None], 0)  # -> [tiles, 1, 1, g, 1, 1, half, 1]
    # [.., g, t, pair, half, 2] -> [.., lane, 8]
    return PackedWeight(data.flatten(5, 7).flatten(3, 4), order, (n, k), head_dim)


def unpack(packed: PackedWeight) -> torch.Tensor:
    """The weight that was packed: [N, K]."""
    n, k = packed.shape
    rows = _rows(packed.order, n, packed.head_dim).to(packed.data.device)
    data = packed.data.unflatten(4, (2, 2, 2)).unflatten(3, (8, 4))  # [tiles, chunk, mma, g, t, pair, half, 2]
    data = data.permute(0, 6, 3, 1, 4, 2, 5, 7).reshape(
        -1, k
    )  # [tiles, half, g, chunk, t, mma, pair, 2] -> [16 tiles, K]
    weight = data.new_empty(n, k)
    weight[rows[rows >= 0]] = data[rows >= 0]
    return weight


def _rows(order: RowOrder, n: int, head_dim: int) -> torch.Tensor:
    """Row of the weight at each packed row, -1 where there is none: [16 tiles] int64."""
    if order is RowOrder.GATE_UP:
        if n % 2:
            raise ValueError(f"{n} gate and up rows; expected an even number")
        gate = _padded(n // 2, 16).view(-1, 8)  # [tiles, 8]
        up = torch.where(gate < 0, -1, gate + n // 2)
        return torch.stack((gate, up), 1).flatten()  # [tiles, 2, 8] -> [16 tiles]
    if order is RowOrder.HEADS:
        if head_dim <= 0 or head_dim % 32 or n % head_dim:
            raise ValueError(f"{n} rows in heads of {head_dim}; expected whole heads, their size a multiple of 32")
        return torch.arange(n).view(-1, 2, head_dim // 16, 8).transpose(1, 2).flatten()  # [heads, 2, d / 16, 8]
    return _padded(n, 32)


def _padded(n: int, multiple: int) -> torch.Tensor:
    """0 to n - 1, then -1 up to a multiple."""
    rows = torch.arange(-(-n // multiple) * multiple)
    return torch.where(rows < n, rows, -1)

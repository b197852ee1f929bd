"""Packed weights: every row where the matrix unit wants it, and what cannot be packed."""

import pytest
import torch

from slipstream.kernels.cuda import pack as packing
from slipstream.kernels.cuda.pack import RowOrder


@pytest.mark.parametrize(
    ("order", "n", "head_dim"),
    [(RowOrder.ROWS, 40, 0), (RowOrder.ROWS, 64, 0), (RowOrder.GATE_UP, 72, 0), (RowOrder.HEADS, 192, 64)],
)
def test_packed_weights_hold_every_row_where_the_matrix_unit_wants_it(order: RowOrder, n: int, head_dim: int) -> None:
    weight = torch.randn(n, 96).bfloat16()
    packed = packing.pack(weight, order, head_dim)
    assert packing.unpack(packed).equal(weight)
    assert packed.data.shape[0] % 2 == 0
    assert packed.data.is_contiguous()
    tile, chunk, mma, g, t, pair, half = 1, 2, 1, 3, 2, 0, 1
    row = 16 * tile + 8 * half + g  # of the weight
    if order is RowOrder.GATE_UP:
        row = n // 2 + 8 + g  # up rows of the second 8
    elif order is RowOrder.HEADS:
        row = 32 + 8 + g  # the second half of the first head
    register = packed.data[tile, chunk, mma, 4 * g + t, 4 * pair + 2 * half :][:2]
    assert register.equal(weight[row, 32 * chunk + 8 * t + 4 * mma + 2 * pair :][:2])
    assert int((packed.data != 0).sum()) == int((weight != 0).sum())  # nothing but the weight and zeros


def test_what_cannot_be_packed_is_refused() -> None:
    for weight, order, head_dim in (
        (torch.zeros(16, 48).bfloat16(), RowOrder.ROWS, 0),
        (torch.zeros(16, 64), RowOrder.ROWS, 0),
        (torch.zeros(15, 64).bfloat16(), RowOrder.GATE_UP, 0),
        (torch.zeros(96, 64).bfloat16(), RowOrder.HEADS, 48),
        (torch.zeros(96, 64).bfloat16(), RowOrder.HEADS, 64),
    ):
        with pytest.raises(ValueError, match="expected"):
            packing.pack(weight, order, head_dim)

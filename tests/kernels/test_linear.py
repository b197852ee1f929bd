"""The linear layer against fp64, and its promise about rows."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.kernels.linear import linear
from slipstream.kernels.row_invariance import ROW_COUNTS, probe


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 31, 32, 33, 34, 35, 64, 67])
def test_linear_is_the_matrix_product(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=generator).to(dtype)
    weight = (torch.randn(40, 96, generator=generator) / 10).to(dtype)
    want = (x.double() @ weight.double().T).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight), want, atol=1e-5, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_linear_keeps_leading_axes() -> None:
    x, weight = torch.randn(2, 35, 8), torch.randn(5, 8)
    with torch.no_grad():
        for part in (x, x[:, :1], x[:1, :3], x[0, 0]):
            assert linear(part, weight).shape == (*part.shape[:-1], 5)


def test_no_rows_give_no_rows() -> None:
    """A step of the evaluation that no answer is long enough for."""
    with torch.no_grad():
        assert linear(torch.randn(0, 8), torch.randn(5, 8)).shape == (0, 5)
        assert linear(torch.randn(2, 0, 8), torch.randn(5, 8)).shape == (2, 0, 5)


def test_gradients_flow() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(3, -1))
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(5, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 64), (192, 576), (96, 1536)])
def test_a_rows_bits_do_not_depend_on_its_neighbours(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """At any place and in any layout, wherever the library itself is steady from 4 to 32 rows."""
    generator = torch.Generator().manual_seed(77)
    weight = torch.randn(shape, generator=generator).to(dtype)
    x = torch.randn(70, shape[1], generator=generator).to(dtype)
    half = shape[1] // 2
    order = torch.randperm(half, generator=generator)
    weight[:, half:], x[:, half:] = -weight[:, order], x[:, order]  # only rounding is left of a sum
    with torch.no_grad():
        by_library = F.linear(x[:32], weight)
        if any(not torch.equal(F.linear(x[:rows], weight), by_library[:rows]) for rows in range(4, 32)):
            pytest.skip("on this CPU the library's own matrix path changes with the number of rows")
        assert probe(dtype, [shape]).invariant
        alone = torch.cat([linear(row[None], weight) for row in x])
        assert (alone != 0).float().mean() > 0.2  # rounding did leave something to compare
        for count in (*ROW_COUNTS, 70):
            for start in range(0, 70 - count + 1, 5):
                assert torch.equal(linear(x[start : start + count], weight), alone[start : start + count])
        assert torch.equal(linear(x.view(2, 35, -1), weight).view(70, -1), alone)

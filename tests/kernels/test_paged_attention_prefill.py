"""The prefill kernel against softmax written out in fp64, and the bits of a row however its prompt was cut."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

prefill = pytest.importorskip("slipstream.kernels.gpu.prefill_attention")
_HERE = Path(__file__)


@pytest.fixture(scope="module")
def paged(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_test_module(_HERE.with_name("paged_case.py"))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    ("starts", "num_rows", "heads", "kv_heads", "head_dim", "dtype", "window"),
    [
        ([0], 37, 2, 1, 16, torch.float32, None),
        ([0, 21], 23, 6, 2, 16, torch.float32, None),
        ([30], 20, 4, 2, 96, torch.float32, None),
        ([3], 40, 3, 1, 16, torch.float32, 9),
        ([50], 6, 2, 1, 16, torch.float32, 1),
        ([5], 70, 2, 1, 64, torch.bfloat16, None),
    ],
)
def test_rows_are_the_softmax(
    kernel_device: str,
    paged: ModuleType,
    starts: list[int],
    num_rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    case = paged.PagedCase.of([s + num_rows for s in starts], kv_heads, head_dim, dtype, kernel_device)
    positions = paged.rows_at(starts, num_rows, kernel_device)
    q = case.queries(positions, heads)
    got = prefill.prefill_attention(q, case.cache, case.table, positions, 0.2, window)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(got.double(), case.softmax(q, positions, 0.2, window), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 13])
def test_a_row_keeps_its_bits_however_the_prompt_is_cut(
    kernel_device: str, paged: ModuleType, window: int | None
) -> None:
    """In one piece, in uneven chunks that end in padding, and beside another request."""
    case = paged.PagedCase.of([61, 40], 1, 16, torch.float32, kernel_device)
    positions = paged.rows_at([0, 0], 61, kernel_device)
    positions[1, 40:] = -1
    q = case.queries(positions, 3)

    def attend(requests: slice, start: int, stop: int, padding: int) -> torch.Tensor:
        at = torch.nn.functional.pad(positions[requests, start:stop], (0, padding), value=-1)
        rows = torch.nn.functional.pad(q[requests, start:stop], (0, 0, 0, 0, 0, padding), value=9.0)
        got = prefill.prefill_attention(rows, case.cache, case.table[requests], at, 0.3, window)
        assert torch.equal(got[at < 0], torch.zeros_like(got[at < 0]))
        return got[:, : stop - start]

    first = slice(0, 1)
    whole = attend(first, 0, 61, 0)
    cuts = [(0, 17), (17, 18), (18, 45), (45, 61)]
    assert torch.equal(torch.cat([attend(first, a, b, 7) for a, b in cuts], dim=1), whole)
    assert torch.equal(attend(slice(0, 2), 0, 61, 2)[:1], whole)

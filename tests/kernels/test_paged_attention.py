"""Paged attention against a loop over rows, heads and positions in fp64."""

import math

import pytest
import torch

from slipstream.kernels.paged_attention import paged_attention, plan_rows, write_kv

BLOCK_SIZE = 4


def attention_by_loop(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """q [B, R, heads, d]; keys[b], values[b] [T, kv_heads, d] by position -> [B, R, heads, d] fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[2] // keys[0].shape[1]
    for b in range(q.shape[0]):
        for r in range(q.shape[1]):
            last = int(positions[b, r])
            if last < 0:
                continue  # padding
            seen = slice(0 if window is None else max(0, last + 1 - window), last + 1)
            for head in range(q.shape[2]):
                k, v = keys[b][seen, head // group].double(), values[b][seen, head // group].double()
                weights = [math.exp(float(q[b, r, head].double() @ key) * scale) for key in k]
                out[b, r, head] = sum(w * value for w, value in zip(weights, v, strict=True)) / sum(weights)
    return out


class Case:
    """B requests with their own lengths, blocks scattered over the cache unless `contiguous`."""

    def __init__(self, batch: int, heads: tuple[int, int, int], dtype: torch.dtype, contiguous: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(batch)
        self.num_heads, self.kv_heads, self.head_dim = heads
        blocks = 6
        order = torch.arange(batch * blocks) if contiguous else torch.randperm(batch * blocks, generator=self.generator)
        self.table = 1 + order.view(batch, blocks)
        # Garbage everywhere: what is not written must not be read.
        shape = (1 + batch * blocks, BLOCK_SIZE, 2, self.kv_heads, self.head_dim)
        self.cache = torch.full(shape, 1e4, dtype=dtype)
        size = (blocks * BLOCK_SIZE, self.kv_heads, self.head_dim)
        self.keys = [self.random(*size).to(dtype) for _ in range(batch)]
        self.values = [self.random(*size).to(dtype) for _ in range(batch)]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def write(self, positions: torch.Tensor) -> None:
        index = positions.clamp(min=0)
        k = torch.stack([self.keys[b][index[b]] for b in range(len(self.keys))])  # [B, R, kv, d]
        v = torch.stack([self.values[b][index[b]] for b in range(len(self.keys))])
        write_kv(k, v, self.cache, plan_rows(self.table, positions, BLOCK_SIZE))


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 3, 8), (4, 1, 8)])
@pytest.mark.parametrize("num_rows", [1, 4, 6])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_the_loop(
    dtype: torch.dtype, batch: int, num_rows: int, heads: tuple[int, int, int], contiguous: bool
) -> None:
    case = Case(batch, heads, dtype, contiguous)
    starts = torch.tensor([7, 0, 14])[:batch, None]
    positions = starts + torch.arange(num_rows)
    before = torch.arange(14).expand(batch, -1)
    case.write(torch.where(before < starts, before, -1))
    case.write(positions)
    q = case.random(batch, num_rows, heads[0], heads[2]).to(dtype)
    got = paged_attention(q, case.cache, plan_rows(case.table, positions, BLOCK_SIZE), 0.3)
    want = attention_by_loop(q, case.keys, case.values, positions, 0.3)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [1, 3, 5, 9, 100])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_window_is_the_loop_over_it(num_rows: int, window: int) -> None:
    case = Case(3, (4, 2, 16), torch.float32)
    case.write(torch.arange(20).expand(3, -1))
    positions = torch.tensor([[7], [0], [14]]) + torch.arange(num_rows)
    q = case.random(3, num_rows, 4, 16)
    rows = plan_rows(case.table, positions, BLOCK_SIZE)
    got = paged_attention(q, case.cache, rows, 0.3, window)
    want = attention_by_loop(q, case.keys, case.values, positions, 0.3, window)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    # The same rows serve layers with and without a window.
    want = attention_by_loop(q, case.keys, case.values, positions, 0.3)
    torch.testing.assert_close(paged_attention(q, case.cache, rows, 0.3).double(), want, atol=2e-5, rtol=2e-5)


def test_a_plan_needs_no_values() -> None:
    """Of tensors without storage: nothing in it waits for the device, so that a CUDA graph can hold it."""
    table, positions = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
    rows = plan_rows(table.to("meta"), positions.to("meta"), BLOCK_SIZE, prefill=True)
    assert rows.write_index.shape == (6,)
    assert rows.prefill


def test_padding_rows_write_to_the_dummy_block_only() -> None:
    case = Case(2, (2, 1, 8), torch.float32)
    before = case.cache.clone()
    positions = torch.tensor([[5, 6, -1], [-1, -1, -1]])
    case.write(positions)
    changed = (case.cache != before).flatten(2).any(-1).nonzero().tolist()  # [blocks, block]
    block = int(case.table[0, 1])
    assert [cell for cell in changed if cell[0] != 0] == [[block, 1], [block, 2]]
    assert torch.equal(case.cache[block, 2, 0], case.keys[0][6])
    assert torch.equal(case.cache[block, 2, 1], case.values[0][6])


def test_padding_rows_leave_the_others_alone() -> None:
    case = Case(2, (4, 2, 16), torch.float32)
    case.write(torch.arange(12).expand(2, -1))
    q = case.random(2, 3, 4, 16)
    positions = torch.tensor([[8, 9, -1], [3, -1, -1]])
    got = paged_attention(q, case.cache, plan_rows(case.table, positions, BLOCK_SIZE), 0.25)
    want = attention_by_loop(q, case.keys, case.values, positions, 0.25)
    for b, r in ((0, 0), (0, 1), (1, 0)):
        torch.testing.assert_close(got[b, r].double(), want[b, r], atol=2e-5, rtol=2e-5)
    assert got.isfinite().all()


def test_a_row_sees_itself_and_nothing_behind() -> None:
    """The rule of a verify step: row i sees the root and d_1 .. d_i, and a rejected draft's key is overwritten."""
    case = Case(1, (2, 1, 8), torch.float32)
    case.write(torch.arange(10)[None])
    q = case.random(1, 3, 2, 8)
    positions = torch.tensor([[5, 6, 7]])
    rows = plan_rows(case.table, positions, BLOCK_SIZE)
    first = paged_attention(q, case.cache, rows, 0.3)
    case.keys[0][6], case.values[0][6] = 5.0, -5.0
    case.write(torch.tensor([[6]]))
    second = paged_attention(q, case.cache, rows, 0.3)
    assert torch.equal(first[0, 0], second[0, 0])
    assert not torch.equal(first[0, 1], second[0, 1])
    assert not torch.equal(first[0, 2], second[0, 2])
    want = attention_by_loop(q, case.keys, case.values, positions, 0.3)
    torch.testing.assert_close(second.double(), want, atol=2e-5, rtol=2e-5)

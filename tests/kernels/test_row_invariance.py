"""The probe must see what it is there to see."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.kernels import row_invariance
from slipstream.kernels.paged_attention import AttentionRows, paged_attention
from slipstream.kernels.row_invariance import probe


def test_probe_names_what_it_probed() -> None:
    found = probe(torch.bfloat16, [(64, 64), (32, 96)], attention=(4, 2, 16))
    if not found.invariant:
        pytest.skip(f"this CPU does not keep rows apart: {found.detail}")
    assert found.detail == "2 linear shapes and attention in torch.bfloat16 keep a row's bits for 1..48 rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_probe_sees_another_order_of_summation(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """From 6 rows on a layer sums its two halves apart: right within rounding, and not bit for bit."""

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < 6:
            return torch.cat([F.linear(row.float(), weight.float()) for row in x.split(1)]).to(x.dtype)
        a, b = x.float().chunk(2, 1), weight.float().chunk(2, 1)
        return (F.linear(a[0], b[0]) + F.linear(a[1], b[1])).to(x.dtype)

    x, weight = torch.randn(8, 64).to(dtype), torch.randn(32, 64).to(dtype)
    torch.testing.assert_close(linear(x, weight), torch.cat([linear(row[None], weight) for row in x]))
    monkeypatch.setattr(row_invariance, "linear", linear)
    found = probe(dtype, [(32, 64)])
    assert not found.invariant
    assert found.detail == f"linear 32x64 in {dtype} changes a row's bits at 6 rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_probe_sees_attention_that_looks_at_its_neighbours(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """With 9 rows or more the scale is off by a part in 200, which moves a bf16 output by an ulp here and there."""

    def attention(q: torch.Tensor, cache: torch.Tensor, rows: AttentionRows, scale: float) -> torch.Tensor:
        return paged_attention(q, cache, rows, scale * (1.005 if q.shape[1] >= 9 else 1))

    if not probe(dtype, [], attention=(4, 2, 16)).invariant:
        pytest.skip("this CPU does not keep rows apart")
    monkeypatch.setattr(row_invariance, "paged_attention", attention)
    found = probe(dtype, [], attention=(4, 2, 16))
    assert not found.invariant
    assert found.detail == f"attention of 4 heads, 2 KV heads, size 16 in {dtype} changes a row's bits at 9 rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_probe_sees_attention_that_sums_in_another_order(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """In company the two halves of the values are summed apart; in plain random data bf16 would often hide it."""

    def attention(q: torch.Tensor, cache: torch.Tensor, rows: AttentionRows, scale: float) -> torch.Tensor:
        if q.shape[1] < 3:
            return paged_attention(q, cache, rows, scale)
        first, second = cache.clone(), cache.clone()
        first[:, 8:, 1], second[:, :8, 1] = 0, 0
        return paged_attention(q, first, rows, scale) + paged_attention(q, second, rows, scale)

    monkeypatch.setattr(row_invariance, "paged_attention", attention)
    assert not probe(dtype, [], attention=(4, 2, 16)).invariant

"""Routed experts: against fp64 with exact weights, and rows that depend on nobody else."""

import pytest
import torch

from slipstream.kernels.expert_mlp import ExpertWeights, expert_mlp
from slipstream.kernels.int4 import arrange, dequantise, pack

EXPERTS, HIDDEN, WIDTH, GROUP, K = 6, 64, 32, 32, 4


def stack(seed: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed [E * rows, columns / 8] and scales of random experts: -8 occurs, and scales of 0, -0.0 and subnormal."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-8, 8, (EXPERTS * rows, columns), generator=generator)
    integers[0, :8] = -8
    scale = (torch.rand(EXPERTS * rows, columns // GROUP, generator=generator) * 0.05 + 0.01).bfloat16()
    scale[1, 0], scale[2, 0], scale[3, 0] = 0.0, -0.0, 1e-39
    return pack(integers), scale


@pytest.fixture(scope="module")
def forms() -> dict[str, ExpertWeights]:
    """The same experts as INT4 and as a dense fp32 stack."""
    up, down = stack(1, 2 * WIDTH, HIDDEN), stack(2, HIDDEN, WIDTH)
    int4 = ExpertWeights(arrange(*up, WIDTH), arrange(*down), EXPERTS)
    dense = ExpertWeights(
        dequantise(*up).view(EXPERTS, 2 * WIDTH, HIDDEN), dequantise(*down).view(EXPERTS, HIDDEN, WIDTH), EXPERTS
    )
    return {"int4": int4, "dense": dense}


def rows(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:K] for _ in range(count)]).int()
    return x, ids, torch.rand(count, K, generator=generator)


def exact(x, weights, ids, gates):
    """fp64, row by row, and a bound on it: the sum of the sizes of all that is added."""
    y, sizes = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(x.shape, dtype=torch.float64)
    for m in range(len(x)):
        for j in range(ids.shape[1]):
            up, down = (w.double() for w in weights.expert(int(ids[m, j])))
            gate, other = (up @ x[m].double()).chunk(2)
            inner = torch.nn.functional.silu(gate) * other
            y[m] += gates[m, j].double() * (down @ inner)
            sizes[m] += gates[m, j].double() * (down.abs() @ inner.abs())
    return y, sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_fp64_with_exact_weights(forms, dtype):
    x, ids, gates = rows(9, dtype)
    y64, sizes = exact(x, forms["dense"], ids, gates)
    # In bf16 what `down` reads is rounded to bf16 twice (gate and up, then their product): 2^-7 of what is added.
    bound = 2**-8 * y64.abs() + 2**-6 * sizes if dtype is torch.bfloat16 else 1e-5 * sizes
    for weights in forms.values():
        assert ((expert_mlp(x, weights, ids, gates).double() - y64).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_and_any_number_of_rows_give_the_same_bits(forms, dtype):
    x, ids, gates = rows(128, dtype)
    shared = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    together = expert_mlp(x, forms["int4"], ids, gates, shared)
    assert torch.equal(together, expert_mlp(x, forms["dense"], ids, gates, shared))
    for count in (1, 2, 3, 4, 5, 31, 33, 64):
        assert torch.equal(
            expert_mlp(x[:count], forms["int4"], ids[:count], gates[:count], shared[:count]), together[:count]
        )
    last = slice(-3, None)
    assert torch.equal(expert_mlp(x[last], forms["int4"], ids[last], gates[last], shared[last]), together[last])


def test_what_is_added_counts_once_and_before_the_rounding(forms):
    x, ids, gates = rows(3, torch.bfloat16)
    shared = torch.full_like(x, 256.0)
    plain = expert_mlp(x.float(), forms["dense"], ids, gates)
    y = expert_mlp(x.float(), forms["dense"], ids, gates, shared.float())
    assert torch.equal(y, plain + 256)

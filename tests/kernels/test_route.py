"""The router: choice by biased scores, weights by unbiased ones, groups, ties, and rows that do not see each other."""

import pytest
import torch

from slipstream.kernels.route import Routing, route, router_logits


def slow_route(logits: list[float], bias: list[float], routing: Routing) -> tuple[list[int], list[float]]:
    """One row in plain Python floats."""
    scores = [1 / (1 + torch.tensor(-value).exp().item()) for value in logits]
    size = len(scores) // routing.groups
    groups = [range(g * size, (g + 1) * size) for g in range(routing.groups)]
    best = [sum(sorted((scores[e] + bias[e] for e in group), reverse=True)[:2]) for group in groups]
    kept = sorted(range(routing.groups), key=lambda g: (-best[g], g))[: routing.groups_kept]
    allowed = [e for g in kept for e in groups[g]]
    ids = sorted(allowed, key=lambda e: (-(scores[e] + bias[e]), e))[: routing.per_token]
    weights = [scores[e] for e in ids]
    if routing.normalise:
        weights = [w / sum(weights) for w in weights]
    return ids, [w * routing.scaling for w in weights]


@pytest.mark.parametrize(
    "routing",
    [Routing(8, scaling=2.827), Routing(3, 4, 2, scaling=2.5), Routing(4, 2, 1, normalise=False)],
    ids=["kimi", "groups", "plain weights"],
)
def test_against_one_row_at_a_time_in_python(routing):
    generator = torch.Generator().manual_seed(1)
    logits, bias = torch.randn(40, 16, generator=generator), torch.randn(16, generator=generator) * 0.3
    ids, weights = route(logits, bias, routing)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    for row in range(len(logits)):
        expected, parts = slow_route(logits[row].tolist(), bias.tolist(), routing)
        assert ids[row].tolist() == expected
        assert torch.allclose(weights[row], torch.tensor(parts), rtol=1e-5)
    unbiased, _ = route(logits, torch.zeros(16), routing)
    assert (unbiased.sort(1).values != ids.sort(1).values).any(1).float().mean() > 0.3  # the bias matters here


def test_of_equal_experts_the_lower_id_comes_first():
    ids, weights = route(torch.zeros(2, 9), torch.tensor([0.0] * 5 + [1.0] + [0.0] * 3), Routing(4))
    assert ids.tolist() == [[5, 0, 1, 2]] * 2
    assert torch.equal(weights, torch.full((2, 4), 0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_not_rounded_and_rows_do_not_depend_on_their_number(dtype):
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(n, 96, generator=generator).to(dtype) for n in (40, 16))
    logits = router_logits(x, weight)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits.double(), x.double() @ weight.double().T, atol=1e-4)
    routing = Routing(4)
    together = route(logits, torch.zeros(16), routing)
    for count in (1, 2, 3, 5, 33):  # 16 experts: one row is less than what torch takes at once
        alone = router_logits(x[:count], weight)
        assert torch.equal(alone, logits[:count])
        for one, all_ in zip(route(alone, torch.zeros(16), routing), together, strict=True):
            assert torch.equal(one, all_[:count])

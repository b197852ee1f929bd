"""The router's CUDA C++ kernel and the lists that it makes: on an emulated GPU; with the marker gpu on a card."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.kernels import choose_experts as choose_op
from slipstream.kernels import route as route_op
from slipstream.kernels.cuda import route_launch, router
from slipstream.kernels.expert_lists import sorted_lists
from slipstream.kernels.route import Routing


@pytest.fixture
def emulator(cuda_on_cpu: ModuleType, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = cuda_on_cpu.ExpertEmulator(cuda_on_cpu.compile_experts(run_dir))
    made.install(monkeypatch)
    return made


@pytest.mark.parametrize("rows", [1, 3, 40, 128])
def test_lists_hold_every_pair_once(emulator: Any, rows: int) -> None:
    """Made by the kernel and by torch: the same, of experts that many rows chose and of ones that none did."""
    made = torch.Generator().manual_seed(rows)
    ids = torch.stack(
        [torch.rand(300, generator=made).square().mul(30 if m % 3 else 300).topk(5).indices for m in range(rows)]
    )
    ids = ids.int()
    for tile in (8, 16):
        lists, other = router.expert_lists(ids, 300, tile), sorted_lists(ids, 300, tile)
        assert emulator.faults == 0
        count = int(lists.count[0])
        assert count == int(other.count[0])
        assert count <= len(lists.entries)
        assert lists.entries[:count].equal(other.entries[:count])
        assert lists.order.equal(other.order)
        assert lists.place.equal(other.place)
        seen = set()
        for expert, first, number, _ in lists.entries[:count].tolist():
            assert 0 < number <= tile
            for place in range(first, first + number):
                row = int(lists.order[place])
                pair = row * 5 + ids[row].tolist().index(expert)
                assert int(lists.place[pair]) == place
                seen.add(pair)
        assert seen == set(range(ids.numel()))


ROUTINGS = {
    "kimi": (64, Routing(8, scaling=2.827)),
    "groups": (32, Routing(3, 4, 2, scaling=2.5)),
    "plain weights": (40, Routing(4, 2, 1, normalise=False)),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_router_is_the_twins(emulator: Any, name: str) -> None:
    experts, routing = ROUTINGS[name]
    made = torch.Generator().manual_seed(4)
    x = torch.randn(19, 320, generator=made).bfloat16()
    weight = (torch.randn(experts, 320, generator=made) * 320**-0.5).bfloat16()
    bias = torch.randn(experts, generator=made) * 0.3
    with torch.no_grad():
        choice = router.choose_experts(x, weight, bias, routing)
        logits = router.router_logits(x, weight)
        ids, gates = router.route(logits, bias, routing)
        alone = router.choose_experts(x[4:5], weight, bias, routing)
    assert emulator.faults == 0
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    want_ids, want_gates = route_op.route(logits, bias, routing)  # the twin, of the kernel's logits
    for found in (choice.ids, ids):
        assert found.equal(want_ids)
    for weights in (choice.gates, gates):
        torch.testing.assert_close(weights, want_gates, rtol=1e-6, atol=1e-7)
    assert alone.ids.equal(ids[4:5])
    assert alone.gates.equal(gates[4:5])
    assert choice.lists is not None
    lists = sorted_lists(ids, experts, choice.lists.tile)
    assert choice.lists.place.equal(lists.place)
    assert int(route_launch._arrived(x.device)) == 0


def test_of_equal_experts_the_lower_id_comes_first(emulator: Any) -> None:
    bias = torch.tensor([0.0] * 5 + [1.0] + [0.0] * 34)
    ids, gates = router.route(torch.zeros(2, 40), bias, Routing(4))
    assert ids.tolist() == [[5, 0, 1, 2]] * 2
    assert gates.equal(torch.full((2, 4), 0.25))
    assert emulator.faults == 0


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ROUTINGS)
def test_gpu_every_stage(name: str) -> None:
    """Small enough for the sanitizer: the product, the choice and the lists, together and alone."""
    experts, routing = ROUTINGS[name]
    made = torch.Generator().manual_seed(4)
    x = torch.randn(19, 320, generator=made).bfloat16()
    weight = (torch.randn(experts, 320, generator=made) * 320**-0.5).bfloat16()
    bias = torch.randn(experts, generator=made) * 0.3
    with torch.no_grad():
        choice = router.choose_experts(x.cuda(), weight.cuda(), bias.cuda(), routing)
        logits = router.router_logits(x.cuda(), weight.cuda())
        ids, gates = router.route(logits, bias.cuda(), routing)
        alone = router.choose_experts(x[4:5].cuda(), weight.cuda(), bias.cuda(), routing)
        lists = [(tile, router.expert_lists(ids, experts, tile)) for tile in (8, 16)]
    torch.testing.assert_close(logits.cpu().double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    want_ids, want_gates = route_op.route(logits.cpu(), bias, routing)
    assert (ids.cpu() == want_ids).all(1).float().mean() > 0.9  # an exponential's last bit may turn two experts round
    assert choice.ids.equal(ids)
    assert choice.gates.equal(gates)
    same = (ids.cpu() == want_ids).all(1)
    torch.testing.assert_close(gates.cpu()[same], want_gates[same], rtol=1e-5, atol=1e-6)
    assert alone.ids.equal(ids[4:5])
    for tile, found in lists:
        want = sorted_lists(ids.cpu(), experts, tile)
        count = int(want.count[0])
        assert found.entries.cpu()[:count].equal(want.entries[:count])
        assert found.order.cpu().equal(want.order)
        assert found.place.cpu().equal(want.place)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ROUTINGS)
def test_gpu_the_router_is_the_twins(name: str) -> None:
    experts, routing = ROUTINGS[name]
    made = torch.Generator().manual_seed(4)
    for width in (320, 7168):
        x = torch.randn(128, width, generator=made).bfloat16().cuda()
        weight = (torch.randn(experts, width, generator=made) * width**-0.5).bfloat16().cuda()
        bias = (torch.randn(experts, generator=made) * 0.3).cuda()
        with torch.no_grad():
            logits = router.router_logits(x, weight)
            choice = choose_op.choose_experts(x, weight, bias, routing)
        with torch.enable_grad():
            want_ids, want_gates = route_op.route(logits, bias, routing)
        assert choice.lists is not None
        # An exponential's last bit may turn the order of two experts.
        same = (choice.ids == want_ids).all(1)
        assert float(same.float().mean()) > 0.97
        torch.testing.assert_close(choice.gates[same], want_gates[same], rtol=1e-5, atol=1e-6)
        lists = sorted_lists(choice.ids, experts, choice.lists.tile)
        assert choice.lists.place.equal(lists.place)
        assert choice.lists.order.equal(lists.order)
        count = int(lists.count[0])
        assert choice.lists.entries[:count].equal(lists.entries[:count])
        for rows in (1, 2, 5, 16, 17):
            with torch.no_grad():
                few = choose_op.choose_experts(x[:rows], weight, bias, routing)
            assert few.ids.equal(choice.ids[:rows])
            assert few.gates.equal(choice.gates[:rows])

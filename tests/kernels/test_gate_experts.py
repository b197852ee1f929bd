"""The op in front of routed experts: its parts written out, whatever form its weights have."""

import torch

from slipstream.kernels.cuda.pack import RowOrder, pack
from slipstream.kernels.gate_experts import gate_experts
from slipstream.kernels.route import Routing
from slipstream.kernels.stream import Norm, Stream


def test_it_is_its_parts_written_out() -> None:
    made = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made).bfloat16()

    x, norm, router, bias = randn(7, 64), Norm(randn(64), 1e-5), randn(12, 64), torch.randn(12, generator=made)
    up, down, routing = randn(64, 64), randn(64, 32), Routing(3, scaling=2.0)
    plain = gate_experts(Stream(x), norm, router, bias, routing, (up, down))
    packed = gate_experts(
        Stream(x), norm, pack(router), bias, routing, (pack(up, RowOrder.GATE_UP), pack(down, RowOrder.ROWS))
    )
    wide = x.double()
    normed = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    torch.testing.assert_close(plain.x.double(), normed, rtol=2**-7, atol=0.0)
    scores = (plain.x.double() @ router.double().T).sigmoid()
    ids = (scores + bias).topk(3).indices
    gates = scores.gather(1, ids)
    assert plain.choice.ids.equal(ids.int())
    torch.testing.assert_close(plain.choice.gates.double(), 2 * gates / gates.sum(1, keepdim=True), rtol=1e-4, atol=0.0)
    first, second = (plain.x.double() @ up.double().T).chunk(2, dim=1)
    want = (torch.nn.functional.silu(first) * second) @ down.double().T
    assert plain.shared is not None
    assert float((plain.shared.double() - want).norm() / want.norm()) < 0.01
    assert packed.x.equal(plain.x)
    assert packed.choice.ids.equal(plain.choice.ids)
    assert packed.shared is not None
    assert packed.shared.equal(plain.shared)
    without = gate_experts(Stream(x), norm, router, bias, routing)
    assert without.shared is None
    assert without.choice.ids.equal(plain.choice.ids)

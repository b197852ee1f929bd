"""The first half of a mixture of experts: norm, router and shared expert, all of the same rows."""

from typing import NamedTuple

import torch

from slipstream.kernels.choose_experts import Choice, choose_experts
from slipstream.kernels.cuda.pack import PackedWeight
from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.norm_gate_up import norm_gate_up
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.rms_norm import norm_stream
from slipstream.kernels.route import Routing
from slipstream.kernels.stream import Norm, Stream
from slipstream.kernels.weight import Weight, as_matrix


class Gated(NamedTuple):
    """Args:
    x: [M, h], the normed rows.
    choice: the experts of every row.
    shared: [M, h], what the shared expert adds, of one rank; None where there is none.
    """

    x: torch.Tensor
    choice: Choice
    shared: torch.Tensor | None


def gate_experts(
    stream: Stream,
    norm: Norm,
    router: Weight,
    bias: torch.Tensor,
    routing: Routing,
    shared: tuple[Weight, Weight] | None = None,
) -> Gated:
    """`choose_experts` of norm(x), and the shared expert's down(silu(gate(norm(x))) * up(norm(x))).

    A packed router has both in two kernels, so it goes with a shared expert whose weights are packed as well.

    Args:
        stream: M rows of width h.
        norm: of the block.
        router: [E, h].
        bias: [E] fp32.
        routing: how experts are chosen.
        shared: gate and up [2 I, h], gate rows first, and down [h, I] of the shared expert; None: there is none.
    """
    if isinstance(router, PackedWeight) and on_gpu(stream.rows):
        from slipstream.kernels.cuda import gate

        return Gated(*gate.gate_experts(stream, norm, router, bias, routing, shared))
    x = norm_stream(stream, norm)  # [M, h]
    choice = choose_experts(x, as_matrix(router), bias, routing)
    if shared is None:
        return Gated(x, choice, None)
    up, down = shared
    return Gated(x, choice, norm_linear(Stream(norm_gate_up(stream, norm, up)), None, down))

"""A mixture of experts in the place of a plain block: router, routed experts, shared expert, and one reduce."""

from typing import Any

import torch
from torch import nn

from slipstream.engine.deepseek_config import Experts
from slipstream.engine.layers.linear import AddPartial, new_weight
from slipstream.engine.layers.mlp import GatedMLP
from slipstream.engine.tensor_parallel import Shard, TensorParallel
from slipstream.kernels.expert_mlp import ExpertWeights, expert_mlp
from slipstream.kernels.gate_experts import Gated, gate_experts
from slipstream.kernels.route import Routing
from slipstream.kernels.stream import Norm, Stream

PARTS = ("gate_proj", "up_proj", "down_proj")


class Router(nn.Module):
    """weight: [E, h]; e_score_correction_bias: [E] fp32. Whole on every rank, so that all choose alike.

    weight is a parameter until a model is loaded; then packed_weights.py may have put a `PackedWeight` there.
    """

    def __init__(self, hidden_size: int, experts: Experts, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        e = experts
        self.routing = Routing(e.per_token, e.groups, e.groups_kept, e.normalise, e.scaling)
        self.weight: Any = nn.Parameter(torch.empty(e.num, hidden_size, dtype=dtype))
        self.e_score_correction_bias = nn.Parameter(torch.empty(e.num, dtype=torch.float32))

    def forward(self, stream: Stream, norm: Norm, shared: GatedMLP | None) -> Gated:
        """M rows, the norm of their block and its shared expert -> the experts of every row, and what that one adds."""
        weight = self.weight.data if isinstance(self.weight, nn.Parameter) else self.weight
        beside = None if shared is None else (shared.gate_up_proj.weight, shared.down_proj.weight)
        return gate_experts(stream, norm, weight, self.e_score_correction_bias.data, self.routing, beside)


class RoutedExperts(nn.Module):
    """The experts of one layer, this rank's part of each one's width I.

    gate_up: [E, 2 I, h]; down: [E, h, I]: parameters until a model is loaded; then layers/quantized.py may have put
    INT4 stacks there.
    """

    def __init__(
        self, hidden_size: int, experts: Experts, parallel: TensorParallel, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.num, self.cut = experts.num, parallel.cut(experts.width)
        width = self.cut.size
        self.gate_up: nn.Parameter | None = new_weight(self.num, 2 * width, hidden_size, dtype=dtype)
        self.down: nn.Parameter | None = new_weight(self.num, hidden_size, width, dtype=dtype)
        self.int4: ExpertWeights | None = None

    @property
    def weights(self) -> ExpertWeights:
        if self.int4 is not None:
            return self.int4
        assert self.gate_up is not None
        assert self.down is not None
        return ExpertWeights(self.gate_up.data, self.down.data, self.num)

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name below this layer -> where it goes."""
        assert self.gate_up is not None
        assert self.down is not None
        width, shards = self.cut.size, {}
        for expert, (gate_up, down) in enumerate(zip(self.gate_up.data, self.down.data, strict=True)):
            shards[f"{expert}.gate_proj.weight"] = Shard.of(gate_up[:width], 0, self.cut)
            shards[f"{expert}.up_proj.weight"] = Shard.of(gate_up[width:], 0, self.cut)
            shards[f"{expert}.down_proj.weight"] = Shard.of(down, 1, self.cut)
        return shards


class MixtureOfExperts(nn.Module):
    """x + routed(norm(x)) + shared(norm(x)). Every expert's width is divided over the ranks; one reduce sums it all.

    The names of its parts are the checkpoint's: `gate` is the router.
    """

    def __init__(
        self, hidden_size: int, experts: Experts, parallel: TensorParallel, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.gate = Router(hidden_size, experts, dtype=dtype)
        self.experts = RoutedExperts(hidden_size, experts, parallel, dtype=dtype)
        self.shared_experts: GatedMLP | None = None
        if experts.shared:
            self.shared_experts = GatedMLP(hidden_size, experts.shared * experts.width, parallel, dtype=dtype)
        self.last_add = AddPartial(parallel)

    def forward(self, stream: Stream, norm: Norm) -> Stream:
        """The stream of M rows behind the block."""
        x, choice, shared = self.gate(stream, norm, self.shared_experts)
        partial = expert_mlp(x, self.experts.weights, choice.ids, choice.gates, shared, choice.lists)
        return self.last_add(partial, stream)

"""The routed experts on a card: expert_gemm.cuh's two kernels over INT4 stacks."""

import torch

from slipstream.kernels.cuda import expert_launch, expert_stream_launch, router
from slipstream.kernels.cuda.expert_launch import AS_PLANNED, Plan
from slipstream.kernels.expert_lists import ExpertLists
from slipstream.kernels.expert_mlp import ExpertWeights
from slipstream.kernels.int4 import Int4Weight


def expert_mlp(
    x: torch.Tensor,
    weights: ExpertWeights,
    ids: torch.Tensor,
    gates: torch.Tensor,
    add: torch.Tensor | None,
    lists: ExpertLists | None = None,
    plan: Plan = AS_PLANNED,
) -> torch.Tensor:
    """As `slipstream.kernels.expert_mlp.expert_mlp`. Rows of a prompt go through the same sums."""
    if not len(x):
        return torch.empty_like(x)
    gate_up, down = weights.gate_up, weights.down
    if not isinstance(gate_up, Int4Weight) or not isinstance(down, Int4Weight) or x.dtype != torch.bfloat16:
        raise ValueError(f"experts of {type(gate_up).__name__} over {x.dtype}: expected INT4 weights over bfloat16")
    width = down.in_features
    if gate_up.group != expert_launch.GROUP or down.group != expert_launch.GROUP or gate_up.half != width:
        raise ValueError(
            f"experts with groups of {gate_up.group} and {down.group}, gate and up {gate_up.half} rows apart: expected "
            f"{expert_launch.GROUP} and {width}"
        )
    if lists is None:
        lists = router.expert_lists(ids, weights.num_experts)
    x, device = x.contiguous(), x.get_device()
    gates = gates.contiguous()
    stream = len(x) >= expert_stream_launch.FEWEST_ROWS if plan.stream is None else plan.stream
    if stream and expert_stream_launch.takes(weights, lists):
        return expert_stream_launch.experts(x, weights, lists, gates, add, device, plan.pdl)
    inner = expert_launch.gate_up(x, gate_up, lists, weights.num_experts, device, plan)
    return expert_launch.down(inner, down, lists, weights.num_experts, gates, add, device, plan)

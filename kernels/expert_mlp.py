"""The routed experts of a layer: every row through the SwiGLU blocks of its own experts, weighted and summed."""

from dataclasses import dataclass, replace

import torch

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.expert_lists import ExpertLists
from slipstream.kernels.int4 import BLOCK, Int4Weight
from slipstream.kernels.linear import linear
from slipstream.kernels.silu_mul import silu_mul
from slipstream.kernels.weight import as_matrix


@dataclass(frozen=True)
class ExpertWeights:
    """All experts of a layer, this rank's part of their width I.

    Args:
        gate_up: [E, 2 I, h], an expert's gate rows before its up rows. As INT4 an `Int4Weight` of the E * 2 I rows
            below each other, `half` = I: an expert is 2 I / 32 of its blocks.
        down: [E, h, I]. As INT4 an `Int4Weight` of the E * h rows below each other, `half` = 16.
        num_experts: E.

    In INT4 both I and h are multiples of 32, so that an expert fills whole blocks and groups.
    """

    gate_up: torch.Tensor | Int4Weight
    down: torch.Tensor | Int4Weight
    num_experts: int

    def expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(gate_up [2 I, h], down [h, I]) of one expert, fp32, exact."""
        return _one(self.gate_up, index, self.num_experts), _one(self.down, index, self.num_experts)


def expert_mlp(
    x: torch.Tensor,
    weights: ExpertWeights,
    ids: torch.Tensor,
    gates: torch.Tensor,
    add: torch.Tensor | None = None,
    lists: ExpertLists | None = None,
) -> torch.Tensor:
    """y[m] = sum over j of gates[m, j] * down_e(silu(gate_e(x[m])) * up_e(x[m])) with e = ids[m, j], and `add`.

    Every product is summed in fp32 with the exact weights. gate, up and silu(gate) * up are rounded to the dtype of
    `x`; what comes out of `down` is not: it is weighted and summed in fp32, j = 0 first, then `add`, and rounded once.
    A row's bits depend on neither the number of rows nor on who else chose its experts, whichever kernels a card takes.

    Args:
        x: [M, h], normed, fp32 or bf16.
        weights: of this rank, which makes a partial sum of y where there are several.
        ids: [M, k] int32, different experts in a row.
        gates: [M, k] fp32.
        add: [M, h] in the dtype of `x`, such as the shared expert's output.
        lists: of the pairs by expert, where the router made them (`choose_experts`); else kernels make them of `ids`.

    Returns:
        [M, h] in the dtype of `x`.
    """
    if on_gpu(x):
        from slipstream.kernels.cuda import experts

        return experts.expert_mlp(x, weights, ids, gates, add, lists)
    outputs = x.new_zeros(*ids.shape, x.shape[1], dtype=torch.float32)  # [M, k, h]
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)  # [n] each
        gate_up, down = weights.expert(expert)
        inner = silu_mul(linear(x[rows].float(), gate_up).to(x.dtype))  # [n, 2 I] -> [n, I]
        outputs[rows, places] = linear(inner.float(), down)  # [n, h]
    total = torch.zeros_like(outputs[:, 0])  # [M, h]
    for place in range(ids.shape[1]):
        total += gates[:, place, None] * outputs[:, place]
    return (total if add is None else total + add.float()).to(x.dtype)


def _one(stack: torch.Tensor | Int4Weight, index: int, num_experts: int) -> torch.Tensor:
    """[N, K] fp32 of one expert of a stack of `num_experts`."""
    if isinstance(stack, torch.Tensor):
        return stack[index].float()
    rows = stack.num_rows // num_experts
    blocks = slice(index * rows // BLOCK, (index + 1) * rows // BLOCK)
    return as_matrix(replace(stack, words=stack.words[blocks], scales=stack.scales[blocks], num_rows=rows))

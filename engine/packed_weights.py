"""Weights in the order of the CUDA C++ kernels: which layers get them. Done once, when a model is on the card.

A packed weight takes the place of the plain one: no second copy is kept, but of an embedding that is the head as well,
whose table stays for looking up tokens. What the kernels do not take keeps its plain weight and its Triton kernel:
other dtypes than bf16, an input width that is no multiple of 32, queries and keys with a norm of their own.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.layers import Attention, GatedMLP, Linear
from slipstream.kernels.cuda.pack import PackedWeight, RowOrder, pack
from slipstream.kernels.matrix_products import VARIABLE, MatrixProducts, matrix_products

_CHUNK = 32  # input features and, of a head, rows that the kernels take together


@runtime_checkable
class TiedHead(Protocol):
    """A model whose head may be its embedding's table."""

    packed_head: PackedWeight | None

    @property
    def tied_head(self) -> torch.Tensor | None:
        """The table [V, h] where it is the head's weight, too."""


def pack_for_device(model: nn.Module, device: torch.device | str) -> MatrixProducts:
    """Packs the weights of `model`, which lies on `device`, where its products run in CUDA C++."""
    products = products_for(device)
    if products.kernels == "cuda":
        pack_weights(model)
    return products


def products_for(device: torch.device | str) -> MatrixProducts:
    """What runs the products there; compiles it. Raises SlipstreamError for a SLIPSTREAM_MATRIX that cannot be had."""
    try:
        return matrix_products(device)
    except ValueError as error:
        raise SlipstreamError(
            str(error), expected="kernels that this host can compile", do=f"unset {VARIABLE}, or install nvcc"
        ) from error


def pack_weights(model: nn.Module) -> None:
    """Packs every weight of `model` that the kernels take, one after the other."""
    orders: dict[Linear, tuple[RowOrder, int]] = {}  # of those that are no plain rows; rows of a head
    for module in model.modules():
        if isinstance(module, GatedMLP):
            orders[module.gate_up_proj] = RowOrder.GATE_UP, 0
        elif isinstance(module, Attention):
            orders[module.qkv_proj] = RowOrder.HEADS, 0 if module.q_norm is not None else module.heads.dim
    for layer in model.modules():
        if isinstance(layer, Linear):
            order, head_dim = orders.get(layer, (RowOrder.ROWS, 0))
            if _takes(layer.weight, order, head_dim):
                packed = pack(layer.weight.data, order, head_dim)
                del layer.weight  # a parameter's name takes nothing but parameters
                layer.weight = packed
    if isinstance(model, TiedHead) and model.tied_head is not None and _takes(model.tied_head, RowOrder.ROWS, 0):
        model.packed_head = pack(model.tied_head.data)


def describe(products: MatrixProducts, *models: nn.Module | None) -> dict[str, Any]:
    """For people and JSON: what runs the products of `models` and why, and how many of their weights are packed."""
    modules = [module for model in models if model is not None for module in model.modules()]
    weights = [module.weight for module in modules if isinstance(module, Linear)]
    copies = [head for module in modules if isinstance(head := getattr(module, "packed_head", None), PackedWeight)]
    return {
        "kernels": products.kernels,
        "reason": products.reason,
        "compile_seconds": round(products.compile_seconds, 3),
        "packed_weights": sum(isinstance(weight, PackedWeight) for weight in weights) + len(copies),
        "other_weights": sum(not isinstance(weight, PackedWeight) for weight in weights),
        # The head of tied embeddings is packed beside the table: the one weight that lies on the card twice.
        "second_copy_bytes": sum(head.data.nbytes for head in copies),
    }


def _takes(weight: Any, order: RowOrder, head_dim: int) -> bool:
    """Whether the kernels run on this weight [N, K]."""
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.bfloat16 or not weight.numel():
        return False
    if order is RowOrder.HEADS and (head_dim == 0 or head_dim % _CHUNK):
        return False
    return weight.shape[1] % _CHUNK == 0

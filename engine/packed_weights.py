"""Weights in the order of the CUDA C++ kernels: which layers get them. Done once, when a model is on the card.

A packed weight takes the place of the plain one: no second copy is kept, but of an embedding that is the head as well,
whose table stays for looking up tokens. What the kernels do not take keeps its plain weight and its Triton kernel:
other dtypes than bf16, an input width that is no multiple of 32, queries and keys with a norm of their own. A router is
packed on sm_90 and newer, where its shared expert is.

INT4 weights lie in the order of their CUDA C++ kernels as soon as they are loaded; here those that the kernels take are
marked. They are taken where the input width is a multiple of 128.
"""

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.layers import Attention, GatedMLP, Linear
from slipstream.engine.layers.experts import MixtureOfExperts, Router
from slipstream.kernels.cuda.pack import PackedWeight, RowOrder, pack
from slipstream.kernels.int4 import Int4Weight
from slipstream.kernels.matrix_products import VARIABLE, MatrixProducts, int4_products, matrix_products

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
        mark_int4_weights(model)
    return products


def mark_int4_weights(model: nn.Module) -> None:
    """Has the INT4 weights of `model` run in CUDA C++, where they can. Raises SlipstreamError as `products_for`."""
    from slipstream.kernels.cuda import int4_launch

    layers = [layer for layer in model.modules() if isinstance(layer, Linear) and isinstance(layer.weight, Int4Weight)]
    taken = [layer for layer in layers if int4_launch.takes(layer.weight)]
    try:
        if not taken or not int4_products(frozenset(layer.weight.group for layer in taken)):
            return
    except ValueError as error:
        raise _not_to_be_had(error) from error
    for layer in taken:
        layer.weight = replace(layer.weight, cuda=True)


def products_for(device: torch.device | str) -> MatrixProducts:
    """What runs the products there; compiles it. Raises SlipstreamError for a SLIPSTREAM_MATRIX that cannot be had."""
    try:
        return matrix_products(device)
    except ValueError as error:
        raise _not_to_be_had(error) from error


def _not_to_be_had(error: ValueError) -> SlipstreamError:
    return SlipstreamError(
        str(error), expected="kernels that this host can compile", do=f"unset {VARIABLE}, or install nvcc"
    )


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
            if takes(layer.weight, order, head_dim):
                packed = pack(layer.weight.data, order, head_dim)
                del layer.weight  # a parameter's name takes nothing but parameters
                layer.weight = packed
    for block in model.modules():
        if isinstance(block, MixtureOfExperts) and _gates(block):
            packed = pack(block.gate.weight.data)
            del block.gate.weight
            block.gate.weight = packed
    if isinstance(model, TiedHead) and model.tied_head is not None and takes(model.tied_head, RowOrder.ROWS, 0):
        model.packed_head = pack(model.tied_head.data)


def _gates(block: MixtureOfExperts) -> bool:
    """Whether the kernels of gate.cuh take its router and its shared expert, which is packed already."""
    from slipstream.kernels.cuda import gate_launch
    from slipstream.kernels.gpu.launch import capability

    router, shared = block.gate.weight, block.shared_experts
    beside = [] if shared is None else [shared.gate_up_proj.weight, shared.down_proj.weight]
    return (
        all(isinstance(weight, PackedWeight) for weight in beside)
        and takes(router, RowOrder.ROWS, 0)
        and gate_launch.takes(capability(), router.shape[1])
    )


def describe(products: MatrixProducts, *models: nn.Module | None) -> dict[str, Any]:
    """For people and JSON: what runs the products of `models` and why, and how many of their weights are packed."""
    modules = [module for model in models if model is not None for module in model.modules()]
    weights = [module.weight for module in modules if isinstance(module, Linear | Router)]
    copies = [head for module in modules if isinstance(head := getattr(module, "packed_head", None), PackedWeight)]
    return {
        "kernels": products.kernels,
        "reason": products.reason,
        "compile_seconds": round(products.compile_seconds, 3),
        "packed_weights": sum(_in_cuda(weight) for weight in weights) + len(copies),
        "other_weights": sum(not _in_cuda(weight) for weight in weights),
        # The head of tied embeddings is packed beside the table: the one weight that lies on the card twice.
        "second_copy_bytes": sum(head.data.nbytes for head in copies),
    }


def _in_cuda(weight: Any) -> bool:
    """Whether its products run in CUDA C++."""
    return isinstance(weight, PackedWeight) or (isinstance(weight, Int4Weight) and weight.cuda)


def takes(weight: Any, order: RowOrder, head_dim: int) -> bool:
    """Whether the kernels run on this weight [N, K]. `head_dim`: rows of a head (HEADS), 0 where it has a norm."""
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.bfloat16 or not weight.numel():
        return False
    if order is RowOrder.HEADS and (head_dim == 0 or head_dim % _CHUNK):
        return False
    return weight.shape[1] % _CHUNK == 0

"""Which code an op runs: its torch twin, its Triton kernel, or the CUDA C++ kernels of packed and INT4 weights."""

from types import ModuleType
from typing import TypeGuard

import torch

from slipstream.kernels.cuda.pack import PackedWeight
from slipstream.kernels.int4 import Int4Weight
from slipstream.kernels.weight import Weight


def on_gpu(x: torch.Tensor) -> bool:
    """The Triton kernel: for CUDA tensors, unless gradients are recorded (training runs the differentiable twin)."""
    return x.is_cuda and not torch.is_grad_enabled()


def triton_product(weight: Weight, x: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether a product runs its Triton kernel: over a plain weight that is not empty."""
    return isinstance(weight, torch.Tensor) and on_gpu(x) and weight.numel() > 0


def cuda_products(weight: Weight, x: torch.Tensor, half: int = 16) -> ModuleType | None:
    """The CUDA C++ products, for a weight in their form; None where another form, or the torch twin, is to run.

    The form of the weight decides alone: a weight goes through the same kernels however many rows there are.

    Args:
        weight: [N, K].
        x: [M, K].
        half: the order of rows (`Int4Weight.half`) that the op needs of INT4 weights; 0: it has no kernel over them.
    """
    if isinstance(weight, Int4Weight):
        taken = weight.cuda and weight.half == half and x.dtype == torch.bfloat16
    else:
        taken = isinstance(weight, PackedWeight)
    if not taken or not on_gpu(x):
        return None
    from slipstream.kernels.cuda import products

    return products

"""Which code an op runs: its torch twin, its Triton kernel, or the CUDA C++ kernels that read packed weights."""

from types import ModuleType
from typing import TypeGuard

import torch

from slipstream.kernels.cuda.pack import PackedWeight
from slipstream.kernels.weight import Weight


def on_gpu(x: torch.Tensor) -> bool:
    """The Triton kernel: for CUDA tensors, unless gradients are recorded (training runs the differentiable twin)."""
    return x.is_cuda and not torch.is_grad_enabled()


def triton_product(weight: Weight, x: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether a product runs its Triton kernel: over a plain weight that is not empty."""
    return isinstance(weight, torch.Tensor) and on_gpu(x) and weight.numel() > 0


def cuda_products(weight: Weight, x: torch.Tensor) -> ModuleType | None:
    """The CUDA C++ products, for a packed weight; None where another form, or the torch twin, is to run.

    The form of the weight decides alone: a weight goes through the same kernels however many rows there are.
    """
    if not isinstance(weight, PackedWeight) or not on_gpu(x):
        return None
    from slipstream.kernels.cuda import products

    return products

"""Whether an op runs its Triton kernel or its torch twin."""

import torch


def on_gpu(x: torch.Tensor) -> bool:
    """The Triton kernel: for CUDA tensors, unless gradients are recorded (training runs the differentiable twin)."""
    return x.is_cuda and not torch.is_grad_enabled()

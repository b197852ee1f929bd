"""Triton kernels of `kernels.sampling`."""

import torch

from slipstream.kernels.sampling_batch import SamplingBatch


def sample(logits: torch.Tensor, sampling: SamplingBatch, positions: torch.Tensor, offset: int) -> torch.Tensor:
    raise NotImplementedError("sampling on the GPU is being built")


def propose_tokens(
    logits: torch.Tensor,
    sampling: SamplingBatch,
    positions: torch.Tensor,
    target_ids: torch.Tensor,
    offset: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    raise NotImplementedError("sampling on the GPU is being built")

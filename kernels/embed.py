"""Token ids to the residual stream."""

import torch
import torch.nn.functional as F

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.stream import Stream


def embed(token_ids: torch.Tensor, table: torch.Tensor) -> Stream:
    """The stream that a model's first layer reads.

    Args:
        token_ids: [M] int64, each below V.
        table: [V, h], contiguous.
    """
    if on_gpu(table):
        from slipstream.kernels.gpu import embed as gpu

        return gpu.embed(token_ids, table)
    return Stream(F.embedding(token_ids, table))

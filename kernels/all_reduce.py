"""All-reduce whose result is the same, bit for bit, on every rank: gather, then sum in rank order."""

from typing import Any

import torch

from slipstream.kernels.all_gather import all_gather


def all_reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of every rank's tensor.

    Args:
        x: [..., n], the same shape and float dtype on every rank.
        group: a torch process group of 2 or more ranks; for CUDA tensors a `PeerExchange` or `NcclExchange`.

    Returns:
        [..., n] in the dtype of `x`: summed in fp32 in the order of the ranks, rounded once.

    Raises PeerLost when a peer is gone, or does not answer within the group's timeout.
    """
    if x.is_cuda:
        result: torch.Tensor = group.all_reduce(x)
        return result
    parts = all_gather(x, [x.shape[-1]] * group.size(), group)  # size x [..., n]
    total = parts[0].float() + parts[1].float()
    for part in parts[2:]:
        total += part.float()
    return total.to(x.dtype)

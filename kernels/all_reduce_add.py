"""Last step of a block whose input features are divided over ranks: the sum over them, added to the residual stream."""

from typing import Any

import torch

from slipstream.kernels.all_reduce import all_reduce
from slipstream.kernels.stream import Stream


def all_reduce_add(partial: torch.Tensor, stream: Stream, group: Any) -> Stream:
    """The stream with the sum over all ranks added: the sum is rounded once, then the result of the add.

    Args:
        partial: [M, h] of each rank.
        stream: M rows of width h; left as it is.
        group: as for `all_reduce`.

    Raises PeerLost as `all_reduce`.
    """
    if partial.is_cuda:
        result: Stream = group.all_reduce_add(partial, stream)
        return result
    return Stream(stream.rows + all_reduce(partial, group))


def add(summed: torch.Tensor, stream: Stream) -> Stream:
    """The same where the sum is there already, [M, h]: the bits of `all_reduce_add`, sums of squares among them."""
    if summed.is_cuda:
        from slipstream.kernels.gpu import all_reduce as gpu

        return gpu.all_reduce_add(summed, stream, None)
    return Stream(stream.rows + summed)

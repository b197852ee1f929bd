"""Token ids to the residual stream, with the angles of their positions, and a rank's part of that.

Ids are checked on the host, before they get here: those of a request by `Engine.add_request`, the draft's map of ids
when it is loaded. A kernel cannot raise; an id out of range is a row of zeros on a card, and an IndexError on the CPU.
"""

import torch
import torch.nn.functional as F

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.rotary import rotary_rows
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


def embed_at(
    token_ids: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, angles: torch.Tensor
) -> tuple[Stream, torch.Tensor, torch.Tensor]:
    """`embed` and `rotary_rows` in one: (stream, cos [M, d], sin [M, d]).

    Args:
        token_ids: [M] int64, each below V.
        table: [V, h], contiguous.
        positions: [M] int64, below P; below 0 (padding) position 0 is read.
        angles: [2, P, d], contiguous.
    """
    if on_gpu(table):
        from slipstream.kernels.gpu import embed as gpu

        return gpu.embed_at(token_ids, table, positions, angles)
    return embed(token_ids, table), *rotary_rows(angles, positions)


def embed_part(token_ids: torch.Tensor, table: torch.Tensor, start: int) -> torch.Tensor:
    """The rows of a rank that holds a part of the table: zero for the ids of others, so that the sum is the row.

    Args:
        token_ids: [M] int64, each below V.
        table: [Vr, h], contiguous: ids `start` to `start` + Vr - 1.
        start: first id that this rank holds.

    Returns:
        [M, h].
    """
    if on_gpu(table):
        from slipstream.kernels.gpu import embed as gpu

        return gpu.embed_part(token_ids, table, start)
    if not len(table):
        return table.new_zeros(*token_ids.shape, table.shape[1])
    mine = (token_ids >= start) & (token_ids < start + len(table))  # [M]
    rows = F.embedding(torch.where(mine, token_ids - start, 0), table)  # [M, h]
    return rows.masked_fill(~mine.unsqueeze(-1), 0)

"""Exchange between cards that cannot reach each other's memory: NCCL's all-gather, and the sum in rank order here."""

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.kernels.all_reduce_add import add
from slipstream.kernels.stream import Stream


class NcclExchange:
    """What `gpu.peer_exchange.PeerExchange` does, with the same bits, slower.

    Args: group: a torch process group of NCCL (tests: of gloo), 2 or more ranks.

    NCCL does not give a waiting kernel up: `lost` knows of nobody. A rank that ends is noticed by its parent.
    """

    in_kernels = False

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As `kernels.all_reduce`."""
        parts = self._gather(x.contiguous())  # [size, ..., n]
        total = parts[0].float() + parts[1].float()
        for part in parts[2:]:
            total += part.float()
        return total.to(x.dtype)

    def all_reduce_add(self, partial: torch.Tensor, stream: Stream) -> Stream:
        """As `kernels.all_reduce_add`."""
        return add(self.all_reduce(partial), stream)

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """[..., widths[own rank]] -> [..., sum of widths]."""
        widest = x.new_zeros((*x.shape[:-1], max(widths)))
        widest[..., : x.shape[-1]] = x
        parts = self._gather(widest)  # [size, ..., widest]
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    def lost(self) -> int | None:
        return None

    def be_patient(self, seconds: float) -> None:
        pass

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Contiguous x -> [size, *x.shape], in rank order."""
        flat = x.new_empty(self.size * x.numel())
        self.group._allgather_base(flat, x.reshape(-1)).wait()
        return flat.view(self.size, *x.shape)

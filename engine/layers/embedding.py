"""Embedding whose vocabulary is divided over the ranks."""

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.engine.tensor_parallel import AllReduce, Shard, TensorParallel


class VocabParallelEmbedding(nn.Module):
    """weight: this rank's rows [Vr, hidden] of the table [V, hidden]. Comes uninitialised."""

    def __init__(
        self, vocab_size: int, hidden_size: int, parallel: TensorParallel, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.cut = parallel.cut(vocab_size)
        self.weight = nn.Parameter(torch.empty(self.cut.size, hidden_size, dtype=dtype))
        self.reduce = AllReduce(parallel)

    def partial(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[...] int64 -> [..., hidden]: the rows of the ids that this rank holds, zero for the others."""
        if self.cut.size == self.cut.total:
            return F.embedding(token_ids, self.weight)
        mine = (token_ids >= self.cut.start) & (token_ids < self.cut.stop)  # [...]
        if not self.cut.size:
            return self.weight.new_zeros(*token_ids.shape, self.weight.shape[1])
        rows = F.embedding(torch.where(mine, token_ids - self.cut.start, 0), self.weight)  # [..., h]
        return rows.masked_fill(~mine.unsqueeze(-1), 0)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[...] int64 -> [..., hidden]."""
        return self.reduce(self.partial(token_ids))

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name below this layer -> where it goes."""
        return {"weight": Shard.of(self.weight.data, 0, self.cut)}

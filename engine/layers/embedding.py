"""Embedding whose vocabulary is divided over the ranks."""

import torch
from torch import nn

from slipstream.engine.tensor_parallel import AllReduce, Shard, TensorParallel
from slipstream.kernels.embed import embed, embed_part
from slipstream.kernels.stream import Stream


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
        """[M] int64 -> [M, hidden]: the rows of the ids that this rank holds, zero for the others."""
        return embed_part(token_ids, self.weight, self.cut.start)

    def lookup(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[M] int64 -> (ids [M], table [.., hidden]) for an op that reads rows: the layer's own where it is whole."""
        if self.reduce.parallel.size == 1:
            return token_ids, self.weight
        rows = self.reduce(self.partial(token_ids))  # [M, h]
        return torch.arange(len(rows), device=rows.device), rows

    def forward(self, token_ids: torch.Tensor) -> Stream:
        """[M] int64 -> the stream that a model's first layer reads."""
        if self.reduce.parallel.size == 1:
            return embed(token_ids, self.weight)
        return Stream(self.reduce(self.partial(token_ids)))

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name below this layer -> where it goes."""
        return {"weight": Shard.of(self.weight.data, 0, self.cut)}

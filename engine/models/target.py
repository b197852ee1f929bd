"""What the runner asks of a target, whatever its architecture."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.engine.kv_cache import KVCache, PagedKV
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.tensor_parallel import SplitVocabulary, TensorParallel
from slipstream.kernels.weight import Weight


@dataclass(frozen=True)
class TargetOutput:
    """What one forward pass of a target gives.

    Args:
        last: [B, R, h], slot N: the residual stream after the last layer, before the final norm.
        states: slot name -> [B, R, h], the captured slots.
    """

    last: torch.Tensor
    states: Mapping[str, torch.Tensor]


class TargetModel(Protocol):
    """A loaded target."""

    config: ModelConfig
    parallel: TensorParallel
    vocabulary: SplitVocabulary

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: PagedKV, capture: tuple[int, ...] = ()
    ) -> TargetOutput:
        """token_ids, positions [B, R] (-1 marks padding) -> states of those rows; keys and values go to `kv`."""

    def final_norm(self, last: torch.Tensor) -> torch.Tensor:
        """Slot N [..., h] -> what the head reads, [..., h]."""

    @property
    def head_weight(self) -> Weight:
        """[V, h] in the form that products read; this rank's rows of it where there are several."""

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Slot N [..., h] -> [..., V]: final norm, then head."""

    def own_logits(self, last: torch.Tensor) -> torch.Tensor:
        """The same, or this rank's columns of it, as `vocabulary.part` says."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> KVCache:
        """An empty cache of this model's shape (this rank's KV heads), in its dtype, on its device."""

"""Layers that targets and drafts are built from."""

from slipstream.engine.layers.attention import Attend, Attention, PagedAttend
from slipstream.engine.layers.embedding import VocabParallelEmbedding
from slipstream.engine.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from slipstream.engine.layers.mlp import GatedMLP
from slipstream.engine.layers.norm import RMSNorm
from slipstream.engine.layers.rotary import RotaryEmbedding

__all__ = [
    "Attend",
    "Attention",
    "ColumnParallelLinear",
    "GatedMLP",
    "Linear",
    "MergedColumnParallelLinear",
    "PagedAttend",
    "RMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
]

"""Layers that targets and drafts are built from."""

from slipstream.engine.layers.linear import Linear, MergedLinear
from slipstream.engine.layers.mlp import GatedMLP
from slipstream.engine.layers.norm import RMSNorm
from slipstream.engine.layers.rotary import RotaryEmbedding

__all__ = ["GatedMLP", "Linear", "MergedLinear", "RMSNorm", "RotaryEmbedding"]

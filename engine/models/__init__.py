"""Targets: each model is one short file built from `engine/layers/`."""

from slipstream.engine.models.target import TargetModel, TargetOutput

__all__ = ["TargetModel", "TargetOutput"]

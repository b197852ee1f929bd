"""How a draft is trained. The deployment's defaults (configs/making.py) are the only ones of what it names."""

import math
from dataclasses import dataclass

import torch

from slipstream.engine.device import DEVICES, resolve_device
from slipstream.engine.errors import SlipstreamError

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class TrainingSettings:
    """Args:
        num_steps: unrolled steps K.
        epochs: passes over the conversations; the run ends after them.
        max_seconds: the run ends after this much training time too, whichever comes first; None for no limit.
        learning_rate: at the end of warm-up.
        warmup_fraction: share of the run over which the rate rises from 0; it then falls by a cosine to 0.
        weight_decay: of matrices; norms have none.
        grad_clip_norm: bound of the gradient's norm over all parameters.
        batch_tokens: most tokens of a batch, padding included.
        step_loss_decay: w_k = decay^(k-1).
        seed: of the order of the conversations.
        checkpoint_every_seconds: longest time of training that a kill can lose.
        dtype: of the network while it computes; masters and optimiser are fp32 always.
        device: "auto", "cpu" or "cuda"; auto is the card where there is one.
        hits_every_steps: how often joint acceptance is measured on the batch at hand (it costs a pass of the target's
            whole head).

    Raises SlipstreamError for values without meaning.
    """

    num_steps: int
    epochs: int
    max_seconds: float | None
    learning_rate: float
    warmup_fraction: float
    weight_decay: float
    grad_clip_norm: float
    batch_tokens: int
    step_loss_decay: float
    seed: int
    checkpoint_every_seconds: float
    dtype: str
    device: str
    hits_every_steps: int = 20

    def __post_init__(self) -> None:
        for name in ("num_steps", "epochs", "learning_rate", "grad_clip_norm", "batch_tokens", "step_loss_decay"):
            if getattr(self, name) <= 0:
                raise SlipstreamError(
                    f"training.{name} is {getattr(self, name)}", expected="above 0", do=f"change training.{name}"
                )
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise SlipstreamError(
                f"training.max_seconds is {self.max_seconds}", expected="above 0, or null", do="change it"
            )
        if self.dtype not in _DTYPES:
            raise SlipstreamError(
                f"training.dtype is {self.dtype!r}", expected=" or ".join(_DTYPES), do="change training.dtype"
            )
        if self.device not in DEVICES:
            raise SlipstreamError(
                f"training.device is {self.device!r}", expected=" or ".join(DEVICES), do="change training.device"
            )

    @property
    def torch_device(self) -> torch.device:
        """Where it trains on this machine. Raises SlipstreamError for cuda without a card."""
        return torch.device(resolve_device(self.device))

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    def rate_at(self, fraction: float) -> float:
        """Learning rate when `fraction` (0..1) of the run is done."""
        if fraction < self.warmup_fraction:
            return self.learning_rate * fraction / self.warmup_fraction
        rest = (min(fraction, 1.0) - self.warmup_fraction) / max(1 - self.warmup_fraction, 1e-9)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * rest))

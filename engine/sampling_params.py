"""Sampling parameters of one request, checked by name: nothing is clamped, nothing ignored."""

import secrets
import sys
from dataclasses import dataclass, replace
from typing import Any

from slipstream.engine.errors import SlipstreamError

# Below this logits / T leave fp32's useful range, and the result is greedy in all but name.
MIN_TEMPERATURE = 0.001
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    temperature: 0 is greedy, else at least `MIN_TEMPERATURE`. top_k: 0 is off. top_p: 1 is off. seed: signed 64-bit, or
    None until `with_seed` draws one. max_tokens: new tokens. stop_token_ids: end the answer, beside the model's own end
    tokens; ignore_eos: pass over the model's own. logprobs: None, or how many of the most likely tokens to report
    beside the chosen one, 0..`MAX_LOGPROBS`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def validate(self) -> "SamplingParams":
        """Return self, or raise SlipstreamError naming the first bad parameter and its value."""
        if not _is_real(self.temperature) or not (self.temperature == 0 or self.temperature >= MIN_TEMPERATURE):
            raise _refusal("temperature", self.temperature, f"0 (greedy) or a finite number >= {MIN_TEMPERATURE}")
        if not _is_int(self.top_k) or self.top_k < 0 or self.top_k >= 2**63:
            raise _refusal("top_k", self.top_k, "an integer >= 0 (0 = off)")
        if not _is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise _refusal("top_p", self.top_p, "a number in (0, 1] (1 = off)")
        if self.seed is not None and (not _is_int(self.seed) or not -(2**63) <= self.seed < 2**63):
            raise _refusal("seed", self.seed, "a signed 64-bit integer, or none")
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise _refusal("max_tokens", self.max_tokens, "an integer >= 1")
        if not isinstance(self.stop_token_ids, tuple) or not all(_is_int(i) and i >= 0 for i in self.stop_token_ids):
            raise _refusal("stop_token_ids", self.stop_token_ids, "a tuple of token ids >= 0")
        if not isinstance(self.ignore_eos, bool):
            raise _refusal("ignore_eos", self.ignore_eos, "true or false")
        if self.logprobs is not None and (not _is_int(self.logprobs) or not 0 <= self.logprobs <= MAX_LOGPROBS):
            raise _refusal("logprobs", self.logprobs, f"an integer in 0..{MAX_LOGPROBS}, or none")
        return self

    def with_seed(self) -> "SamplingParams":
        """The same parameters with a seed: the given one, else one drawn now. Called once, when a request arrives."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    # compared, not converted: JSON has whole numbers that no float holds
    return (isinstance(value, float) or _is_int(value)) and abs(value) <= sys.float_info.max


def _refusal(name: str, value: Any, expected: str) -> SlipstreamError:
    return SlipstreamError(f"{name} = {value!r} is not supported", expected=expected, do=f"change or leave out {name}")

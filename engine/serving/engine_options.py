"""What an engine process is told. Imports no torch: the front checks it before the engine process starts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.engine.config import EngineConfig
from slipstream.engine.device import DEVICES, Device
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.injection import parse_injections

# More than any machine has GPUs; past it a typing error would fill the memory with processes.
MAX_RANKS = 64


@dataclass(frozen=True)
class EngineOptions:
    """What an engine process is told: directories, K, and the sizes of `EngineConfig`.

    draft: None at num_steps = 0. threads: of torch, on each rank; None is its default, and for several ranks an equal
    share of the cores. capture_slots: slots that traces hold beside the draft's. inject: faults that are put in on
    purpose, as engine.injection reads them. diagnostics: traces are asked for, so that passes that capture states tell
    whom routed rows went to, too. tensor_parallel_size: ranks that share every layer. device: auto (the card
    where there is one), cpu or cuda. choose_steps: each round's K from 0..num_steps, by what pays.
    """

    target: str
    draft: str | None
    num_steps: int
    max_running_requests: int = 8
    max_context_tokens: int = 1024
    block_size_tokens: int = 16
    prefill_chunk_tokens: int = 256
    dtype: str = "bfloat16"
    threads: int | None = None
    capture_slots: tuple[int, ...] = ()
    inject: tuple[str, ...] = ()
    diagnostics: bool = False
    tensor_parallel_size: int = 1
    device: str = "auto"
    choose_steps: bool = False

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "EngineOptions":
        """Inverse of `asdict` through JSON, which knows no tuples."""
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in value.items()}
        return cls(**fields)

    @property
    def threads_per_rank(self) -> int | None:
        """What torch is told; None: nothing."""
        if self.threads is not None or self.tensor_parallel_size == 1:
            return self.threads
        return max(1, len(os.sched_getaffinity(0)) // self.tensor_parallel_size)

    def engine_config(self, device: Device = "cpu") -> EngineConfig:
        """The sizes, on `device`: what `self.device` turned out to be."""
        return EngineConfig(
            num_steps=self.num_steps,
            max_running_requests=self.max_running_requests,
            max_context_tokens=self.max_context_tokens,
            block_size_tokens=self.block_size_tokens,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            dtype=self.dtype,
            device=device,
            choose_steps=self.choose_steps,
        )

    def check(self) -> None:
        """Sizes that can work, and a draft exactly when K > 0: neither is ignored. Raises SlipstreamError."""
        self.engine_config("cpu" if self.device == "cpu" else "cuda")
        if self.device not in DEVICES:
            raise SlipstreamError(
                f"device = {self.device!r}", expected=f"one of {', '.join(DEVICES)}", do="correct --device"
            )
        parse_injections(self.inject)
        if self.threads is not None and self.threads < 1:
            raise SlipstreamError(
                f"threads = {self.threads}",
                expected="1 or more",
                do="raise --threads, or leave it out for torch's choice",
            )
        if not 1 <= self.tensor_parallel_size <= MAX_RANKS:
            raise SlipstreamError(
                f"tensor_parallel_size = {self.tensor_parallel_size}",
                expected=f"1 to {MAX_RANKS}: each rank is a process of this machine, with torch in its memory",
                do="correct --tensor-parallel-size",
            )
        slots = self.capture_slots
        if any(slot < 0 for slot in slots) or len(set(slots)) != len(slots):
            raise SlipstreamError(
                f"capture_slots = {list(slots)}",
                expected="each slot once, from 0 (the embedding) to the target's number of layers",
                do="correct --capture-slots",
            )
        if self.num_steps > 0 and self.draft is None:
            raise SlipstreamError(
                f"num_steps is {self.num_steps}, but there is no draft",
                expected="a draft directory for K > 0",
                do="pass --draft DIR, or --num-steps 0 for no speculation",
            )
        if self.num_steps == 0 and self.draft is not None:
            raise SlipstreamError(
                f"a draft is given ({self.draft}), but num_steps is 0",
                expected="no draft for K = 0",
                do="pass --draft none, or --num-steps 1 or more",
            )

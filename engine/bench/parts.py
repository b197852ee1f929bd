"""Where a round's time goes on the device: every kernel's share, and the gaps between them."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType

from slipstream.engine.bench.generate import prompts_of
from slipstream.engine.engine import Engine
from slipstream.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class KernelTime:
    """One kernel: calls and microseconds a round. Kernels that start before their predecessor ends overlap."""

    name: str
    calls: float
    us: float


@dataclass(frozen=True)
class RoundParts:
    """One round on the device.

    Args:
        kernels: most expensive first.
        busy_us: the kernels' times together, overlap counted once.
        span_us: from the first kernel's start to the last one's end, a round.
    """

    kernels: list[KernelTime]
    busy_us: float
    span_us: float

    @property
    def gaps_us(self) -> float:
        return self.span_us - self.busy_us


def profile_rounds(engine: Engine, batch: int, rounds: int = 32, prompt_tokens: int = 128) -> RoundParts:
    """Profiles the middle of an answer: rounds alone, no prefill, no start."""
    if engine.config.device != "cuda":
        raise ValueError("the profiler's kernels are those of a card")
    prompts = prompts_of(engine, batch, prompt_tokens)
    params = SamplingParams(max_tokens=rounds * (engine.config.num_steps + 1), ignore_eos=True)
    engine.generate(prompts, params)
    before = engine.stats.rounds
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.generate(prompts, params)
        torch.cuda.synchronize()
    done = engine.stats.rounds - before
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    )
    spans = spans[len(spans) // 4 :]  # the prefill comes first
    share = len(spans) / max(1, len(spans) * 4 // 3)
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    busy, reached = 0.0, spans[0][0]
    for start, end, name in spans:
        seconds[name] += end - start
        calls[name] += 1
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    rounds_seen = done * share
    kernels = [KernelTime(name, calls[name] / rounds_seen, us / rounds_seen) for name, us in seconds.items()]
    kernels.sort(key=lambda kernel: -kernel.us)
    return RoundParts(kernels, busy / rounds_seen, (reached - spans[0][0]) / rounds_seen)

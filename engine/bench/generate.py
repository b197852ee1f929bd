"""Times the public generate call: prompts in, tokens on the host, wall time a step, and where that time went."""

import copy
import statistics
import time
from dataclasses import dataclass, fields, replace

import torch

from slipstream.engine.engine import Engine
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.stats import EngineStats

REPEATS = 5


@dataclass(frozen=True)
class Parts:
    """Milliseconds a round, on average.

    Args:
        draft, verify: on the device, by its own clock; sampling and commit belong to verify.
        rest: between launches on the device: what the host did not keep up with.
        host: what the host did beside waiting for the device.
    """

    draft: float
    verify: float
    rest: float
    host: float


@dataclass(frozen=True)
class Timing:
    """One timed case.

    Args:
        batch, num_steps: requests at a time, K.
        ms: median wall milliseconds a step (the prefill counts as one step), over the repeats.
        spread: (largest - smallest) / median of the repeats.
        steps: rounds + 1 of one repeat.
        tokens: generated in one repeat, of all requests.
        parts: of the repeats together.
        prefill_ms: of one repeat, all its prompts together, by the device's clock.
    """

    batch: int
    num_steps: int
    ms: float
    spread: float
    steps: int
    tokens: int
    parts: Parts
    prefill_ms: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self.ms * 1e-3 * self.steps)

    @property
    def round_ms(self) -> float:
        """Milliseconds a round without the prompts: on the device, and between its launches."""
        return self.parts.draft + self.parts.verify + self.parts.rest


def params_of(batch: int, new_tokens: int, temperature: float = 0.0) -> list[SamplingParams]:
    """Of `batch` requests that answer with exactly `new_tokens` tokens: greedy, or drawn with a seed for each."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=temperature)
    return [replace(params, seed=i) for i in range(batch)]


def prompts_of(engine: Engine, batch: int, tokens: int) -> list[list[int]]:
    """`batch` random prompts, the same at every call."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, engine.target.config.vocab_size, (batch, tokens), generator=generator).tolist()


def time_generate(
    engine: Engine,
    batch: int,
    prompt_tokens: int = 128,
    new_tokens: int = 256,
    repeats: int = REPEATS,
    temperature: float = 0.0,
) -> Timing:
    """Answers of exactly `new_tokens` tokens to `batch` random prompts; the first repeat is thrown away.

    Greedy answers of random weights run into each other, so that rows become alike: where that counts, as with routed
    experts, they are drawn at a temperature.
    """
    prompts, params = prompts_of(engine, batch, prompt_tokens), params_of(batch, new_tokens, temperature)
    engine.generate(prompts, params)
    seconds, steps, tokens = [], 0, 0
    before = copy.deepcopy(engine.stats)  # its counts by K go on in place
    for _ in range(repeats):
        rounds, began = engine.stats.rounds, time.perf_counter()
        answers = engine.generate(prompts, params)
        took = time.perf_counter() - began
        steps = engine.stats.rounds - rounds + 1
        tokens = sum(len(answer.token_ids) for answer in answers)
        seconds.append(took / steps)
    median = statistics.median(seconds)
    waited = engine.stats.waited_seconds - before.waited_seconds
    parts = _parts(engine.stats, before, sum(seconds) * steps - waited)
    spread = (max(seconds) - min(seconds)) / median
    prefill_ms = (engine.stats.prefill_seconds - before.prefill_seconds) / repeats * 1e3
    return Timing(batch, engine.config.num_steps, median * 1e3, spread, steps, tokens, parts, prefill_ms)


def _parts(after: EngineStats, before: EngineStats, host_seconds: float) -> Parts:
    rounds = max(1, after.rounds - before.rounds)
    names = [field.name for field in fields(Parts) if field.name != "host"]
    each = {name: getattr(after, f"{name}_seconds") - getattr(before, f"{name}_seconds") for name in names}
    return Parts(**{name: one / rounds * 1e3 for name, one in each.items()}, host=host_seconds / rounds * 1e3)

"""Short measurements of a round at several K, on one loaded target and draft."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.loader import load_target
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.stats import EngineStats
from slipstream.tasks.round_costs import RoundTime, round_time


def probe_rounds(
    target_dir: Path,
    draft_dir: Path,
    config: EngineConfig,
    num_steps: Sequence[int],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    repeats: int,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[RoundTime]:
    """Times rounds of each K, the K taking turns, forwards and backwards, so that a slow minute hits all of them.

    Args:
        target_dir, draft_dir: directories to load.
        config: sizes of the engine; its num_steps is replaced.
        num_steps: the K to measure; 0 is a plain step.
        prompts: token ids; answered `config.max_running_requests` at a time.
        max_new_tokens: tokens of an answer; the end token does not end it, so that each K takes equally many.
        repeats: measurements of each K.
        threads: of torch; None leaves them.
        progress: told (measurements done, measurements).

    Returns: one RoundTime a measurement.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    dtype: torch.dtype = getattr(torch, config.dtype)
    target = load_target(target_dir, config.dtype, config.device)
    network = load_draft(draft_dir, dtype, target_embedding=target.embed_tokens.weight).eval()
    params = SamplingParams(max_tokens=max_new_tokens, ignore_eos=True)

    def measure(k: int) -> RoundTime:
        proposer = Eagle3Proposer(network, k) if k else None
        engine = Engine(target, replace(config, num_steps=k), proposer)
        engine.generate([prompts[0]], replace(params, max_tokens=2 * k + 4))  # first touch of the caches
        engine.stats = EngineStats()
        engine.generate(prompts, params)
        stats = engine.stats
        seconds = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "rest": stats.rest_seconds}
        return round_time(k, seconds, stats.rounds)

    turns = [k for repeat in range(repeats) for k in (num_steps if repeat % 2 == 0 else list(num_steps)[::-1])]
    times = []
    for done, k in enumerate(turns, start=1):
        times.append(measure(k))
        if progress is not None:
            progress(done, len(turns))
    return times

"""Stage `tune`: which K to serve with.

A pinned K is taken as it is. `auto` measures what a round costs at each K on this machine, takes the accept length that
held-out conversations predict, and chooses the K with the highest expected speed. K = 0 is a possible answer:
speculation off, with what would be needed to turn it on.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.config import EngineConfig
from slipstream.engine.device import resolve_device
from slipstream.engine.speed_forecast import SpeedForecast, expected_speed
from slipstream.tasks.bench_prompts import benchmark_prompts
from slipstream.tasks.cleanup import check_gpus
from slipstream.tasks.facts import DRAFT, resolved_target
from slipstream.tasks.manifest import read_json, write_json
from slipstream.tasks.probe import probe_rounds
from slipstream.tasks.process import STATE_SUFFIX
from slipstream.tasks.registry import get_stage
from slipstream.tasks.replayed import read_replayed
from slipstream.tasks.round_costs import RoundTime, costs_of, losing_term, option_dict
from slipstream.tasks.stage import StageContext

CHOICE = "choice.json"
PROBE_PROMPTS = 2
PROBE_TOKENS = 32
PROBE_REPEATS = 3


def run(context: StageContext) -> dict[str, Any]:
    """Writes choice.json: num_steps, how it was chosen, why, and the forecast for every K.

    Figures: num_steps, how ("pinned" | "auto"), why, expected_speedup and candidate (the best K > 0), null when pinned.
    """
    asked = context.config.speculation.num_steps
    choice = _pinned(asked) if asked != "auto" else _measured(context)
    write_json(context.out / CHOICE, choice)
    context.say(choice["why"])
    return {key: choice[key] for key in ("num_steps", "how", "why", "candidate", "expected_speedup")}


def chosen_num_steps(tune_dir: Path) -> int:
    """K to launch with, from the finished stage."""
    return int(read_json(tune_dir / CHOICE)["num_steps"])


def _pinned(num_steps: int) -> dict[str, Any]:
    return {
        "num_steps": num_steps,
        "how": "pinned",
        "why": f"K = {num_steps}: pinned by speculation.num_steps",
        "candidate": num_steps or None,
        "expected_speedup": None,
        "options": [],
        "probes": [],
    }


def _measured(context: StageContext) -> dict[str, Any]:
    config = context.config
    if not any(context.workdir.glob(f"*{STATE_SUFFIX}")):  # else a server of ours may be on them
        check_gpus(config)
    replayed = read_replayed(context.input("train"))
    ks = [0, *(k for k in sorted(replayed) if k <= config.speculation.max_num_steps)]
    if ks[-1] < config.speculation.max_num_steps:
        context.warn(f"K above {ks[-1]} is not considered: held-out data were evaluated for {ks[-1]} steps")
    target_dir = resolved_target(context.workdir)
    tokenizer = ChatTokenizer(target_dir)
    prompts = [tokenizer.encode_chat(prompt.messages) for prompt in benchmark_prompts(config)]
    streams = config.benchmark.concurrency
    times = probe_rounds(
        target_dir,
        context.input("convert") / DRAFT,
        EngineConfig(
            max_running_requests=streams,
            max_context_tokens=config.server.max_context_tokens,
            block_size_tokens=config.server.block_size_tokens,
            prefill_chunk_tokens=config.server.prefill_chunk_tokens,
            dtype=config.server.dtype,
            device=resolve_device(config.server.device),
        ),
        ks,
        [prompts[i % len(prompts)] for i in range(max(PROBE_PROMPTS, streams))],
        max_new_tokens=PROBE_TOKENS,
        repeats=PROBE_REPEATS,
        threads=config.host.threads,
        progress=context.progress,
    )
    forecast = expected_speed(costs_of(times), {k: replayed[k].accept_length for k in ks if k})
    return choose(forecast, times)


def choose(forecast: SpeedForecast, times: list[RoundTime]) -> dict[str, Any]:
    """The choice, from expected speeds. Speculation is on only where it is expected to be faster than a plain step."""
    best = forecast.best
    candidates = [option for option in forecast.options if option.num_steps > 0]
    candidate = max(candidates, key=lambda option: option.speedup, default=None)
    if best.num_steps > 0:
        why = f"K = {best.num_steps}: {best.verdict} (expected)"
    elif candidate is None:
        why = "K = 0: speculation off, there is no draft to serve"
    else:
        needed = losing_term(candidate).why
        why = f"K = 0: speculation off. The best chain would be K = {candidate.num_steps}, and it loses by {needed}"
    return {
        "num_steps": best.num_steps,
        "how": "auto",
        "why": why,
        "candidate": candidate.num_steps if candidate else None,
        "expected_speedup": best.speedup,
        "options": [option_dict(option) for option in forecast.options],
        "probes": [asdict(time) for time in times],
    }


STAGE = get_stage("tune")

"""Stage `benchmark`: no speculation against speculation, on the same held-out prompts, interleaved in pairs.

The launched server is one side; the other side is a second server of the same deployment that differs in K alone. With
speculation on, that is K = 0. With speculation off (K = 0) it is the best chain that `tune` found, so that the report
can say what speculation would have done.

Both are loaded at the same time and one at a time works: pairs that lie seconds apart share the machine's moods, which
on a shared machine are larger than the difference in question.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.bench_client import Prompt, ask_all
from slipstream.tasks.bench_figures import figures
from slipstream.tasks.bench_pairs import Pair, Side, measure_pairs
from slipstream.tasks.bench_prompts import benchmark_prompts
from slipstream.tasks.bench_transformers import TransformersProcess
from slipstream.tasks.counters import read_settings
from slipstream.tasks.facts import resolved_target
from slipstream.tasks.machine import describe_machine
from slipstream.tasks.manifest import read_json, write_json
from slipstream.tasks.process import STATE_SUFFIX, is_alive, read_record, tail
from slipstream.tasks.registry import get_stage
from slipstream.tasks.replayed import read_replayed, replay_prompts
from slipstream.tasks.server import plan_server, running_server
from slipstream.tasks.stage import StageContext
from slipstream.tasks.tune import CHOICE

PAIRS = "pairs.jsonl"
FIGURES = "benchmark.json"
LAUNCHED, OTHER = "server", "other-side"  # names of the servers in the workdir
UNASKED_STEPS = 3  # K of the comparison when K = 0 is pinned, so that nothing was chosen
DYING_SECONDS = 3.0  # a server whose engine is gone answers for a moment longer
WARMUP_TOKENS = 16
TRANSFORMERS_PROMPTS = 3
TRANSFORMERS_TOKENS = 64


def run(context: StageContext) -> dict[str, Any]:
    """Writes pairs.jsonl (every answer with its times and counters) and benchmark.json (see bench_figures.figures).

    Figures: served_num_steps, num_steps (of the speculative side), speedup {ratio, low, high, ...}, tokens_per_second
    of both sides, accept_length, break_even, differing_prompts, transformers_ratio (null when not compared).
    """
    config = context.config
    served, launched_url = launched_server(context)
    compared = served or candidate(context)
    prompts = benchmark_prompts(config)
    with other_server(context, 0 if served else compared) as other_url:
        urls: dict[Side, str] = (
            {"baseline": other_url, "speculation": launched_url}
            if served
            else {"baseline": launched_url, "speculation": other_url}
        )
        with naming_the_dead(context):
            for url in urls.values() if config.benchmark.warmup_prompts else ():
                ask_all(url, prompts[: config.benchmark.warmup_prompts], max_tokens=WARMUP_TOKENS)
            pairs = measure_pairs(
                urls,
                prompts,
                context.out / PAIRS,
                repeats=config.benchmark.pairs,
                concurrency=config.benchmark.concurrency,
                max_tokens=config.benchmark.max_new_tokens,
                seed=config.benchmark.seed,
                progress=lambda done, total, pair: context.progress(done, total, **_pair_fields(pair)),
            )
            transformers = (
                compare_transformers(context, urls["baseline"], prompts)
                if config.benchmark.compare_transformers
                else None
            )
        settings = {side: read_settings(url) for side, url in urls.items()}
    train = context.input("train")
    same = replay_prompts(train, [prompt.id for prompt in prompts], compared, config.benchmark.max_new_tokens)
    replayed = same or read_replayed(train).get(compared)
    result = {
        **figures(pairs, compared, replayed, same_prompts=same is not None),
        "served_num_steps": served,
        "choice": read_json(context.input("tune") / CHOICE),
        "transformers": transformers,
        "row_invariance": settings["baseline"]["row_invariance"],
        "settings": {side: {k: v for k, v in told.items() if k != "stats"} for side, told in settings.items()},
        "machine": describe_machine(),
        "conditions": config.benchmark.model_dump(mode="json"),
    }
    write_json(context.out / FIGURES, result)
    if result["untimed_pairs"]:
        context.warn(f"{result['untimed_pairs']} of {len(pairs)} pairs end with their first output: not timed")
    ratio = result["speedup"]
    context.say(
        f"K = {compared}: {ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f}), {ratio['pairs']} pairs, "
        f"accept length {result['round']['accept_length']:.2f}, break-even {result['round']['break_even']:.2f}"
    )
    return {
        "served_num_steps": served,
        "num_steps": compared,
        "speedup": ratio,
        "tokens_per_second": {side: result[side]["tokens_per_second"] for side in urls},
        "accept_length": result["acceptance"]["accept_length"],
        "break_even": result["round"]["break_even"],
        "differing_prompts": result["differing_prompts"],
        "transformers_ratio": transformers["ratio"] if transformers else None,
    }


def launched_server(context: StageContext) -> tuple[int, str]:
    """(K, URL) of the server that stage launch left running. Raises SlipstreamError when it is another one by now."""
    launched = context.manifest("launch")["figures"]
    told = read_settings(launched["base_url"])
    if told.get("pid") != launched["pid"]:
        raise SlipstreamError(
            f"process {told.get('pid')} answers at {launched['base_url']}",
            expected=f"process {launched['pid']}, which stage launch started",
            do="run `slipstream stage launch CONFIG` again",
            fault="F15",
        )
    return int(told["num_steps"]), launched["base_url"]


def candidate(context: StageContext) -> int:
    """K to compare with when speculation is off: the best chain that tune found."""
    found = read_json(context.input("tune") / CHOICE)["candidate"]
    return int(found or min(UNASKED_STEPS, context.config.speculation.max_num_steps))


@contextmanager
def other_server(context: StageContext, num_steps: int) -> Iterator[str]:
    """A second server of the deployment, for the time of the measurement, on any free port."""
    plan = plan_server(context.workdir, num_steps)
    with running_server(context.config, context.workdir, plan, name=OTHER) as server:
        context.say(f"other side: K = {num_steps}, ready after {server.seconds:.1f} s")
        yield server.url


@contextmanager
def naming_the_dead(context: StageContext) -> Iterator[None]:
    """When a request fails because a server is gone, says which one, and shows its last lines."""
    try:
        yield
    except SlipstreamError as error:
        deadline = time.monotonic() + DYING_SECONDS
        while time.monotonic() < deadline:
            for name in (LAUNCHED, OTHER):
                record = read_record(context.workdir / f"{name}{STATE_SUFFIX}")
                if record is None or is_alive(record.identity):
                    continue
                raise SlipstreamError(
                    f"the server `{name}` (process {record.identity.pid}) ended during the benchmark; its last lines:\n"
                    + (tail(Path(record.log)) or "(none)"),
                    expected="a server that goes on serving",
                    do=f"read {record.log}. The pairs measured so far are kept: run the same command again to go on",
                ) from error
            time.sleep(0.1)
        raise


def compare_transformers(context: StageContext, url: str, prompts: list[Prompt]) -> dict[str, Any]:
    """Decode speed without speculation against `transformers` generate: same prompts, one stream, taking turns.

    ratio: time of transformers / our time, a token. Above 1 we are faster.
    """
    config = context.config
    model_dir = resolved_target(context.workdir)
    tokenizer = ChatTokenizer(model_dir)
    settings = read_settings(url)
    threads, device = int(settings["threads"]), str(settings["device"])
    tokens = min(TRANSFORMERS_TOKENS, config.benchmark.max_new_tokens)
    ours_ms: list[float] = []
    theirs_ms: list[float] = []
    with TransformersProcess(model_dir, config.server.dtype, threads, device) as transformers:
        for prompt in prompts[:TRANSFORMERS_PROMPTS]:
            ours = ask_all(url, [prompt], max_tokens=tokens)[0]
            theirs = transformers.decode(tokenizer.encode_chat(prompt.messages), tokens)
            if ours.decode_tokens > 0 and theirs.tokens > 0:
                ours_ms.append(1000 * ours.decode_seconds / ours.decode_tokens)
                theirs_ms.append(1000 * theirs.seconds / theirs.tokens)
    if not ours_ms:
        context.warn("transformers: no prompt had an answer of two tokens or more; nothing to compare")
        return {"ratio": None, "prompts": 0, "tokens_per_second": None}
    ratio = sum(theirs_ms) / sum(ours_ms)
    context.say(f"no speculation against transformers generate ({config.server.dtype}, one stream): {ratio:.2f}x")
    return {
        "ratio": ratio,
        "prompts": len(ours_ms),
        "tokens_per_second": 1000 * len(theirs_ms) / sum(theirs_ms),
        "ours_tokens_per_second": 1000 * len(ours_ms) / sum(ours_ms),
    }


def _pair_fields(pair: Pair | None) -> dict[str, Any]:
    """Figures beside the progress bar."""
    if pair is None:
        return {}
    fields = {}
    for name, side in (("plain", pair.baseline), ("speculation", pair.speculation)):
        if side.decode_ms:
            fields[f"{name}_tok_s"] = round(1000 * side.decode_tokens / side.decode_ms, 1)
    return fields


STAGE = get_stage("benchmark")

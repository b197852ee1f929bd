"""One rank's share of Kimi-K2.5 at TP=8, all 61 layers, on one GPU: a step's time and where it goes. By hand:

    python tests/benchmarks/kimi_rank.py [--seconds 90] [--batches 1,2,4,8,16] [--layers 61] [--rehearse]

8 heads, experts of width 256, 20,480 of the vocabulary, INT4 experts with random weights (76 GB, made on the card). It
is a model of its own: **collectives are replaced by their local part**, nothing is exchanged. The engine runs it as any
other: latent cache, prompts of 128 tokens, 256 answered at T = 1 with a seed for each, one CUDA graph a step. How many
distinct experts a layer had is counted in the very steps that were timed last; with fewer than 80 % of what independent
rows choose, a case is not recorded. A step is that of decode, prompts left out: the wall with them stands beside it.

With OUT in the environment rows go to OUT/kimi_rank.json, to be merged into h200.json. `--rehearse` tries the script on
a CPU with tiny sizes.
"""

import argparse
import gc
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from chosen_experts import ENOUGH, Chosen
from kimi_layer import layer_table, rehearsed, rounds_in, show_table

from slipstream.engine.bench.cases import CASES, Case, Outcome, step_bytes, write_rows
from slipstream.engine.bench.ceiling import read_ceiling
from slipstream.engine.bench.generate import time_generate
from slipstream.engine.bench.sizes import KIMI_RANK, LatentSize, random_target
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.packed_weights import products_for

VLLM = {1: 6.77, 2: 7.35, 4: 7.70, 8: 7.70, 16: 8.05}  # 0.24, Marlin, the same share on the same card
PROFILED = (1, 4, 16)
LAYER = "bulk_0 bulk_1 _write_latent_kernel _head_linear_kernel _chunks _combine _head_linear_kernel bulk_2 "
REHEARSED = tuple(  # what layers may be made of
    (LAYER + rest).split()
    for rest in (
        "_rms_norm_kernel route_rows bulk_2 skinny_0 experts_gate_up_1 experts_down_1 _all_reduce_kernel",
        "gate_rows choose_rows experts_stream _all_reduce_kernel",
    )
)


def say(*words: object) -> None:
    print(*words, flush=True)


def tiny() -> LatentSize:
    """For a rehearsal."""
    c = KIMI_RANK.target_config(512)
    assert c.latent is not None
    assert c.experts is not None
    latent = replace(c.latent, q_rank=64, kv_rank=64)
    experts = replace(c.experts, num=16, width=64)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_heads": 2, "num_kv_heads": 2}
    return LatentSize.of("tiny", replace(c, **sizes, num_layers=4, latent=latent, experts=experts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="no batch or table is begun behind so many")
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    began, device = time.monotonic(), "cpu" if args.rehearse else "cuda"
    batches = [int(one) for one in args.batches.split(",")]

    def at() -> str:
        return f"[{time.monotonic() - began:.0f} s]"

    say("One rank of TP=8 as a model of its own: collectives are replaced by their local part, nothing is exchanged.")
    size, ceiling = (tiny(), 1e12) if args.rehearse else (KIMI_RANK, 0.0)
    if args.layers != 61:
        size = LatentSize.of(f"{args.layers} layers", replace(size.target_config(), num_layers=args.layers))
    if not args.rehearse:
        products, ceiling = products_for("cuda"), read_ceiling()
        say(f"{at()} {torch.cuda.get_device_name()}: reads {ceiling / 1e12:.2f} TB/s; {products}")
    target = random_target(size, device)
    if not args.rehearse:
        torch.cuda.synchronize()
        held, peak = torch.cuda.memory_allocated() / 1e9, torch.cuda.max_memory_allocated() / 1e9
        say(
            f"{at()} weights made, kernels of experts compiled: {held:.1f} GB on the card, {peak:.1f} at most meanwhile"
        )
    settings = EngineConfig(
        max_running_requests=max(batches),
        max_context_tokens=512,
        prefill_chunk_tokens=128,
        device=device,
        graphs=True,
    )
    engine = Engine(target, settings)
    chosen = Chosen(engine)
    engine.start()
    say(f"{at()} ready: {engine.steps.describe()}")
    columns = "M|ms a step|on the device|wall, prompts in|prompts, ms|spread|floor at 4.3 / here|of ceiling|vLLM|goal"
    say("\n|", " | ".join([*columns.split("|"), "experts"]), "|\n" + "| --- " * 11 + "|")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    out, distinct = os.environ.get("OUT"), {}
    repeats, tokens = (1, 12) if args.rehearse else (2, 256)
    for batch in batches:
        if time.monotonic() - began > args.seconds:
            say(f"M = {batch}: no time")
            continue
        timing = time_generate(engine, batch, new_tokens=tokens, repeats=repeats, temperature=1.0)
        of_layers = chosen.distinct(batch)
        distinct[batch], independent = sum(of_layers) / len(of_layers), size.distinct_experts(batch)
        case = next((c for c in CASES if c.name == "kimi-rank-step" and c.batch == batch), Case("", "", batch, 0))
        outcome = Outcome(case, timing, step_bytes(size, case), ceiling)
        floor, share = outcome.bytes_read / 4.3e9, outcome.floor_ms / timing.round_ms
        say(
            f"| {batch} | {timing.round_ms:.3f} | {timing.parts.verify:.3f} | {timing.ms:.3f} | "
            f"{timing.prefill_ms:.0f} | {timing.spread:.1%} | "
            f"{floor:.2f} / {outcome.floor_ms:.2f} | {share:.0%} | {VLLM.get(batch, 0):.2f} | "
            f"{case.goal_ms or ''} | {distinct[batch]:.1f} of {independent:.1f}, {min(of_layers)}..{max(of_layers)} |"
        )
        if distinct[batch] < ENOUGH * independent:
            say(f"M = {batch}: rows have become alike; not recorded")
        elif out and case.name:
            row = outcome.row(commit, "python tests/benchmarks/kimi_rank.py")
            write_rows(Path(out) / "kimi_rank.json", [replace(row, value=round(timing.round_ms, 4), unit="ms, decode")])
    say(f"{at()} timed; {engine.compiles_after_ready} compiles and {engine.captures_after_ready} captures behind ready")
    for batch in [one for one in PROFILED if one in distinct]:
        if time.monotonic() - began > args.seconds:
            say(f"table of M = {batch}: no time")
        elif args.rehearse:
            for layer in REHEARSED:
                say("\n".join(layer_table(rounds_in(rehearsed(layer)), size, batch, distinct[batch], ceiling, 256)))
        else:
            show_table(engine, size, batch, distinct[batch], ceiling)
    say(f"{at()} done")
    sys.stdout.flush()
    del engine, target
    gc.collect()


if __name__ == "__main__":
    with torch.no_grad():
        main()

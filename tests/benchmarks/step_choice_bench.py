"""What choosing K by round costs and gives, with random weights: python -P step_choice_bench.py [SIZE] [BATCH ..]

Start-up with every K captured and timed, then the public call with K fixed at 0, at 3, and chosen. Drafts of random
weights are hardly ever right, so the best is K = 0: how near the choice comes to it is the price of having a draft.
STEP_CHOICE_REHEARSE=1: tiny and on the CPU, whether this script works.
"""

import os
import sys
import time
from dataclasses import replace

from slipstream.engine.bench.generate import time_generate
from slipstream.engine.bench.sizes import SIZES, Size, random_draft, random_target
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine

REHEARSE = os.environ.get("STEP_CHOICE_REHEARSE") == "1"
DEVICE = "cpu" if REHEARSE else "cuda"
NUM_STEPS = 3


def main(size: Size, batches: list[int]) -> None:
    target, draft = random_target(size, DEVICE), random_draft(size, DEVICE)
    config = EngineConfig(
        num_steps=NUM_STEPS,
        max_running_requests=max(batches),
        max_context_tokens=512,
        prefill_chunk_tokens=128,
        device=DEVICE,
        graphs=True,
    )
    engines = {}
    for name, changes in {
        "K = 0": {"num_steps": 0},
        f"K = {NUM_STEPS}": {},
        "chosen": {"choose_steps": True},
    }.items():
        began = time.perf_counter()
        own = replace(config, **changes)
        engines[name] = Engine(target, own, Eagle3Proposer(draft, NUM_STEPS) if own.num_steps else None)
        engines[name].start()
        print(f"{name}: ready after {time.perf_counter() - began:.1f} s, {engines[name].steps.describe()}", flush=True)
    for requests, times in sorted(engines["chosen"].steps.round_ms.items()):
        found = ", ".join(f"K = {k} {ms:.3f}" for k, ms in sorted(times.items()))
        print(f"measured at start, {requests} requests, ms a round: {found}", flush=True)
    for batch in batches:
        for name, engine in engines.items():
            new_tokens, repeats = (12, 1) if REHEARSE else (256, 3)
            timing = time_generate(engine, batch, 40 if REHEARSE else 128, new_tokens, repeats)
            rate = timing.tokens_per_second
            print(f"batch {batch}, {name}: {timing.ms:.3f} ms a round, {rate:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    tiny = Size("tiny", 512, 64, 96, 8, 4, 2, 16, False, 1e4, 128, 96)
    chosen = tiny if REHEARSE else SIZES[sys.argv[1] if sys.argv[1:] else "smollm2"]
    main(chosen, [int(one) for one in sys.argv[2:]] or [1, 16])

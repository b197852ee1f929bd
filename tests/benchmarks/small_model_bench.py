"""Where the time of a small model's steps goes: batches, prompts that share a prefill launch, and every kernel's share.

    python -P tests/benchmarks/small_model_bench.py [--rehearse]

SmolLM2-135M's sizes, random weights, 128-token prompts, 256 tokens out, greedy. Prints, in milliseconds:
    wall       of the public call
    / round    wall / (rounds + 1), as `slipstream bench engine` counts
    / token    wall / tokens of one request: comparable with an engine that brings all prompts in at once
`--rehearse` runs a tiny model on the CPU, to find errors without a card.
"""

import argparse
import gc
import sys
import time
from dataclasses import replace

import torch

from slipstream.engine import config as config_module
from slipstream.engine.bench.generate import prompts_of, time_generate
from slipstream.engine.bench.parts import profile_rounds
from slipstream.engine.bench.sizes import SMOLLM2_135M, Size, random_draft, random_target
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.models.dense import DenseModel
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.cuda import launch, skinny_gemm

TINY = Size("tiny", 199, 64, 96, 8, 4, 2, 16, True, 1e4, 66, 80)
PROMPT, ANSWER = 128, 256


class Bench:
    """The models, and engines over them."""

    def __init__(self, *, rehearse: bool) -> None:
        self.device = "cpu" if rehearse else "cuda"
        self.size = TINY if rehearse else SMOLLM2_135M
        self.target: DenseModel = random_target(self.size, self.device)
        self.draft: Eagle3Network = random_draft(replace(self.size), self.device)
        self.prompt, self.answer = (16, 8) if rehearse else (PROMPT, ANSWER)
        self.batches = (1, 4) if rehearse else (1, 4, 16, 64)

    def engine(self, num_steps: int, most: int, prefill_requests: int) -> Engine:
        proposer = Eagle3Proposer(self.draft, num_steps) if num_steps else None
        config = EngineConfig(
            num_steps=num_steps,
            max_running_requests=most,
            max_context_tokens=512,
            device=self.device,
            prefill_requests=prefill_requests,
            graphs=True,
            rounds_in_flight=2,
        )
        engine = Engine(self.target, config, proposer)
        engine.start()
        return engine

    def steps(self, engine: Engine, batch: int, repeats: int = 3) -> None:
        """One line: the public call."""
        timing = time_generate(engine, batch, self.prompt, self.answer, repeats)
        wall, parts = timing.ms * timing.steps, timing.parts
        case = f"batch {batch:2d} K {timing.num_steps} prompts a launch {engine.config.prefill_requests:2d}"
        ms = f"wall {wall:6.1f}, / round {timing.ms:.3f} (x {timing.steps}), / token {wall / self.answer:.3f}"
        device = f"draft {parts.draft:.3f} verify {parts.verify:.3f} rest {parts.rest:.3f} host {parts.host:.3f}"
        print(f"{case}: {ms}, spread {timing.spread:.1%}; {device}", flush=True)

    def prefill(self, engine: Engine, batch: int) -> None:
        """One line: prompts alone."""
        params, seconds = SamplingParams(max_tokens=1, ignore_eos=True), []
        for _ in range(4):
            began = time.perf_counter()
            engine.generate(prompts_of(engine, batch, self.prompt), params)
            seconds.append(time.perf_counter() - began)
        print(f"{batch} prompts, {engine.config.prefill_requests} a launch: {min(seconds) * 1e3:.2f} ms", flush=True)

    def kernels(self, engine: Engine, batch: int, lines: int = 16) -> None:
        """A round's kernels, most expensive first."""
        parts = profile_rounds(engine, batch, rounds=48)
        times = f"{parts.busy_us:.0f} us, with gaps {parts.span_us:.0f}"
        print(f"batch {batch} K {engine.config.num_steps}: a round's kernels {times}")
        for kernel in parts.kernels[:lines]:
            each = kernel.us / max(kernel.calls, 1e-9)
            print(f"    {kernel.us:8.1f} us {kernel.calls:6.1f} x {each:6.2f}  {kernel.name[:60]}")
        sys.stdout.flush()

    def prompts_together_equal_prompts_alone(self) -> None:
        """Bit for bit: what 1 and what 8 prompts a launch leave in the cache, and their answers."""
        batch, found = self.batches[-1], []
        for together in (1, 8):
            engine = self.engine(0, batch, together)
            prompts = [p[: 5 + 7 * i % self.prompt] for i, p in enumerate(prompts_of(engine, batch, self.prompt))]
            engine.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
            cache = [layer[1:].clone() for layer in engine.runner.cache.layers]  # without the dummy block
            answers = engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
            found.append((cache, [answer.token_ids for answer in answers], engine.captures_after_ready))
        (one, tokens_one, _), (other, tokens_other, captured) = found
        same = all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), tokens_one == tokens_other
        print(f"check: caches equal {same[0]}, answers equal {same[1]}, captured after ready {captured}", flush=True)


def rows_of_a_launch(most: int) -> None:
    """Most rows of a prefill launch and of a product."""
    config_module.MOST_PREFILL_ROWS = most
    for module in (launch, skinny_gemm):
        module.MAX_ROWS = most  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    bench = Bench(rehearse=parser.parse_args().rehearse)
    most = bench.batches[-1]
    bench.prompts_together_equal_prompts_alone()
    own = 16  # the engine's own number
    for together in (own, 1, 4, 8, 32):
        rows_of_a_launch(max(1024, together * PROMPT))
        engine = bench.engine(0, most, together)
        for batch in sorted({1, max(1, most // 8), most}) if together in (1, own) else [most]:
            bench.prefill(engine, batch)
        for batch in bench.batches if together == own else [most]:
            bench.steps(engine, batch)
        if together == own and bench.device == "cuda":
            for batch in (1, most):
                bench.kernels(engine, batch)
        del engine
        gc.collect()
        if together != own:
            continue
        engine = bench.engine(3, min(16, most), own)
        for batch in [b for b in bench.batches if b <= 16]:
            bench.steps(engine, batch)
        if bench.device == "cuda":
            bench.kernels(engine, 1, 24)
        del engine
        gc.collect()


if __name__ == "__main__":
    with torch.inference_mode():
        main()

"""8B at batch 1, one GPU: a step of the target, rounds of the engine, and each kernel of a round.

    python -P tests/benchmarks/round_bench.py [--seconds 60]

Steps: 32 layers with attention over 300 of 2048 tokens and a head, in one CUDA graph. Rounds: the engine's, of one
request, with random weights. Behind those of K = 3 each kernel of a round: how long it ran, when it started behind the
end of the one before (less than nothing: beside it), and how much later than all before it ended.
"""

import argparse
import functools
import gc
import itertools
import statistics
import time
from collections import defaultdict

import torch
from cold_graphs import seconds_per_replay
from skinny_gemm_bench import Chain
from torch.autograd import DeviceType

from slipstream.engine.bench.generate import prompts_of, time_generate
from slipstream.engine.bench.sizes import LLAMA_8B, random_draft, random_target
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.models.dense import DenseModel
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.cuda import launch, skinny_gemm
from slipstream.kernels.gpu import paged_attention as attention
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Stream

HELD, TABLE, BLOCK = 300, 2048, 16
HEADS = Heads(32, 8, 128)
began = time.monotonic()


def after() -> str:
    return f"[{time.monotonic() - began:.0f} s]"


class Decoder(Chain):
    """The products of all layers with attention between."""

    def __init__(self) -> None:
        super().__init__(32, 4096, HEADS, 14336, 128256)
        del self.plain
        blocks = TABLE // BLOCK
        shape = (blocks + 1, BLOCK, 2, HEADS.kv, HEADS.dim)
        self.caches = [torch.randn(shape, device="cuda").bfloat16() for _ in self.packed[:-1]]
        self.table = 1 + torch.randperm(blocks, device="cuda")[None]  # [1, blocks]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """x: rows of one request, [M, hidden] -> logits, [M, vocab]."""
        rows = x.shape[0]
        at = HELD + torch.arange(rows, device="cuda")
        cells = self.table[0, at // BLOCK] * BLOCK + at % BLOCK
        cos, sin = self.cos[:rows], self.sin[:rows]
        stream = Stream(x, x.float().square().unflatten(-1, (-1, 16)).sum(-1))  # [M, hidden] -> [M, hidden / 16]
        *layers, (head,) = self.packed
        for (qkv, out, gate_up, down), cache in zip(layers, self.caches, strict=True):
            q, _, _ = skinny_gemm.norm_qkv(stream, self.norm, qkv, self.heads, cos, sin, sink=KVSink(cache, cells))
            mixed = attention.paged_attention(q[None], cache, self.table, at[None], HEADS.dim**-0.5)[0]
            stream = skinny_gemm.linear_add(mixed.flatten(1), out, stream)  # [M, q, d] -> [M, q d]
            inner = skinny_gemm.norm_gate_up(stream, self.norm, gate_up)
            stream = skinny_gemm.linear_add(inner, down, stream)
        return skinny_gemm.norm_linear(stream, self.norm, head)


def steps() -> None:
    """Prints a line a number of rows."""
    decoder = Decoder()
    for rows in (1, 4, 6):
        x = torch.randn(rows, 4096, device="cuda").bfloat16()
        took = seconds_per_replay(functools.partial(decoder.step, x), 9) * 1e3
        print(f"step M={rows} {took:.3f} ms {after()}", flush=True)


def engine_of(target: DenseModel, draft: Eagle3Network, num_steps: int) -> Engine:
    config = EngineConfig(num_steps=num_steps, max_running_requests=1, max_context_tokens=512, device="cuda")
    engine = Engine(target, config, Eagle3Proposer(draft, num_steps) if num_steps else None)
    engine.start()
    return engine


def rounds(seconds: float) -> None:
    """Engines of one request, and the kernels of a K = 3 round."""
    target, draft = random_target(LLAMA_8B, "cuda"), random_draft(LLAMA_8B, "cuda")
    for num_steps in (3, 5, 0):
        if time.monotonic() - began > seconds:
            print("no time left", flush=True)
            return
        engine = engine_of(target, draft, num_steps)
        timing = time_generate(engine, 1, 128, 160, 2)
        p = timing.parts
        print(
            f"engine K={num_steps} {timing.ms:.3f} ms (draft {p.draft:.3f} verify {p.verify:.3f}) {after()}", flush=True
        )
        if num_steps == 3:
            kernels(engine)
        del engine
        gc.collect()


def kernels(engine: Engine) -> None:
    """Prints each kernel of a round of K = 3."""
    prompts, params = prompts_of(engine, 1, 128), SamplingParams(max_tokens=24, ignore_eos=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.generate(prompts, params)
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    )
    table(spans)


def table(spans: list[tuple[float, float, str]]) -> None:
    """spans: start, end and name of each kernel. later: its end behind the ends of all before: what it adds."""
    starts = [i for i, span in enumerate(spans) if span[2].startswith("_draft_rows")][4:-2]
    each = [spans[a:b] for a, b in itertools.pairwise(starts)]
    if not each:
        print(f"profile: no rounds among {len(spans)} kernels", flush=True)
        return
    shape = statistics.mode([tuple(name for _, _, name in one) for one in each])
    each = [one for one in each if tuple(name for _, _, name in one) == shape]
    ran, gap, later = [], [], []
    for i in range(len(shape)):
        ran.append(statistics.median(one[i][1] - one[i][0] for one in each))
        gap.append(statistics.median(one[i][0] - one[i - 1][1] for one in each) if i else 0.0)
        later.append(statistics.median(one[i][1] - max(end for _, end, _ in one[:i]) for one in each) if i else ran[0])
    print(f"profile: a round {sum(later):.0f} us, {len(shape)} kernels, {len(each)} rounds {after()}")
    verify = next((i for i, name in enumerate(shape) if name.startswith("_verify_rows")), len(shape))
    line = [f"{name[:24]} {ran[i]:.1f} {gap[i]:+.1f} {later[i]:.1f}" for i, name in enumerate(shape[: verify + 3])]
    print("  draft, in order (ran, start behind the end before, later): " + " | ".join(line), flush=True)
    kinds: dict[str, list[int]] = defaultdict(list)
    for i in range(verify, len(shape)):
        kinds[shape[i]].append(i)
    for name, at in kinds.items():
        middle = [statistics.median(values[i] for i in at) for values in (ran, gap, later)]
        print(
            f"  verify {name[:28]:28} {len(at):3} x ran {middle[0]:6.2f} start {middle[1]:+6.2f} later {middle[2]:6.2f}"
            f", together {sum(later[i] for i in at):7.1f}",
            flush=True,
        )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="no engine is begun later")
    args = parser.parse_args()
    launch.load(torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name()}: loaded {after()}", flush=True)
    steps()
    gc.collect()
    torch.cuda.empty_cache()
    rounds(args.seconds)
    print(f"done {after()}")


if __name__ == "__main__":
    main()

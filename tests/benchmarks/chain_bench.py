"""Products joined to chains against single kernels, 8B sizes, one GPU: bits, steps, rounds, and a round's kernels.

    python -P tests/benchmarks/chain_bench.py [--seconds 70] [--single]

Steps: 32 layers with attention over 300 of 2048 tokens and a head, in one CUDA graph; every setting's bits are
compared with those of single kernels. Rounds: the engine's, of one request. Behind them each kernel of a K = 3 round:
how long it ran, and how much later than the one before it ended.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

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
from slipstream.kernels.cuda import chain_launch, launch, skinny_gemm
from slipstream.kernels.cuda.chain_launch import Joining, joined
from slipstream.kernels.gpu import paged_attention as attention
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Stream

HELD, TABLE, BLOCK = 300, 2048, 16
HEADS = Heads(32, 8, 128)
OFF, ON = Joining(on=False), Joining(on=True)
began = time.monotonic()
CHANGES: tuple[dict[str, int | bool], ...] = (
    {"last": False},
    {"fixed": 1},
    {"fixed": 1000},
    {"left": 64},
    {"left": 128},
    {"left": 192},
    {"ahead": 0},
    {"ahead": 32},
    {"ahead": 128},
    {"shared": 120},
    {"shared": 150},
    {"shared": 180},
    {"shared": 204},
)


def after() -> str:
    return f"[{time.monotonic() - began:.0f} s]"


@contextlib.contextmanager
def using(setting: Joining) -> Iterator[None]:
    kept, chain_launch.joining = chain_launch.joining, setting
    try:
        yield
    finally:
        chain_launch.joining = kept


def words(setting: Joining) -> str:
    if not setting.on:
        return "single kernels"
    changed = " ".join(f"{k}={v}" for k, v in vars(setting).items() if v != getattr(ON, k))
    return changed or "joined"


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
        with joined():
            for (qkv, out, gate_up, down), cache in zip(layers, self.caches, strict=True):
                q, _, _ = skinny_gemm.norm_qkv(stream, self.norm, qkv, self.heads, cos, sin, sink=KVSink(cache, cells))
                mixed = attention.paged_attention(q[None], cache, self.table, at[None], HEADS.dim**-0.5)[0]
                stream = skinny_gemm.linear_add(mixed.flatten(1), out, stream)  # [M, q, d] -> [M, q d]
                inner = skinny_gemm.norm_gate_up(stream, self.norm, gate_up)
                stream = skinny_gemm.linear_add(inner, down, stream)
            return skinny_gemm.norm_linear(stream, self.norm, head)

    def counters(self) -> int:
        counters = [weight.counter for layer in self.packed for weight in layer]
        return int(torch.cat([*counters, chain_launch._arrived(0)]).abs().sum())


def steps(decoder: Decoder) -> Joining:
    """Prints a line a setting; the fastest one at M = 1."""
    best = ON
    for rows in (1, 4, 6):
        x = torch.randn(rows, 4096, device="cuda").bfloat16()
        run = functools.partial(decoder.step, x)
        with using(OFF):
            expected = run()
        times: dict[Joining, float] = {}

        def ms(
            setting: Joining,
            again: str = "",
            rows: int = rows,
            run: functools.partial[torch.Tensor] = run,
            expected: torch.Tensor = expected,
            times: dict[Joining, float] = times,
        ) -> None:
            with using(setting):
                same = run().equal(expected)
                took = seconds_per_replay(run, 9) * 1e3
            wrong = ("" if same else " OTHER BITS") + (" COUNTERS" if decoder.counters() else "")
            print(f"step M={rows} {took:.4f} {words(setting)}{again}{wrong} {after()}", flush=True)
            times[setting] = min(took, times.get(setting, took))

        ms(OFF)
        ms(best)
        if rows == 1:
            for change in CHANGES:
                ms(replace(ON, **change))
            best = together(times)
            ms(best, " (together)")
            best = min(times, key=times.__getitem__)
            best = best if best.on else ON
        ms(OFF, " again")
        ms(best, " again")
    return best


def together(times: dict[Joining, float]) -> Joining:
    """The best value of each number, where it gave something."""
    made = ON
    for name in dict.fromkeys(name for change in CHANGES for name in change):
        tried = [replace(ON, **change) for change in CHANGES if name in change]
        fastest = min(tried, key=times.__getitem__)
        if times[fastest] < times[ON] - 0.003:
            made = replace(made, **{name: getattr(fastest, name)})
    return made


def engine_of(target: DenseModel, draft: Eagle3Network, num_steps: int) -> Engine:
    config = EngineConfig(num_steps=num_steps, max_running_requests=1, max_context_tokens=512, device="cuda")
    engine = Engine(target, config, Eagle3Proposer(draft, num_steps) if num_steps else None)
    engine.start()
    return engine


def rounds(settings: tuple[Joining, ...], seconds: float) -> None:
    """Engines of one request, and the kernels of a K = 3 round."""
    target, draft = random_target(LLAMA_8B, "cuda"), random_draft(LLAMA_8B, "cuda")
    for num_steps in (3, 5, 0):
        answers = []
        for setting in settings:
            if time.monotonic() - began > seconds:
                print("no time left", flush=True)
                return
            with using(setting):
                engine = engine_of(target, draft, num_steps)
                timing = time_generate(engine, 1, 128, 160, 2)
                params = SamplingParams(max_tokens=48, ignore_eos=True)
                answers.append([answer.token_ids for answer in engine.generate(prompts_of(engine, 1, 128), params)])
            p = timing.parts
            print(
                f"engine K={num_steps} {timing.ms:.3f} ms (draft {p.draft:.3f} verify {p.verify:.3f})"
                f" {words(setting)}, tokens {'equal' if answers[-1] == answers[0] else 'DIFFER'} {after()}",
                flush=True,
            )
            if num_steps == 3:
                kernels(engine, words(setting))
            del engine
            gc.collect()


def kernels(engine: Engine, what: str) -> None:
    """Each kernel of a round. later: its end behind the end of the one before, which is what it adds."""
    prompts, params = prompts_of(engine, 1, 128), SamplingParams(max_tokens=24, ignore_eos=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.generate(prompts, params)
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    )
    table(spans, what)


def table(spans: list[tuple[float, float, str]], what: str) -> None:
    starts = [i for i, span in enumerate(spans) if span[2].startswith("_draft_rows")][4:-2]
    each = [spans[a:b] for a, b in itertools.pairwise(starts)]
    if not each:
        print(f"profile {what}: no rounds among {len(spans)} kernels", flush=True)
        return
    shape = statistics.mode([tuple(name for _, _, name in one) for one in each])
    each = [one for one in each if tuple(name for _, _, name in one) == shape]
    ran, gap, later = [], [], []
    for i in range(len(shape)):
        ran.append(statistics.median(one[i][1] - one[i][0] for one in each))
        gap.append(statistics.median(one[i][0] - one[i - 1][1] for one in each) if i else 0.0)
        later.append(statistics.median(one[i][1] - max(end for _, end, _ in one[:i]) for one in each) if i else ran[0])
    print(f"profile {what}: a round {sum(later):.0f} us, {len(shape)} kernels, {len(each)} rounds {after()}")
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
    parser.add_argument("--seconds", type=float, default=70, help="no engine is begun later")
    parser.add_argument("--single", action="store_true", help="rounds of single kernels alone")
    args = parser.parse_args()
    launch.load(torch.cuda.current_device())
    if args.single:
        rounds((OFF,), args.seconds)
        return
    decoder = Decoder()
    print(f"{torch.cuda.get_device_name()}: loaded {after()}", flush=True)
    best = steps(decoder)
    del decoder
    gc.collect()
    torch.cuda.empty_cache()
    rounds((OFF, best), args.seconds)
    print(f"done {after()}")


if __name__ == "__main__":
    main()

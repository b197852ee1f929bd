"""A slice of Kimi-K2.5 at its real sizes on two cards of one host: real collectives, rounds in one graph. By hand:

    python tests/benchmarks/kimi_tp2.py [--size 2] [--layers 12] [--steps 3] [--batches 1,4] [--rehearse]

First one rank alone (TP=1), then `--size` ranks, of the same random weights: 12 layers are 109 GB on one card, 56 GB on
each of two. Printed: tokens with an oracle against those without (0 differ), how far slots, logits and draft logits of
TP=2 are from those of TP=1, milliseconds a step and a round, microseconds of all-reduce + add + the next norm's sums.
Rounds run the real draft graph (Llama-type, random weights), whose tokens the oracle replaces.

Partial sums are rounded once more each, so where two experts are nearly as good a row may go to the other: of random
weights some row does in every layer. So TP=2 is compared twice: as it routes, and with every row sent to the experts
that TP=1 chose, which leaves rounding alone.

Answers are drawn at T = 1, so that rows go to different experts. Rows go to OUT/kimi_tp2.json. `--rehearse` tries the
script on the CPU with tiny sizes.
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# Joint acceptance of the oracle, so that 2.88 tokens a round come at K = 3: what the card of a published draft for this
# target says of a chain of 3, bonus token included; sampling and acceptance rule are not stated there.
ACCEPTED = (0.78, 0.62, 0.48, 0.37)
PROMPT, NEW, TEXT = 128, 96, 160  # tokens: of prompts, of answers, of the text that is taken in as it is
SECONDS = {1: 45.0, 2: 55.0}  # of the ranks alone and together


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--rehearse", action="store_const", const="cpu", default="")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def say(*words: object) -> None:
    print(*words, flush=True)


class Rank:
    """One process. Args: parallel: the ranks; args: of the command line."""

    def __init__(self, parallel: Any, args: argparse.Namespace) -> None:
        from tp8_models import Models
        from tp8_rank import Run

        self.run_of = Run(parallel, args, Path(args.scratch), time.monotonic())
        self.args, self.parallel, self.tell, self.device = args, parallel, self.run_of.tell, self.run_of.device
        self.batches = [int(one) for one in args.batches.split(",")]
        self.size = sizes(args)
        self.models = Models(self.run_of, self.size)
        self.target, self.network = self.models.target, self.models.network

    def engine(self, num_steps: int, proposer: Any, graphs: bool | None = None, most: int | None = None) -> Any:
        slots = () if num_steps else self.size.draft_config().slots
        graphs = True if graphs is None else graphs  # on a CPU, too
        return self.models.engine(num_steps, proposer, most=most or max(self.batches), capture=slots, graphs=graphs)

    def states(self, choices: list[Any] | None = None) -> dict[str, Any]:
        """Of a text that is taken in as it is: slots, logits; and of a greedy answer with the draft, its logits.

        choices: of every router, in the order of their calls, to be taken instead of its own.
        """
        import torch

        from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
        from slipstream.engine.runner import capture_states
        from slipstream.engine.sampling_params import SamplingParams

        ids = torch.randint(0, self.size.vocab_size, (TEXT,), generator=torch.Generator().manual_seed(3)).tolist()
        slots = (0, *self.size.draft_config().slots, self.size.num_layers)
        routed = Routed(self.target, choices, self.device)
        states, last = capture_states(self.target, ids, slots, prefill_chunk_tokens=64)
        with torch.inference_mode():
            logits = self.target.logits(last)
        engine = self.engine(self.args.steps, Eagle3Proposer(self.network, self.args.steps), graphs=False, most=1)
        (answer,) = engine.generate([ids], SamplingParams(max_tokens=10, ignore_eos=True), trace=True)
        rounds = [(one.start, one.draft_logits.cpu(), one.draft_tokens.cpu()) for one in answer.trace.rounds]
        routed.stop()
        found = {name: state.cpu() for name, state in states.items()} | {"logits": logits.cpu()}
        return {"states": found, "tokens": answer.token_ids, "rounds": rounds, "choices": routed.made}

    def run(self) -> None:
        import torch

        from slipstream.engine.bench.generate import params_of, prompts_of, time_generate
        from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
        from slipstream.engine.proposer import OracleProposer

        kept = Path(self.args.scratch) / "one.pt"
        found = self.states()
        if self.parallel.size == 1:
            torch.save(found, kept)
        else:
            one = torch.load(kept)
            forced = self.states(one["choices"])
            if self.tell:
                pairs = zip(found["choices"], one["choices"], strict=False)
                same = [(a[0].sort(1).values == b[0].sort(1).values).all(1) for a, b in pairs if len(a[0]) == len(b[0])]
                moved = 1 - float(torch.cat(same).float().mean())
                say(f"rows that go to other experts than at TP=1: {moved:.1%} of rows and layers. As routed:")
                compare(found, one)
                say("All sent to the experts of TP=1:")
                compare(forced, one)
        steps, new = self.args.steps, 12 if self.args.rehearse else NEW
        plain = self.engine(0, None)
        answers = {
            batch: plain.generate(prompts_of(plain, batch, PROMPT), params_of(batch, new, 1.0))
            for batch in self.batches
        }
        for batch in self.batches:
            self.told("step", batch, 0, time_generate(plain, batch, PROMPT, new, 1, 1.0))
        recordings = {str(i): [*a.prompt_ids, *a.token_ids] for i, a in enumerate(answers[max(self.batches)])}
        inner, vocabulary = Eagle3Proposer(self.network, steps), self.size.vocab_size
        oracle = OracleProposer(steps, recordings, vocabulary, ACCEPTED[:steps], seed=3, inner=inner)
        engine = self.engine(steps, oracle)
        for batch in self.batches:
            got = engine.generate(prompts_of(engine, batch, PROMPT), params_of(batch, new, 1.0))
            pairs = zip(got, answers[batch], strict=True)
            wrong = sum(a != b for x, y in pairs for a, b in zip(x.token_ids, y.token_ids, strict=True))
            if self.tell:
                say(f"{self.parallel.size} ranks, batch {batch}: {wrong} of {batch * new} tokens differ at K = {steps}")
            self.told("round", batch, steps, time_generate(engine, batch, PROMPT, new, 1, 1.0))
        if self.tell:
            counts = engine.stats.acceptance[steps].histogram
            behind = f"compiled and captured behind ready: {engine.compiles_after_ready}, {engine.captures_after_ready}"
            say(f"rounds by drafts accepted: {counts}; {behind}")
        if self.parallel.size > 1 and self.device == "cuda":
            self.exchanges()
        self.run_of.progress("done")

    def told(self, case: str, batch: int, num_steps: int, timing: Any) -> None:
        if not self.tell:
            return
        p, floor = timing.parts, self.size.step_bytes(0, batch * (num_steps + 1)) / 4.3e9 / self.parallel.size
        where = f"draft {p.draft:.3f}, verify {p.verify:.3f}, rest {p.rest:.3f}, host {p.host:.3f}"
        say(
            f"{self.parallel.size} ranks, {case} batch {batch} K={num_steps}: {timing.round_ms:.3f} ms "
            f"({where}; {timing.ms:.3f} with prompts), "
            f"{timing.tokens_per_second:.0f} tok/s; a rank's share of the target's bytes takes {floor:.2f}"
        )
        name = f"kimi-{self.size.num_layers}-layers-{case}"
        keep(
            {
                "case": name,
                "batch": batch,
                "K": num_steps,
                "tp": self.parallel.size,
                "value": timing.round_ms,
                "unit": "ms",
            }
        )

    def exchanges(self) -> None:
        """All-reduce + add + the sums of squares of the next norm."""
        import torch
        from tp8_rank import parts_of, time_graph

        from slipstream.kernels.stream import Stream

        card, stream, rank = self.parallel.card, torch.cuda.Stream(), self.parallel.rank
        for rows in (1, 2, 4, 8, 16):
            parts, residual = parts_of(rows, self.size.hidden_size, self.parallel.size)
            own = parts[rank]
            us = time_graph(lambda own=own, r=residual: card.all_reduce_add(own, Stream(r)), stream)
            if self.tell:
                say(f"all-reduce + add + sums of squares, {rows} x {self.size.hidden_size}: {us:.2f} us")
                case = f"allreduce-norm, width {self.size.hidden_size}"
                keep(
                    {
                        "case": case,
                        "batch": rows,
                        "K": 0,
                        "tp": self.parallel.size,
                        "value": us,
                        "unit": "us in a graph",
                    }
                )


class Routed:
    """What every router chose, by hooks. Args: choices: taken instead, as long as there are some of as many rows."""

    def __init__(self, target: Any, choices: list[Any] | None, device: str) -> None:
        from slipstream.engine.layers.experts import Router

        self.made: list[Any] = []
        self.choices, self.device = list(choices or []), device
        routers = [module for module in target.modules() if isinstance(module, Router)]
        self.hooks = [router.register_forward_hook(self._note) for router in routers]

    def _note(self, _module: Any, _inputs: Any, result: Any) -> Any:
        from chosen_experts import choice_of, with_choice

        from slipstream.kernels.choose_experts import Choice

        own = choice_of(result)
        self.made.append((own.ids.cpu(), own.gates.cpu()))
        if not self.choices or len(self.choices[0][0]) != len(own.ids):
            return None
        ids, gates = self.choices.pop(0)
        return with_choice(result, Choice(ids.to(self.device), gates.to(self.device)))

    def stop(self) -> None:
        for hook in self.hooks:
            hook.remove()


def compare(found: dict[str, Any], one: dict[str, Any]) -> None:
    """TP = n against TP = 1, both bf16. An argmax may differ where its gap is within 2 ulps of bf16."""
    import torch

    for name, want in one["states"].items():
        got, want = found["states"][name].float(), want.float()
        rows = (got - want).norm(dim=-1) / want.norm(dim=-1)
        say(f"{name}: rows off by {rows.median():.2%} in the middle, {rows.max():.2%} at most")
    got, want = found["states"]["logits"].float(), one["states"]["logits"].float()
    top, other = want.topk(2).values.T
    differ = got.argmax(-1) != want.argmax(-1)
    ulps = (top - other) / (2.0 ** (top.abs().log2().floor() - 7))
    gaps = ", ".join(f"{x:.0f}" for x in ulps[differ].sort().values.tolist())
    say(f"argmax differs in {int(differ.sum())} of {len(differ)} rows, at gaps of {gaps or 'no'} ulps")
    same = 0
    while same < len(one["tokens"]) and found["tokens"][same] == one["tokens"][same]:
        same += 1
    say(f"greedy: the first {same} of {len(one['tokens'])} tokens alike")
    for (start, a, ids), (other_start, b, other_ids) in zip(found["rounds"], one["rounds"], strict=False):
        if start != other_start or start > TEXT + same:
            break
        alike = (ids == other_ids).int().cumprod(0).sum()
        off = [f"{float((a[k].float() - b[k].float()).norm() / b[k].float().norm()):.2%}" for k in range(len(b))]
        say(f"draft logits of the round at {start}: off by {off} of k = 1.., the first {int(alike)} drafts alike")
    assert torch.isfinite(found["states"]["logits"]).all()


def keep(one: dict[str, Any]) -> None:
    """A row of the record."""
    if "OUT" in os.environ:
        path = Path(os.environ["OUT"], "kimi_tp2.json")
        rows = json.loads(path.read_text()) if path.is_file() else []
        origin = {"goal": None, "commit": head_commit(), "command": "python tests/benchmarks/kimi_tp2.py"}
        path.write_text("[\n" + ",\n".join(json.dumps(row) for row in [*rows, one | origin]) + "\n]\n")


def head_commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def sizes(args: argparse.Namespace) -> Any:
    from tp8_models import small_kimi

    from slipstream.engine.bench.random_deepseek import kimi_k25
    from slipstream.engine.bench.sizes import LatentSize

    c = kimi_k25(args.layers, 8192)
    c = small_kimi(c) if args.rehearse else c
    return LatentSize.of(f"{args.layers} layers", replace(c, bos_token_id=0, eos_token_ids=()))


def seconds_of(ranks: int, rehearse: object) -> float:
    """That so many ranks may take; a rehearsal shares its cores with whatever else runs there."""
    return SECONDS[min(2, ranks)] * (8 if rehearse else 1)


def work(args: argparse.Namespace) -> None:
    """A rank: joins the others, runs, ends without waiting for anybody."""
    faulthandler.dump_traceback_later(seconds_of(args.ranks, args.rehearse) - 3)
    import torch

    from slipstream.engine.card_group import carrier_name, join_cards
    from slipstream.engine.rank_group import connect
    from slipstream.engine.serving.engine_process import die_with
    from slipstream.engine.tensor_parallel import single

    die_with(os.getppid())
    code = 0
    try:
        parallel = single()
        if args.ranks > 1:
            parallel = connect(args.rank, args.ranks, args.store)
            parallel = parallel if args.rehearse else join_cards(parallel)
        if args.rank == 0:
            say(f"{args.ranks} ranks: {carrier_name(parallel)}")
        with torch.no_grad():
            Rank(parallel, args).run()
    except Exception:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_ranks(count: int, words: list[str], scratch: str) -> None:
    from slipstream.engine.rank_group import make_store

    store, began = make_store(), time.monotonic()
    command = [
        sys.executable,
        __file__,
        *words,
        "--store",
        str(store),
        "--ranks",
        str(count),
        "--scratch",
        scratch,
    ]
    processes = [subprocess.Popen([*command, "--rank", str(rank)], pass_fds=[store]) for rank in range(count)]
    os.close(store)
    while any(process.poll() is None for process in processes):
        late = time.monotonic() - began > seconds_of(count, "--rehearse" in words)
        if late or any(process.poll() for process in processes):
            time.sleep(0 if late else 5)  # whoever failed has said why; the others wait for it
            for process in processes:
                process.kill()
        time.sleep(0.05)
    say(f"== {count} ranks: {time.monotonic() - began:.0f} s, exit codes {[process.wait() for process in processes]}")


def main(words: list[str]) -> None:
    args = parse(words)
    if args.rank is not None:
        work(args)
    with tempfile.TemporaryDirectory() as scratch:
        for count in (1, args.size):
            run_ranks(count, words, scratch)


if __name__ == "__main__":
    main(sys.argv[1:])

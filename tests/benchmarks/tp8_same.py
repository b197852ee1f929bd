"""The part of tp8.py that asks whether a model does the same every time: the same answers, the same bits in all steps.

Kimi-K2.5's sizes. Every round of every run is compared with that of the first run: what the router saw and chose, its
shared expert's part, and the stream behind attention and behind experts, of every layer. So a race shows where it is.
Tensors are kept as a captured step writes them: nothing is added to the step. In front of every run the caches are
filled with garbage (poison.py): else it finds in its cells what the run before left there, just what it will write.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from poison import poison, poison_every_launch, poison_free_memory
from tp8_models import NEW, PROMPT, InStep, Models, free, small_kimi
from tp8_rank import Run

from slipstream.engine.bench.generate import params_of, prompts_of
from slipstream.engine.bench.random_deepseek import kimi_k25, kimi_k25_rank
from slipstream.engine.bench.sizes import LatentSize
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.sequence import Request
from slipstream.kernels.all_gather import all_gather

TOLD = 4  # differences that are told of a case


@dataclass
class Steps:
    """What the steps of an engine leave, by batch."""

    of_batch: dict[int, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)
    now: list[tuple[str, torch.Tensor]] | None = None
    hooks: list[Any] = field(default_factory=list)

    def watch(self, engine: Engine) -> None:
        """Of an engine that is not started yet."""
        run = engine.runner.round

        def round_(slots: torch.Tensor, num_steps: int | None = None) -> Any:
            self.now = []
            result = run(slots, num_steps)
            self.of_batch[len(slots)], self.now = self.now, None
            return result

        engine.runner.round = round_  # type: ignore[method-assign]
        target: Any = engine.target
        for i, layer in enumerate(target.layers):
            for part, module in {"attention": layer.self_attn, "experts": layer.mlp}.items():
                self._hook(module, lambda out, what=f"layer {i}, behind {part}": [(what, out.rows)])
            if hasattr(layer.mlp, "gate"):
                self._hook(layer.mlp.gate, lambda out, i=i: router_parts(f"layer {i}, ", out))

    def _hook(self, module: Any, parts: Any) -> None:
        def note(_module: Any, _inputs: Any, out: Any) -> None:
            if self.now is not None:
                self.now += parts(out)

        self.hooks.append(module.register_forward_hook(note))

    def bits(self, batch: int) -> torch.Tensor:
        """Of the last round of this batch: all tensors as 16-bit words."""
        return torch.cat([x.contiguous().view(torch.int16).flatten() for _, x in self.of_batch[batch]])

    def where(self, batch: int, differ: torch.Tensor) -> str:
        """The first tensor with words that differ, and what of it does."""
        start = 0
        for name, x in self.of_batch[batch]:
            words = x.numel() * x.element_size() // 2
            own = differ[start : start + words].nonzero()[:, 0]
            if len(own):
                width = words // x.shape[0]
                rows = sorted(set((own // width).tolist()))
                columns = (own % width).tolist()
                return f"{name}: {len(own)} of {words} words in rows {rows}, columns {columns[0]} to {max(columns)}"
            start += words
        return "nothing"

    def stop(self) -> None:
        for hook in self.hooks:
            hook.remove()


def router_parts(where: str, out: Any) -> list[tuple[str, torch.Tensor]]:
    choice = getattr(out, "choice", out)
    found = [(where + "experts' ids", choice.ids), (where + "experts' gates", choice.gates)]
    if hasattr(out, "choice"):
        found = [(where + "normed rows", out.x), *found]
        found += [] if out.shared is None else [(where + "shared expert", out.shared)]
    return found


def one_run(engine: Engine, batch: int, new: int, steps: Steps) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Answers, and what each round left."""
    tokens: list[list[int]] = [[] for _ in range(batch)]
    poison(engine)
    left, rounds = [], engine.stats.rounds
    for i, (prompt, params) in enumerate(
        zip(prompts_of(engine, batch, PROMPT), params_of(batch, new, 1.0), strict=True)
    ):
        engine.add_request(Request(str(i), prompt, params, streamed=False))
    while engine.has_work:
        for output in engine.step():
            tokens[int(output.request_id)] += output.new_token_ids
        if engine.stats.rounds > rounds:
            rounds = engine.stats.rounds
            left.append(steps.bits(batch))
    engine.drain()
    return tokens, left


def same_part(run: Run) -> None:
    """K = 0 of one and of four requests, K = 3 of one; `--runs` times each.

    K = 3 as served, too, by `--captures` engines: a first run behind a capture was once the one that went astray.
    """
    args, rehearse = run.args, bool(run.args.rehearse)
    alone = run.parallel.size == 1 and args.share > 1
    config = kimi_k25_rank(args.share, args.layers) if alone else kimi_k25(args.layers, 8192)
    config = replace(small_kimi(config) if rehearse else config, bos_token_id=0, eos_token_ids=())
    name = f"kimi, {args.layers} layers" + (f", a rank of {args.share} alone" if alone else "")
    models = Models(run, LatentSize.of(name, config))
    new, answers, prompt, plain = 10 if rehearse else NEW, list[list[int]](), list[int](), None
    for num_steps, batches in ((0, (1, 4)), (3, (1,))):
        steps, proposer = Steps(), None
        if num_steps:
            inner = Eagle3Proposer(models.network, num_steps)
            recordings = {"0": [*prompt, *answers[0]]}
            proposer = InStep(num_steps, recordings, config.vocab_size, (0.8, 0.6, 0.45), seed=3, inner=inner)
        engine = models.engine(num_steps, proposer, most=max(batches), prepare=steps.watch, in_flight=0, graphs=True)
        for batch in batches:
            tokens = repeated(run, name, engine, batch, new, steps, args.runs)
            if batch == 1 and num_steps:
                differ = sum(a != b for a, b in zip(tokens[0], answers[0], strict=True))
                run.row(f"{name}: tokens that differ from K = 0", differ, f"of {new}", 0.0, k=num_steps)
            elif batch == 1:
                answers, prompt, plain = tokens, prompts_of(engine, 1, PROMPT)[0], Answer.of(engine, new)
        steps.stop()
        if plain and num_steps:  # as served: launches stay out, and nothing is read between them
            for number in range(args.captures):  # one and three graphs of rounds, with and without garbage in them
                flying = models.engine(num_steps, proposer, most=(1, 4)[number // 2 % 2], graphs=True)
                if run.device == "cuda":
                    poison_free_memory()
                if number % 2:
                    poison_every_launch(flying)
                in_flight(run, name, flying, new, plain, max(2, args.runs // args.captures))
                del flying
                free(run.device)
        free(run.device)


@dataclass
class Answer:
    """One request's answer, and the cells of all its positions but the last: [layers, n, cell] as 16-bit words."""

    tokens: list[int]
    cells: torch.Tensor

    @staticmethod
    def of(engine: Engine, new: int) -> "Answer":
        blocks: list[int] = []
        admit = engine.scheduler.admit

        def admitted() -> Any:
            found = admit()
            for sequence in found:
                blocks.extend(sequence.blocks)
            return found

        engine.scheduler.admit = admitted  # type: ignore[method-assign]
        poison(engine)
        (answer,) = engine.generate(prompts_of(engine, 1, PROMPT), params_of(1, new, 1.0))
        engine.scheduler.admit = admit  # type: ignore[method-assign]
        return Answer(answer.token_ids, engine.runner.cache.read(blocks, PROMPT + new - 1).view(torch.int16))

    def unlike(self, right: "Answer") -> str:
        """Where it goes astray first, "" where nowhere."""
        differ = (self.cells != right.cells).any(-1).nonzero()  # [(layer, position)]
        wrong = [i for i, (a, b) in enumerate(zip(self.tokens, right.tokens, strict=True)) if a != b]
        said = [f"{len(wrong)} tokens differ, number {wrong[0]} is the first"] if wrong else []
        if len(differ):
            position = int(differ[:, 1].min())
            layer = int(differ[differ[:, 1] == position, 0].min())
            said.append(f"position {position} is the first, and there the cell of layer {layer}")
        return "; ".join(said)


def in_flight(run: Run, name: str, engine: Engine, new: int, right: Answer, runs: int) -> None:
    """The same request again and again: tokens, and the cache's cells of all layers, against those of K = 0."""
    deviating, told = 0, 0
    for number in range(runs):
        what = Answer.of(engine, new).unlike(right)
        deviating += bool(what)
        if what and told < TOLD:
            told += 1
            print(
                f"rank {run.parallel.rank}: run {number} in flight, K = {engine.config.num_steps}: {what}", flush=True
            )
    case = f"{name}, launches in flight: runs that are not K = 0's"
    run.row(case, on_any_rank(run, deviating), f"of {runs}", 0.0, k=engine.config.num_steps)


def on_any_rank(run: Run, count: int) -> int:
    """The largest of all ranks' counts."""
    parallel = run.parallel
    if parallel.size == 1:
        return count
    return max(int(one) for one in all_gather(torch.tensor([count]), [1] * parallel.size, parallel.group))


def repeated(run: Run, name: str, engine: Engine, batch: int, new: int, steps: Steps, runs: int) -> list[list[int]]:
    """Runs the same again and again; the tokens of the first run."""
    k = engine.config.num_steps
    very_first, at_first = one_run(engine, batch, new, steps)
    first, right = one_run(engine, batch, new, steps)
    # Of the first run behind the start not the rounds in which requests join, which run smaller batches, nor the last
    # ones: in their rows that nobody needs lies what was there.
    deviating, told, rounds = 0, 0, 0
    for number in range(runs):
        tokens, left = (very_first, at_first) if number == 0 else one_run(engine, batch, new, steps)
        rounds += len(left)
        told_of = range(batch - 1, len(left) - k) if number == 0 else range(len(left))
        wrong = [i for i in told_of if i < len(right) and not torch.equal(left[i], right[i])]
        deviating += bool(wrong) or tokens != first
        if wrong and told < TOLD:
            told += 1
            at = steps.where(batch, left[wrong[0]] != right[wrong[0]])
            print(f"rank {run.parallel.rank}: run {number}, K = {k}, batch {batch}, round {wrong[0]}: {at}", flush=True)
    note = f"{rounds} rounds of {runs} runs; {engine.compiles_after_ready} compiles"
    count = on_any_rank(run, deviating)
    run.row(f"{name}: runs that are not the first", count, f"of {runs}", 0.0, batch=batch, k=k, note=note)
    return first

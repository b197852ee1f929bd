"""Speculation never changes the output, on a real model: tokens, logits and cache for every K, draft and batch size.

    python tests/e2e/lossless.py --target DIR [--draft DIR] [--prompts 32] [--tokens 128] [--threads 2]
        [--files SET.jsonl ...] [--samplings greedy "T=0.8 p=0.9" T=1] [--batches 8 1] [--device auto]

For each sampling the run without speculation in the first batch size is recorded, once; every other run must repeat it:
K = 0 in the other batch sizes (1 is alone), and K = 1, 3, 5, 7 with the draft and with the oracle, in each of them.
Where the probe finds that this CPU keeps a row's bits, logits and cache of committed positions must be equal bit for
bit; elsewhere a token may differ where the recorded run all but chose it, and what follows in that answer is not
compared. On a card what is compared stays there. Ends with 1 on any difference.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from slipstream.configs.schema import Deployment
from slipstream.engine.acceptance import AcceptanceCounts
from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.device import DEVICES, resolve_device
from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine, EngineConfig
from slipstream.engine.loader import load_target
from slipstream.engine.models import TargetModel
from slipstream.engine.proposer import OracleProposer, Proposer
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.sequence import RequestOutput
from slipstream.engine.sequence import Sequence as Running
from slipstream.engine.serving.engine_build import probe_model
from slipstream.kernels.sampling import SamplingBatch, filter_logits, gumbel_noise
from slipstream.tasks.bench_client import Prompt
from slipstream.tasks.bench_prompts import benchmark_prompts

NUM_STEPS = (0, 1, 3, 5, 7)
BATCHES = (8, 1)
SAMPLINGS = {
    "greedy": SamplingParams(),
    "T=0.8 p=0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "T=1": SamplingParams(temperature=1.0),
}
GAP_ULPS = 2  # where rows are not invariant: how far apart two tokens may be that change places
_BF16_STEPS = 2.0**-7  # spacing of bf16 numbers in [1, 2)


@dataclass
class Answer:
    """tokens: n new ones. logits: n of [V], of the rows that chose them. cache: [layers, positions, 2, kv heads, d]."""

    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    cache: torch.Tensor | None = None


class WatchedEngine(Engine):
    """Keeps the logits of every committed row, and of each request its cache as it is at the end."""

    def watch(self, count: int) -> list[Answer]:
        self.answers = [Answer() for _ in range(count)]
        self._num_watched += 1  # logits are read of every launch
        return self.answers

    def _deliver(self, sequence: Running, tokens: list[int], logits: torch.Tensor | None) -> RequestOutput:
        output = super()._deliver(sequence, tokens, logits)
        assert logits is not None
        answer = self.answers[int(output.request_id)]
        answer.tokens += output.new_token_ids
        # [rows, V] -> rows of [V]; a copy, for the next launch writes there.
        answer.logits += logits[: len(output.new_token_ids)].clone()
        return output

    def _release(self, sequence: Running) -> None:
        length = sequence.length - 1  # the last token never goes through the target
        with self.steps.context():
            cache = self.runner.cache.read(sequence.blocks, length)
        self.answers[int(sequence.request.request_id)].cache = cache
        super()._release(sequence)


@dataclass(frozen=True)
class Case:
    """One run of all prompts. drafts: "none", "draft" or "oracle". batch: requests at a time."""

    sampling: str
    num_steps: int
    drafts: str
    batch: int


@dataclass
class Findings:
    """What differs from the recorded run.

    Args:
        case: what was run.
        answers, tokens, rows, cells: compared; rows are rows of logits, cells positions of the cache (all layers).
        answers_differ, rows_differ, cells_differ: of those.
        beyond_gap: differing answers whose first other token is not a near tie. Counts only without row invariance.
        largest_gap_ulps: of the first other tokens.
        largest_difference: of two logits.
        counts: rounds by accepted drafts; None at K = 0.
    """

    case: Case
    answers: int = 0
    tokens: int = 0
    rows: int = 0
    cells: int = 0
    answers_differ: int = 0
    rows_differ: int = 0
    cells_differ: int = 0
    beyond_gap: int = 0
    largest_gap_ulps: float = 0.0
    largest_difference: float = 0.0
    counts: AcceptanceCounts | None = None
    seconds: float = 0.0

    def failures(self, invariant: bool) -> list[str]:
        """Sentences, none where the case stands."""
        found = []
        if invariant and (self.answers_differ or self.rows_differ or self.cells_differ):
            found.append(
                f"{self.answers_differ} answers, {self.rows_differ} rows of logits and {self.cells_differ} cells differ"
            )
        if not invariant and self.beyond_gap:
            found.append(f"{self.beyond_gap} answers differ at a gap of more than {GAP_ULPS} ulps")
        if self.case.drafts == "oracle" and self.counts and 0 in self.counts.histogram:
            found.append(f"an accepted count never occurred: {self.counts.histogram}")
        return [f"{self.case}: {sentence}" for sentence in found]


@dataclass(frozen=True)
class Subject:
    """What is proved. prompts: token ids. draft: None leaves the oracle alone. device: where target and draft lie."""

    target: TargetModel
    draft: Eagle3Network | None
    prompts: Sequence[list[int]]
    tokens: int
    device: str = "cpu"

    def params(self, sampling: str) -> list[SamplingParams]:
        """One a prompt, each with a seed of its own."""
        one = replace(SAMPLINGS[sampling], max_tokens=self.tokens, ignore_eos=True)
        return [replace(one, seed=1000 + i) for i in range(len(self.prompts))]

    def run(self, case: Case, proposer: Proposer | None) -> tuple[list[Answer], Engine]:
        """Sizes are the engine's defaults but for the context, which is what the prompts need."""
        config = EngineConfig(
            num_steps=case.num_steps,
            max_running_requests=case.batch,
            max_context_tokens=max(map(len, self.prompts)) + self.tokens,
            device=self.device,
        )
        engine = WatchedEngine(self.target, config, proposer)
        answers = engine.watch(len(self.prompts))
        engine.generate(self.prompts, self.params(case.sampling))
        if self.device == "cuda":
            torch.cuda.synchronize()  # answers were copied on the engine's own stream
        return answers, engine


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[..., n] bf16 or fp32 each -> [...] bool; unlike ==, it tells 0 from -0 and takes NaN for itself."""
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return (a.contiguous().view(kind) == b.contiguous().view(kind)).all(dim=-1)


def gap_ulps(logits: torch.Tensor, params: SamplingParams, position: int, chosen: int, other: int) -> float:
    """How far `other` was behind `chosen` in a row of logits [V], noise included, in bf16 ulps of the top logit.

    A token that the filters removed counts by its distance to the least logit they kept.
    """
    batch = SamplingBatch.from_params([params])
    kept = filter_logits(logits[None, None], batch)[0, 0]  # [V] -> [1, 1, V] -> [V]
    scale, raw = params.temperature or 1.0, logits.float()
    if params.is_greedy:
        gap = float(raw[chosen] - raw[other])
    elif kept[other] == -torch.inf:
        gap = float(kept[kept > -torch.inf].min() * scale - raw[other])
    else:
        ids = torch.tensor([chosen, other])
        noise = gumbel_noise(batch.seed, batch.choice, torch.tensor([[position]]), ids)[0, 0]  # [1, 1, 2] -> [2]
        scores = kept[ids] + noise
        gap = float(scores[0] - scores[1]) * scale
    top = raw.max().abs().clamp(min=1e-30)
    return gap / float(torch.exp2(top.log2().floor()) * _BF16_STEPS)


def compare(
    found: Findings,
    recorded: Sequence[Answer],
    answers: Sequence[Answer],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
) -> None:
    """Fills `found` with what differs, each answer up to its first other token."""
    for old, new, prompt, p in zip(recorded, answers, prompts, params, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(old.tokens, new.tokens, strict=True)) if a != b), len(old.tokens))
        found.answers += 1
        found.tokens += same
        a, b = (torch.stack(answer.logits[: same + 1]) for answer in (old, new))  # [n, V]
        other = ~bitwise_equal(a, b)  # [n]
        found.rows += len(other)
        found.rows_differ += int(other.sum())
        if other.any():
            largest = float((a[other].float() - b[other].float()).abs().max())
            found.largest_difference = max(found.largest_difference, largest)
        assert old.cache is not None
        assert new.cache is not None
        positions = len(prompt) + min(same, len(old.tokens) - 1)  # behind the last of them there is no cell
        equal = bitwise_equal(old.cache[:, :positions].flatten(2), new.cache[:, :positions].flatten(2))  # [layers, n]
        found.cells += positions
        found.cells_differ += int((~equal.all(dim=0)).sum())
        if same < len(old.tokens):
            gap = gap_ulps(old.logits[same].cpu(), p, len(prompt) + same, old.tokens[same], new.tokens[same])
            found.answers_differ += 1
            found.beyond_gap += gap > GAP_ULPS
            found.largest_gap_ulps = max(found.largest_gap_ulps, gap)


def prove(
    subject: Subject,
    samplings: Sequence[str] = tuple(SAMPLINGS),
    steps: Sequence[int] = NUM_STEPS,
    batches: Sequence[int] = BATCHES,
) -> Iterator[Findings]:
    """Runs every case; the recorded one of each sampling (K = 0, first batch size) comes first, held against none."""
    for sampling in samplings:
        params = subject.params(sampling)
        recorded: list[Answer] = []
        for case in _cases(sampling, steps, batches, subject.draft is not None):
            proposer: Proposer | None = None
            if case.drafts == "oracle":
                texts = {str(i): p + a.tokens for i, (p, a) in enumerate(zip(subject.prompts, recorded, strict=True))}
                seed = list(SAMPLINGS).index(sampling)
                proposer = OracleProposer(case.num_steps, texts, subject.target.config.vocab_size, seed=seed)
            elif case.drafts == "draft" and subject.draft is not None:
                proposer = Eagle3Proposer(subject.draft, case.num_steps)
            began = time.perf_counter()
            answers, engine = subject.run(case, proposer)
            found = Findings(case, counts=engine.stats.acceptance[case.num_steps] if proposer else None)
            found.seconds = time.perf_counter() - began
            if recorded:
                compare(found, recorded, answers, subject.prompts, params)
            else:
                recorded = answers
            yield found


def _cases(sampling: str, steps: Sequence[int], batches: Sequence[int], with_draft: bool) -> Iterator[Case]:
    for size in batches:
        yield Case(sampling, 0, "none", size)
    for k in steps:
        for drafts in ("draft", "oracle") if with_draft else ("oracle",):
            for size in batches if k else ():
                yield Case(sampling, k, drafts, size)


def mixed_prompts(count: int, files: Sequence[Path] = ()) -> list[Prompt]:
    """`count` chats of one turn, of the files in turn (each mixed by category); without files held-out ones of ours."""
    if not files:
        return benchmark_prompts(Deployment(benchmark={"num_prompts": count}))
    shares = [len(range(i, count, len(files))) for i in range(len(files))]
    sets = [
        benchmark_prompts(Deployment(benchmark={"prompts": str(file), "num_prompts": share}))
        for file, share in zip(files, shares, strict=True)
        if share
    ]
    turns = zip_longest(*sets)
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def table_of(findings: Sequence[Findings], title: str) -> Table:
    """One row a case."""
    table = Table(title=title)
    columns = ("sampling", "K", "drafts", "batch", "answers", "tokens", "logit rows", "cache cells", "largest gap")
    for name in (*columns, "rounds that accepted 0..K", "accept length", "s"):
        table.add_column(name, justify="left" if name in ("sampling", "drafts") else "right")
    for f in findings:
        case, counts = f.case, f.counts
        compared = [f"{f.answers_differ}/{f.answers}", f"{f.tokens}", f"{f.rows_differ}/{f.rows}"]
        compared += [f"{f.cells_differ}/{f.cells}", f"{f.largest_gap_ulps:.1f}" if f.answers_differ else "-"]
        table.add_row(
            *(case.sampling, str(case.num_steps), case.drafts, str(case.batch)),
            *(compared if f.answers else ["recorded", *["-"] * 4]),
            " ".join(map(str, counts.histogram)) if counts else "-",
            f"{counts.accept_length:.2f}" if counts else "-",
            f"{f.seconds:.0f}",
        )
    return table


def say(text: str) -> None:
    """Prints at once, also into a file that somebody follows."""
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Proves that speculation never changes the output.")
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--draft", type=Path, help="EAGLE-3 directory; without it the oracle alone proposes")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--files", type=Path, nargs="+", default=[], help="prompt sets; default: held-out ones of ours")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="requests at a time")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--samplings", nargs="+", choices=list(SAMPLINGS), default=list(SAMPLINGS))
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    device = resolve_device(args.device)
    target = load_target(args.target, EngineConfig().dtype, device)
    draft = None
    if args.draft:
        draft = load_draft(args.draft, torch.bfloat16, target_embedding=target.embed_tokens.weight).eval()
    chat = ChatTokenizer(args.target)
    chosen = mixed_prompts(args.prompts, args.files)
    prompts = [chat.encode_chat(list(p.messages), add_generation_prompt=True) for p in chosen]
    probe = probe_model(target, draft)
    say(f"row-invariant: {probe.invariant} ({probe.detail})")
    findings: list[Findings] = []
    for found in prove(Subject(target, draft, prompts, args.tokens, device), args.samplings, batches=args.batches):
        findings.append(found)
        say(f"{found.case}: {found.answers_differ} of {found.answers} answers differ, {found.seconds:.0f} s")
    promise = "bit for bit" if probe.invariant else f"by gap, at most {GAP_ULPS} ulps"
    console = Console(width=160) if not sys.stdout.isatty() else Console()
    console.print(table_of(findings, f"differences from K = 0 in a batch of {args.batches[0]}, {promise}"))
    failures = [sentence for f in findings for sentence in f.failures(probe.invariant)]
    for sentence in failures:
        say(f"FAILED {sentence}")
    say(f"{len(findings)} runs, {sum(f.seconds for f in findings):.0f} s, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
